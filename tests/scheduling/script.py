"""Scripted views of a fleet, and a small closed-loop model of one, for tests of scheduling."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from shoal.kernel import Chance
from shoal.pool import Decision, Endpoint, FleetView, Refusal, Request
from shoal.scheduling import Filter, Named, Policy, Profile, Scheduler, Scorer
from shoal.scheduling.expected_wait import ExpectedWaitScorer
from shoal.scheduling.pickers import MaxScorePicker

NAN = float("nan")


def view(count: Any = 0, *, labels: Any = (), signals: Any = (), chain: Any = (), **columns: Any) -> FleetView:
    """A fleet `e0, e1, ...`.  labels: a dict each.  signals: a Signals or None each.  columns: numbers each.

    chain: of the prompt, (hash, tokens) each.
    """
    count = count or max(len(labels), len(signals), *(len(column) for column in columns.values()), 0)
    endpoints = tuple(
        Endpoint(id=f"e{at}", address=f"10.0.0.{at}:8000", labels=labels[at] if labels else {}) for at in range(count)
    )
    arrays: dict[str, Any] = {name: np.array(column, np.float64) for name, column in columns.items()}
    hashes = np.array([hash for hash, _ in chain], np.uint64)
    reach = (0, *(tokens for _, tokens in chain))
    return FleetView(endpoints, arrays, list(signals) or [None] * count, None, frozenset(), hashes, reach)


def chain(*letters: str, step: int = 64) -> list[tuple[int, int]]:
    """A prompt of blocks of `step` tokens, each named by a letter or more: the same beginnings have the same hashes."""
    return [
        (int.from_bytes("".join(letters[: n + 1]).encode()[:8].ljust(8, b"."), "little"), step * (n + 1))
        for n in range(len(letters))
    ]


def sent(plugin: Any, seen: FleetView, endpoint: str, now: float = 0.0, tokens: int = 0, name: str = "r") -> None:
    """Tell a plugin that a request went to an endpoint."""
    decision = Decision("test", (endpoint,), (endpoint,), (), [1.0], ())
    plugin.dispatched(Request(id=name, model="m", prompt_tokens=tokens), seen, decision, now)


def request(prompt_tokens: int = 0, *, headers: dict[str, str] | None = None, **fields: Any) -> Request:
    return Request(id="r", model="m", prompt_tokens=prompt_tokens, headers=headers or {}, **fields)


def scheduler(
    *plugins: object, weights: Sequence[float] = (), picker: Any = None, fallbacks: int = 2, seed: int = 1
) -> Scheduler:
    """A scheduler of one profile; names are `plugin0, plugin1, ...`."""
    named = [Named(f"plugin{at}", plugin, (*weights, *[1.0] * 9)[at]) for at, plugin in enumerate(plugins)]
    filters: tuple[Any, ...] = tuple(each for each in named if isinstance(each.plugin, Filter))
    scorers: tuple[Any, ...] = tuple(each for each in named if isinstance(each.plugin, Scorer))
    profile = Profile("test", filters, scorers, Named("picker", picker or MaxScorePicker()))
    return Scheduler(Policy(profile, fallbacks), Chance(seed))


def decide(made: Scheduler, asked: Request, seen: FleetView, now: float = 0.0) -> Decision:
    decision = made.schedule(asked, seen, now)
    assert not isinstance(decision, Refusal), decision
    return decision


class Pool:
    """Engines that prefill one request at a time and decode many, driven by a scheduler with books like the router's.

    What was sent to an engine counts as cached there at once.  Speeds are seconds of prefill per token.
    """

    def __init__(self, speeds: Sequence[float], made: Scheduler | None = None, request_s: float = 0.01) -> None:
        self.speeds = np.array(speeds)
        self.request_s = request_s
        self.scheduler = made or scheduler(ExpectedWaitScorer())
        self.endpoints = tuple(Endpoint(id=f"e{at}", address=f"10.0.0.{at}:80") for at in range(len(speeds)))
        self.inflight = np.zeros(len(speeds))
        self.uncached = np.zeros(len(speeds))
        self.served = np.zeros(len(speeds))
        self.free_at = np.zeros(len(speeds))
        self.trial = np.zeros(len(speeds))
        self.most_inflight = np.zeros(len(speeds))
        self.cached: list[set[object]] = [set() for _ in speeds]
        self.now = 0.0
        self._running: list[tuple[float, float, int, float]] = []

    def view(self, key: object, tokens: int) -> FleetView:
        columns: dict[str, Any] = {
            "matched_tokens": np.array([float(tokens) if key in held else 0.0 for held in self.cached]),
            "inflight_requests": self.inflight.copy(),
            "inflight_uncached_tokens": self.uncached.copy(),
            "prefill_s_per_token": np.where(self.trial > 0, NAN, self.speeds),
            "request_s": np.full(len(self.speeds), self.request_s),
            "is_trial": self.trial.copy(),
        }
        return FleetView(self.endpoints, columns, [None] * len(self.endpoints))

    def send(self, key: object, tokens: int, decode_s: float = 0.2) -> int:
        """Send a request whose whole prompt is `key`; returns where it went."""
        seen = self.view(key, tokens)
        decision = decide(self.scheduler, request(tokens), seen, self.now)
        at = int(decision.chosen[0][1:])
        own = 0.0 if key in self.cached[at] else float(tokens)
        self.cached[at].add(key)
        self.inflight[at] += 1
        self.uncached[at] += own
        self.served[at] += 1
        self.most_inflight = np.maximum(self.most_inflight, self.inflight)
        began = max(self.now, self.free_at[at])
        first = began + own * self.speeds[at] + 0.001
        self.free_at[at] = first
        self._running.append((first + decode_s, first, at, own))
        return at

    def finish_one(self) -> None:
        """Let time pass until the next request ends."""
        self._running.sort()
        ended, _, at, _ = self._running.pop(0)
        self.now = ended
        self.inflight[at] -= 1
        self.uncached[:] = 0
        for _, first, where, own in self._running:
            if first > self.now:
                self.uncached[where] += own

    def run(self, keys: Sequence[object], tokens: int, *, concurrency: int) -> None:
        """Send them all with so many in flight."""
        for key in keys:
            while len(self._running) >= concurrency:
                self.finish_one()
            self.send(key, tokens)

    @property
    def imbalance(self) -> float:
        """Most served over mean served."""
        return float(self.served.max() / self.served.mean())
