"""One script under two hosts with one configuration file: in virtual time, and through a pool with a real data plane.

Owns the two ways of asking.  What came of a request is told alike by both: by its explanation, which is the router's
own, and by the reason for which it was refused.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from shoal.engine import PROFILES, EngineConfig
from shoal.routing import Command, Event, Refuse
from shoal.simulation import Cluster, ClusterConfig, NodeConfig, Prompt, Session, Turn
from tests.hosts.supervisor.pool_rig import body, until
from tests.scenarios.pools import ScenarioPool

CONFIGS = Path(__file__).parent / "configs"
_WORD_BYTES, _TOKEN_BYTES = 5, 4
_NONE: Mapping[str, str] = MappingProxyType({})


class Ask(NamedTuple):
    """One request.

    at_s: when it comes, in virtual time.  session: in whose name, "" for its own.  prompt: equal names are equal
    prompts, "" for one of its own.  words: of the prompt, 5 bytes each.
    """

    name: str
    at_s: float = 0.0
    session: str = ""
    headers: Mapping[str, str] = _NONE
    prompt: str = ""
    words: int = 50
    output_tokens: int = 4

    @property
    def sent(self) -> dict[str, str]:
        """All of its headers."""
        return {"x-request-id": self.name, "x-session-id": self.session or self.name, **self.headers}

    @property
    def text(self) -> str:
        """Its prompt."""
        return f"{zlib.crc32((self.prompt or self.name).encode()) % 10_000:04} " * self.words


class Told(NamedTuple):
    """What came of it.  refused: the reason, "" when it was served.  explained: as `shoal explain` does, empty when it
    was refused."""

    refused: str
    explained: dict[str, Any]


def order(told: dict[str, Told]) -> list[str]:
    """Those that were served, in the order in which they went to an engine."""
    served = [name for name, each in told.items() if not each.refused]
    return sorted(served, key=lambda name: float(told[name].explained["dispatched_at"]))


def refused(told: dict[str, Told]) -> dict[str, str]:
    """Those that were not, and why."""
    return {name: each.refused for name, each in told.items() if each.refused}


def in_virtual_time(config: Path, asks: Sequence[Ask], engines: int = 1) -> dict[str, Told]:
    """Ask embedded engines, each at its time."""
    reasons: dict[str, str] = {}

    def watch(number: int, now: float, event: Event, commands: list[Command]) -> None:
        reasons.update({each.request_id: str(each.refusal.reason) for each in commands if isinstance(each, Refuse)})

    engine = EngineConfig(profile=PROFILES["tiny"])
    nodes = tuple(NodeConfig(id=f"e{number}", engine=engine) for number in range(engines))
    cluster = Cluster(ClusterConfig(nodes=nodes, router=config.read_text()), on_step=watch)
    cluster.run([_session(ask) for ask in asks])
    find = cluster.routers[0].explanations.find
    # They are numbered as they come.
    names = {ask.name: f"r{number}" for number, ask in enumerate(asks, 1)}
    return {name: Told(reasons[id], {}) if id in reasons else Told("", find(id) or {}) for name, id in names.items()}


def _session(ask: Ask) -> Session:
    tokens = ask.words * _WORD_BYTES // _TOKEN_BYTES
    prompt = Prompt.empty(0).extend(zlib.crc32((ask.prompt or ask.name).encode()), tokens)
    turns = partial(iter, (Turn(prompt, ask.output_tokens),))
    return Session(ask.session or ask.name, turns, ask.at_s, headers=ask.sent)


def through(running: ScenarioPool, ask: Ask, *, is_streaming: bool = False) -> Told:
    """Ask a running pool, and wait until the answer has ended."""
    answer = running.post(body(ask.text, ask.output_tokens, is_streaming), ask.sent)
    if answer.is_success:
        return Told("", running.explained(ask.name))
    error = answer.json()["error"]["code"] or ""
    return Told(answer.headers.get("x-llm-d-request-dropped-reason", error.replace("_", "-")), {})


def as_a_crowd(running: ScenarioPool, asks: Sequence[Ask], then: Callable[[], None]) -> dict[str, Told]:
    """Ask a running pool one after the other, without waiting for answers.  then: lets them come."""
    with ThreadPoolExecutor(len(asks)) as clients:
        sent = []
        for ask in asks:
            sent.append(clients.submit(through, running, ask))
            until(lambda: _held(running) + sum(each.done() for each in sent) == len(sent), why=running.said)
        then()
        return {ask.name: each.result(60.0) for ask, each in zip(asks, sent, strict=True)}


def _held(running: ScenarioPool) -> int:
    """Requests that wait or run."""
    snapshot = running.admin("/snapshot").json()
    return int(snapshot["inflight"] + snapshot["flow"]["requests"])
