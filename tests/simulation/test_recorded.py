"""Journals become sessions: what the pool saw of its clients is what the twin plays."""

import pytest

from shoal.kernel import InvalidInput
from shoal.pool import Endpoint, EndpointState, Outcome, Request, Signals
from shoal.prefix import read_blocks
from shoal.routing import Arrived, Ended, Event, Recorded
from shoal.routing.events import EndpointJoined, LoadSeen
from shoal.routing.journal import MAGIC, Opening, Step, encode
from shoal.simulation import ClusterConfig, NodeConfig, Session, Turn, read_experiment, recorded
from shoal.simulation.cluster import Cluster
from shoal.simulation.experiment import Trace, nodes_of, run_experiment, sessions_of
from shoal.simulation.observed import observe
from shoal.simulation.prompts import Prompt

CHATS = """
workload: {shape: multi-turn, sessions: 16, turns: [3, 5], think_s: 0.5, system_tokens: 1100}
fleet: [{count: 2}]
arrivals: {kind: poisson, rate_per_s: 2}
"""


def written(steps: list[tuple[float, Event]], part: int = 0, run: str = "a") -> bytes:
    frames = [encode(Opening(0, "", False, part, run)), *(encode(Step(now, event, [])) for now, event in steps)]
    return MAGIC + b"".join(frames)


def arrived(number: int, at: float, prompt: Prompt, session: str = "s", **more: object) -> tuple[float, Event]:
    request = Request(id=f"r{number}", prompt_tokens=prompt.tokens, session_id=session, **more)  # type: ignore[arg-type]
    return at, Arrived(request, prompt.hashes())


def ended(number: int, at: float, tokens: int | None) -> list[tuple[float, Event]]:
    return [(at, Ended(f"r{number}")), (at + 0.01, Recorded(f"r{number}", Outcome(completion_tokens=tokens)))]


def turns(session: Session) -> list[Turn]:
    return [turn for turn in session.turns() if isinstance(turn, Turn)]


def shared_tokens(one: Prompt, two: Prompt) -> int:
    return 16 * int(sum(a == b for a, b in zip(one.chain, two.chain, strict=False)))


OPENING = Prompt.empty(0).extend(1, 1000)
GROWN = OPENING.extend(2, 1000)


def test_a_session_keeps_its_pauses_lengths_and_all_that_its_prompts_share() -> None:
    steps = [
        arrived(1, 100.0, OPENING, tenant_id="acme", max_output_tokens=64),
        *ended(1, 103.0, 20),
        arrived(2, 104.5, GROWN, tenant_id="acme"),
        *ended(2, 107.0, 30),
    ]
    (session,) = recorded.journal([written(steps)], rate=2.0)
    first, second = turns(session)
    assert (session.arrives_s, session.tenant, session.id) == (0.0, "acme", "s")
    assert [(turn.prompt.tokens, turn.output_tokens, turn.think_s) for turn in (first, second)] == [
        (1000, 20, 0.0),
        (2000, 30, 1.5),
    ]
    assert first.max_tokens == 64
    # Hashes say what is shared to 960 tokens; that a session grows says the rest.
    assert shared_tokens(first.prompt, second.prompt) == 992


@pytest.mark.parametrize(("answered", "is_part"), [(1000, True), (1001, False)])
def test_an_answer_is_part_of_a_prompt_that_grew_by_at_least_as_much(answered: int, is_part: bool) -> None:
    steps = [arrived(1, 0.0, OPENING), *ended(1, 1.0, answered), arrived(2, 2.0, GROWN), *ended(2, 3.0, 5)]
    (session,) = recorded.journal([written(steps)])
    first, second = turns(session)
    assert first.blocks(16) == (second if is_part else first).prompt.blocks(16)
    assert second.blocks(16) == second.prompt.blocks(16)


def test_an_answer_is_not_looked_for_in_a_prompt_that_begins_otherwise() -> None:
    other = Prompt.empty(0).extend(4, 3000)
    steps = [arrived(1, 0.0, OPENING), *ended(1, 1.0, 20), arrived(2, 2.0, other), *ended(2, 3.0, 5)]
    (session,) = recorded.journal([written(steps)])
    assert [turn.whole for turn in turns(session)] == [None, None]


def test_prompts_of_different_sessions_share_what_their_hashes_say() -> None:
    other = OPENING.extend(3, 1000)
    steps = [arrived(1, 0.0, OPENING, "a"), arrived(2, 1.0, other, "b"), arrived(3, 2.0, GROWN, "c")]
    prompts = [turns(session)[0].prompt for session in recorded.journal([written(steps)])]
    assert shared_tokens(prompts[0], prompts[1]) == shared_tokens(prompts[1], prompts[2]) == 960
    common = sum(a == b for a, b in zip(read_blocks(other.hashes()), read_blocks(GROWN.hashes()), strict=False))
    again = [read_blocks(prompt.hashes()).tolist() for prompt in prompts]
    assert sum(a == b for a, b in zip(again[1], again[2], strict=False)) == common


def test_requests_of_a_session_that_overlap_are_not_made_to_wait() -> None:
    steps = [arrived(1, 0.0, OPENING), arrived(2, 1.0, GROWN), *ended(1, 5.0, 3), *ended(2, 6.0, 3)]
    sessions = recorded.journal([written(steps)])
    assert [(session.arrives_s, len(turns(session))) for session in sessions] == [(0.0, 1), (1.0, 1)]


