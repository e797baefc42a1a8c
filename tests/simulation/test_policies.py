"""The files in examples/policies: each loads, runs in the twin, and sees nothing that a router cannot see."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest

from shoal.cli import main
from shoal.routing.config import load
from shoal.simulation import read_experiment, run_experiment
from shoal.simulation.prompts import Prompt
from shoal.simulation.sessions import Session, Turn

FOLDER = Path(__file__).parents[2] / "examples/policies"
FILES = {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.yaml"))}
POLICIES = pytest.mark.parametrize("policy", ["default", *FILES])

CHATS = """
workload: {shape: multi-turn, sessions: 24, turns: [2, 4], systems: 3, think_s: 0.5}
fleet: [{count: 3}]
arrivals: {concurrency: 12}
"""
OPEN = "{fleet: [{count: 4}], workload: {shape: hot}}"
WINDOW_S = 4.0


def text_of(policy: str) -> str:
    return FILES.get(policy, "")


@pytest.mark.parametrize("policy", FILES)
def test_a_policy_is_accepted_and_changes_the_profile(policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(FOLDER / f"{policy}.yaml")]) == 0
    assert "warning" not in capsys.readouterr().err
    assert load(FILES[policy], "").policy.profile != load("", "").policy.profile


@POLICIES
def test_a_policy_serves_all_and_does_the_same_again(policy: str) -> None:
    first, again = (run_experiment(read_experiment(CHATS, "test"), 1, router=text_of(policy)) for _ in range(2))
    assert first[0].failed == 0
    assert sum(first[0].served.values()) == first[0].requests > 48
    assert msgspec.json.encode(first[0]) == msgspec.json.encode(again[0])


@pytest.mark.parametrize("policy", [name for name in FILES if not load(FILES[name], "").policy.profile.filters])
def test_a_policy_without_filters_loses_only_what_is_cut_when_engines_die_and_come_back(policy: str) -> None:
    """What a filter drops is no fallback either, so a request whose only holder dies is lost."""
    incident = CHATS + "incidents: [{at_s: 2, what: kill, endpoint: e1}, {at_s: 6, what: revive, endpoint: e1}]\n"
    _, samples = run_experiment(read_experiment(incident, "test"), 1, router=text_of(policy))
    failed = [sample for sample in samples if sample.is_failed]
    assert all(sample.arrived_s + sample.duration_s == pytest.approx(2.0) for sample in failed)
    assert len(failed) < len(samples) / 4


def once(prompt: Prompt, output_tokens: int) -> Iterator[Turn]:
    yield Turn(prompt, output_tokens)


def placed(policy: str, output_tokens: list[int]) -> list[str]:
    """Where each of some requests goes; answers above 1,000 tokens all end after the last one came."""
    roots = [Prompt.empty(0).extend(1000 + number, 2000) for number in range(5)]
    sessions = [
        Session(
            f"s{number % 20}",
            partial(once, roots[number * number % 5].extend(number, 100 + number), tokens),
            arrives_s=number * WINDOW_S / len(output_tokens),
        )
        for number, tokens in enumerate(output_tokens)
    ]
    result, samples = run_experiment(read_experiment(OPEN, "test"), 1, router=text_of(policy), sessions=sessions)
    assert result.failed == 0
    ends_s = min(sample.arrived_s + sample.duration_s for sample in samples)
    assert (ends_s > WINDOW_S) == (min(output_tokens) > 1_000)
    return [sample.endpoint for sample in sorted(samples, key=lambda sample: sample.arrived_s)]


@POLICIES
def test_a_policy_does_not_see_how_long_an_answer_will_be(policy: str) -> None:
    """While nothing has ended, nothing tells one answer from another: neither length may change a choice."""
    short = placed(policy, [1_500] * 60)
    assert short == placed(policy, [1_500 + 97 * (number * 7 % 31) for number in range(60)])


def test_when_answers_have_ended_their_length_does_show() -> None:
    """The test above could fail: of answers that end between the choices, lengths do change them."""
    short = placed("least-request", [20] * 60)
    assert short != placed("least-request", [20 + 37 * (number * 7 % 31) for number in range(60)])


@pytest.mark.parametrize("path", sorted((FOLDER.parent / "twin").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_experiments_to_compare_them_on_are_read(path: Path) -> None:
    assert read_experiment(path.read_text(), str(path)).name == path.stem
