"""Which running requests may be asked back from their engines, so that a higher priority has their place.

Owns command and answers, the choice of the victims and the pace: a few are asked for at a time, and no more until those
have answered.  Only requests of a negative priority are ever asked back, each a few times at most; whether one can be
is for the host to say, which knows what has gone to its client.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec

from shoal.pool import Api, Refusal

MAX_ASKED = 2
"""Requests that are asked back at a time, as in llm-d."""
MAX_TIMES = 2
"""So often a request is queued again; after that it keeps its place, so that it ends."""
PATIENCE_S = 0.1
"""Nobody is evicted where a place becomes free by itself within this time."""


class Mode(StrEnum):
    """never: what runs is left alone.  before_first_byte: nobody notices.  always: answers that have begun are cut."""

    NEVER = "never"
    BEFORE_FIRST_BYTE = "before-first-byte"
    ALWAYS = "always"


class Evict(msgspec.Struct, frozen=True, tag="evict"):
    """Take a forwarded request back from its engine and feed `Evicted`, if nothing of the answer was sent.

    Else, or where the host cannot do that: with may_cut end it as `Cut` does, otherwise feed `Kept`.
    """

    request_id: str
    refusal: Refusal
    api: Api = Api.OTHER
    may_cut: bool = False


class Evicted(msgspec.Struct, frozen=True, tag="evicted"):
    """A request that `Evict` asked for is off its engine, and its client has got nothing; it can be placed anew."""

    request_id: str


class Kept(msgspec.Struct, frozen=True, tag="kept"):
    """A request that `Evict` asked for goes on where it is."""

    request_id: str


class _Running(NamedTuple):
    """One that may be asked back.  number: in the order of dispatch.  item: its owner's."""

    priority: int
    number: int
    endpoint_id: str
    item: Any


class Evictions:
    """The requests in flight that may be asked back.  is_used: whether there ever was one."""

    __slots__ = ("_asked", "_number", "_running", "_times", "is_used")

    def __init__(self) -> None:
        self._running: dict[str, _Running] = {}
        self._asked: dict[str, _Running] = {}
        self._times: dict[str, int] = {}
        self._number = 0
        self.is_used = False

    def __len__(self) -> int:
        """All that is kept of requests."""
        return len(self._running) + len(self._asked) + len(self._times)

    @property
    def has_any(self) -> bool:
        """Whether anybody who runs may be asked back."""
        return bool(self._running)

    def sent(self, request_id: str, priority: int, endpoint_id: str, item: Any) -> None:
        """Note a request that goes to an endpoint."""
        if priority < 0 and self._times.get(request_id, 0) < MAX_TIMES:
            self.is_used = True
            self._number += 1
            self._running[request_id] = _Running(priority, self._number, endpoint_id, item)

    def victims(
        self, priority: int, endpoint_ids: frozenset[str], wanted: int, is_live: Callable[[str], bool]
    ) -> list[str]:
        """Return who is asked back now for requests of a priority: of the lowest priority first, then the newest.

        endpoint_ids: where a place is of use.  is_live: whether a request still runs.
        """
        asked = self._asked = {name: each for name, each in self._asked.items() if is_live(name)}
        wanted = min(wanted, MAX_ASKED) - len(asked)
        if wanted <= 0 or not self._running:
            return []
        able = [
            (each.priority, -each.number, name)
            for name, each in self._running.items()
            if each.priority < priority and each.endpoint_id in endpoint_ids and is_live(name)
        ]
        chosen = [name for _, _, name in sorted(able)[:wanted]]
        for name in chosen:
            asked[name] = self._running.pop(name)
        return chosen

    def taken_back(self, request_id: str) -> Any:
        """Return the item of a request that its host has taken back; None for one that was not asked for."""
        found = self._asked.pop(request_id, None)
        if found is None:
            return None
        self._times[request_id] = self._times.get(request_id, 0) + 1
        return found.item

    def kept(self, request_id: str) -> None:
        """It cannot be taken back, and is not asked for again."""
        self._asked.pop(request_id, None)

    def over(self, request_id: str) -> None:
        """Forget a request."""
        for table in (self._running, self._asked, self._times):
            if table:
                table.pop(request_id, None)

    def clear(self) -> None:
        """Nobody is asked back any more."""
        self._running.clear()
