"""Laws of the twin for every policy: no decision knows how long an answer will be.

Tried in two ways: nothing that a router is told before a request has ended holds its length, and decisions are the same
when only the lengths of answers that nobody has seen yet are others.
"""

from functools import partial
from pathlib import Path

import msgspec
import pytest

from shoal.kernel import ConfigError
from shoal.routing import Command, Event, Forward, Recorded, Router
from shoal.routing.config import load
from shoal.simulation import Cluster, ClusterConfig, Fork, Prompt, Session, Turn
from shoal.simulation.experiment import nodes_of, read_experiment
from shoal.simulation.loop import Rank

EXAMPLES = Path(__file__).parents[2] / "examples"
NODES = nodes_of(read_experiment("workload: {shape: hot}\nfleet: [{count: 4, labels: {tier: chat}}]", "test"))
# Of no other figure of these runs: token counts, times in milliseconds, sizes in bytes.
SECRET = 123_457


def policies() -> list[Path]:
    """Every configuration that is shipped and that a router can run."""
    found = []
    for path in sorted([*(EXAMPLES / "policies").glob("*.yaml"), *(EXAMPLES / "config").glob("*.yaml")]):
        try:
            load(path.read_text(), path.name)
        except ConfigError:  # a file of endpoints, not of a router
            continue
        found.append(path)
    return found


class Spy:
    """A router that notes what it is told and what it decides."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self.told: list[Event] = []
        self.decided: list[tuple[str, tuple[str, ...]]] = []

    def handle(self, event: Event, now: float) -> list[Command]:
        self.told.append(event)
        made = self._router.handle(event, now)
        self.decided += [(each.request_id, each.endpoints) for each in made if isinstance(each, Forward)]
        return made

    def __getattr__(self, name: str) -> object:
        return getattr(self._router, name)


class Watched(Cluster):
    """A cluster whose router is watched."""

    def __init__(self, router: str) -> None:
        super().__init__(ClusterConfig(nodes=NODES, router=router, seed=1))
        self.spy = Spy(self.routers[0])
        self.routers[0] = self.spy  # type: ignore[call-overload]


def asks(lengths: list[int]) -> list[Session]:
    """Requests in quick succession with prompts that share and that do not, of several sessions and tenants."""
    root = Prompt.empty(0)
    sessions = []
    for n, length in enumerate(lengths):
        prompt = root.extend(n % 3 + 1, 1500).extend(100 + n % 7, 400 + 37 * n)
        whole = prompt.extend(1000 + n, length)
        steps: tuple[Turn | Fork, ...] = (Turn(prompt, length, whole=whole),)
        sessions.append(Session(f"s{n % 11}", partial(iter, steps), arrives_s=0.02 * n, tenant=f"t{n % 3}"))
    return sessions


def run_until(cluster: Cluster, sessions: list[Session], until_s: float) -> None:
    """Run a part only: what is planned behind it does not happen."""

    class Over(Exception):
        pass

    def over() -> None:
        raise Over

    cluster.loop.at(until_s, Rank.WORLD, over)
    with pytest.raises(Over):
        cluster.run(sessions)


@pytest.mark.parametrize("path", [None, *policies()], ids=lambda path: path.stem if path else "default-profile")
def test_no_decision_depends_on_the_length_of_an_answer_that_has_not_ended(path: Path | None) -> None:
    router = path.read_text() if path else ""
    short, long = Watched(router), Watched(router)
    # 80 requests within 1.6 s; the shortest of these answers takes longer.
    run_until(short, asks([1000 + 13 * n for n in range(80)]), 1.7)
    run_until(long, asks([9000 - 57 * n for n in range(80)]), 1.7)
    assert len(short.spy.decided) > 20
    assert short.spy.decided == long.spy.decided
    assert short.samples == long.samples == []


def test_nothing_that_a_router_is_told_holds_a_length_before_its_request_has_ended() -> None:
    cluster = Watched("")
    run_until(cluster, asks([SECRET] * 40), 30.0)
    assert len(cluster.spy.told) > 200
    said = [msgspec.json.encode(event) for event in cluster.spy.told]
    assert not any(str(SECRET).encode() in each for each in said)


def test_what_was_said_is_told_when_a_request_has_ended() -> None:
    cluster = Watched("")
    cluster.run(asks([77] * 5))
    recorded = [event.outcome.completion_tokens for event in cluster.spy.told if isinstance(event, Recorded)]
    assert recorded
    assert set(recorded) == {77}