@pytest.mark.parametrize("limit", [1, 2, 9, 0])
def test_a_limit_behind_a_skip_counts_sessions_whatever_they_hold(limit: int) -> None:
    steps: list[tuple[float, Event]] = []
    for number, session in enumerate("abcabcabc"):
        steps += [arrived(number, float(number), OPENING, session), *ended(number, number + 0.5, 3)]
    found = sessions_of(Trace(path="x", format="journal", limit=limit, skip=1), [written(steps)])
    assert [(each.id, len(turns(each))) for each in found] == [("b", 3), ("c", 3)][: limit or None]


def test_an_answer_of_unknown_length_is_as_long_as_is_usual() -> None:
    steps = [arrived(n, n, OPENING, "") for n in range(4)]
    steps += [*ended(0, 9.0, 10), *ended(1, 9.0, 40), *ended(2, 9.0, 50), *ended(3, 9.0, None)]
    assert [turns(each)[0].output_tokens for each in recorded.journal([written(steps)])] == [10, 40, 50, 40]


def test_a_record_may_come_with_the_end_of_a_request_before_or_after_it() -> None:
    steps = [arrived(n, n, OPENING, "") for n in range(3)]
    known = Outcome(completion_tokens=11)
    steps += [(4.0, Ended("r0", known)), (5.0, Recorded("r1", known)), (6.0, Ended("r1")), (6.0, Ended("r2"))]
    steps.append((6.1, Recorded("r2", known)))
    assert [turns(each)[0].output_tokens for each in recorded.journal([written(steps)])] == [11, 11, 11]


def test_parts_of_a_journal_are_read_in_their_order_and_an_empty_one_is_refused() -> None:
    parts = [
        written([*ended(1, 2.0, 7), arrived(2, 3.0, GROWN, "b")], part=1),
        written([arrived(1, 1.0, OPENING, "a")], part=0),
    ]
    sessions = recorded.journal(parts)
    assert [turns(each)[0].output_tokens for each in sessions] == [7, 7]
    with pytest.raises(InvalidInput, match="no request"):
        recorded.journal([written([])])
    with pytest.raises(InvalidInput, match="not a Shoal journal"):
        recorded.journal([b"nothing"])


def test_a_run_that_is_recorded_and_played_again_finds_as_much_in_its_caches() -> None:
    steps: list[tuple[float, Event]] = []

    experiment = read_experiment(CHATS, "test")
    result, _ = run_experiment(experiment, 1)
    # The same arrivals again, written down.
    from shoal.kernel import Chance
    from shoal.simulation.workloads import MultiTurn

    assert isinstance(experiment.workload, MultiTurn)
    chance = Chance(1)
    made = experiment.arrivals.spread(experiment.workload.make(chance.stream("workload")), chance.stream("arrivals"))
    nodes: tuple[NodeConfig, ...] = nodes_of(experiment)
    recorder = Cluster(
        ClusterConfig(nodes=nodes, seed=1), on_step=lambda _number, now, event, _commands: steps.append((now, event))
    )
    recorder.run(made)
    played, _ = run_experiment(experiment, 1, sessions=recorded.journal([written(steps)]))
    assert played.requests == result.requests
    assert played.prompt_tokens == result.prompt_tokens
    assert played.hit_ratio == pytest.approx(result.hit_ratio, abs=0.01)
    assert played.ttft_mean_s == pytest.approx(result.ttft_mean_s, rel=0.1)


def test_hashes_that_are_cut_and_times_that_cannot_be_are_refused() -> None:
    cut = (1.0, Arrived(Request(id="r1", prompt_tokens=900), b"123"))
    with pytest.raises(InvalidInput, match="are cut"):
        recorded.journal([written([cut])])
    far = [arrived(1, 0.0, OPENING, "a"), arrived(2, 1e300, OPENING, "b")]
    with pytest.raises(InvalidInput, match="more than 100 days"):
        recorded.journal([written(far)])


def test_lengths_that_no_prompt_has_are_cut() -> None:
    huge = Request(id="r1", prompt_tokens=1 << 60, max_output_tokens=-5)
    (session,) = recorded.journal([written([(0.0, Arrived(huge, OPENING.hashes())), *ended(1, 1.0, 1 << 60)])])
    (turn,) = turns(session)
    assert (turn.prompt.tokens, turn.output_tokens, turn.max_tokens) == (4_000_000, 4_000_000, 0)


def test_a_request_that_ended_before_it_came_keeps_nobody_waiting() -> None:
    steps = [arrived(1, 10.0, OPENING), *ended(1, -1e308, 5), arrived(2, 12.0, OPENING), *ended(2, 13.0, 5)]
    (session,) = recorded.journal([written(steps)])
    assert [turn.think_s for turn in turns(session)] == [0.0, 2.0]


def test_what_no_engine_can_have_done_is_taken_as_far_as_one_can() -> None:
    address = "10.0.0.1:80"
    endpoint = EndpointJoined(Endpoint(id="e", address=address), EndpointState.READY)
    huge = 1 << 60
    outcome = Outcome(
        status=200, served_address=address, ttft_s=1e300, duration_s=float("nan"),
        prompt_tokens=huge, cached_tokens=huge, completion_tokens=huge,
    )  # fmt: skip
    signals = Signals(num_blocks=-5, block_size_tokens=-16)
    pool = observe([written([(0.0, endpoint), (0.5, LoadSeen("e", signals)), arrived(1, 1.0, OPENING),
                             (2.0, Recorded("r1", outcome))])])  # fmt: skip
    (served,) = pool.seen["e"].served
    assert (served.prompt_tokens, served.cached_tokens, served.output_tokens) == (4_000_000,) * 3
    assert (served.ttft_s, served.total_s) == (None, None)
    assert (pool.seen["e"].num_blocks, pool.seen["e"].block_size) == (0, 0)
