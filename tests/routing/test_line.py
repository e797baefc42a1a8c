import numpy as np
import pytest

from shoal.routing.line import Line, Place, Turn
from shoal.routing.pace import Pace


def test_one_who_finds_nobody_is_measured_from_its_arrival() -> None:
    line = Line()
    first = line.join(1.0, 100.0)
    assert line.reach(first, 1.5, 120.0) == Turn(120.0, 0.5, was_idle=True)
    later = line.join(2.0, 300.0)
    assert line.reach(later, 2.25, 300.0) == Turn(300.0, 0.25, was_idle=True)


def test_one_who_waited_is_measured_from_the_first_token_before_its_own() -> None:
    line = Line()
    places = [line.join(1.0, 100.0) for _ in range(3)]
    line.reach(places[0], 1.5, 100.0)
    assert line.reach(places[1], 1.75, 400.0) == Turn(400.0, 0.25, was_idle=False)
    assert line.reach(places[2], 1.85, 50.0) == Turn(50.0, pytest.approx(0.1), was_idle=False)


def test_first_tokens_of_one_step_are_one_turn_with_the_work_of_all() -> None:
    line = Line()
    before, *places = (line.join(1.0, tokens) for tokens in (100.0, 400.0, 50.0, 70.0, 900.0))
    line.reach(before, 1.5, 100.0)
    line.reach(places[3], 2.5, 900.0)
    assert line.reach(places[1], 1.7503, 60.0) == Turn(460.0, pytest.approx(0.2503), was_idle=False)
    assert line.reach(places[2], 1.7506, 70.0) == Turn(530.0, pytest.approx(0.2506), was_idle=False)
    assert line.reach(places[0], 1.75, 400.0) == Turn(530.0, 0.25, was_idle=False)


def test_a_step_that_found_nobody_began_when_the_first_of_it_came() -> None:
    line = Line()
    earlier = line.join(0.5, 80.0)
    line.reach(earlier, 0.6, 80.0)
    first, second = line.join(1.0, 300.0), line.join(1.1, 200.0)
    line.reach(first, 1.5, 300.0)
    assert line.reach(second, 1.5, 200.0) == Turn(500.0, 0.5, was_idle=True)


@pytest.mark.parametrize("samples", [1, 4, 16])
def test_prompts_that_come_at_once_and_share_steps_teach_the_speed_of_the_engine(samples: int) -> None:
    true_s, chance = 4e-5, np.random.default_rng(1)
    line, pace = Line(), Pace()
    for step in range(30):
        lengths = chance.uniform(500.0, 3_000.0, 4)
        tokens = [length if n == 0 else 16.0 for length in lengths for n in range(samples)]
        first_at = step + sum(tokens) * true_s
        records = [(first_at + float(chance.exponential(0.1)), line.join(step, each), each) for each in tokens]
        for _, place, each in sorted(records, key=lambda record: record[0]):
            turn = line.reach(place, first_at, each)
            if turn is not None:
                pace.learn(turn.tokens, turn.seconds, 1e-4)
    assert 0.9 * true_s < pace.s_per_token < 1.3 * true_s


def test_work_ahead_of_which_nothing_is_known_yet_counts_as_believed() -> None:
    line = Line()
    known, unknown, own = (line.join(1.0, tokens) for tokens in (100.0, 250.0, 70.0))
    line.reach(known, 1.5, 100.0)
    assert line.reach(own, 2.5, 80.0) == Turn(330.0, 1.0, was_idle=False)
    unknown.tokens = 0.0
    assert line.reach(own, 2.5, 80.0) == Turn(80.0, 1.0, was_idle=False)


def test_nothing_is_said_where_it_cannot_be_told_who_was_ahead() -> None:
    line = Line()
    line.join(1.0, 250.0)
    own = line.join(1.0, 70.0)
    assert line.reach(own, 2.5, 80.0) is None


def test_one_who_is_over_is_not_ahead_of_who_came_later_though_its_first_token_was_never_told() -> None:
    line = Line()
    plain = line.join(1.0, 4_000.0)
    during = line.join(1.5, 100.0)
    plain.left_at = 2.0
    assert line.reach(during, 2.5, 100.0) is None
    after = line.join(3.0, 100.0)
    assert line.reach(after, 3.1, 100.0) == Turn(100.0, pytest.approx(0.1), was_idle=True)


def test_one_who_was_overtaken_does_not_count_as_ahead() -> None:
    line = Line()
    slow, own = line.join(1.0, 4_000.0), line.join(1.0, 50.0)
    line.reach(slow, 3.0, 4_000.0)
    assert line.reach(own, 1.2, 50.0) == Turn(50.0, pytest.approx(0.2), was_idle=True)


def test_a_place_that_is_long_gone_says_nothing_and_the_line_stays_short() -> None:
    line = Line()
    old = line.join(1.0, 100.0)
    for _ in range(10_000):
        line.join(1.0, 1.0)
    assert line.reach(old, 2.0, 100.0) is None
    assert len(line._places) <= 256


@pytest.mark.parametrize("load", [0.5, 0.9, 1.1])
@pytest.mark.parametrize("answer_s", [0.1, 3.0])
def test_the_speed_of_an_engine_is_learned_at_any_load_though_half_of_the_hits_are_misses(
    load: float, answer_s: float
) -> None:
    """Records come when answers end; until then what is ahead counts with a belief that is often too low.

    What is not known ahead makes an engine seem slower, up to twice here, and never faster.
    """
    true_s, base_s, chance = 4e-5, 0.02, np.random.default_rng(3)
    line, pace = Line(), Pace()
    now = is_free_at = 0.0
    running: list[tuple[float, Place, float, float]] = []
    for _ in range(400):
        now += float(chance.exponential(2_025.0 * true_s / load))
        for ended in sorted(running, key=lambda each: each[0]):
            end_at, place, first_at, tokens = ended
            if end_at <= now:
                running.remove(ended)
                turn = line.reach(place, first_at, tokens)
                if turn is not None:
                    pace.learn(turn.tokens, pace.worked_s(turn), 1e-4)
        tokens = float(chance.choice([50.0, 4_000.0]))
        place = line.join(now, tokens if chance.random() < 0.5 else 50.0)
        is_free_at = max(is_free_at, now) + tokens * true_s
        first_at = is_free_at + base_s
        running.append((first_at + float(chance.exponential(answer_s)), place, first_at, tokens))
    assert pace.records > 50
    assert 0.75 * true_s < pace.s_per_token < 2.0 * true_s
