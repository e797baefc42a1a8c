"""Requests that wait for their tokens.

Owns who waits and until when.  Whether tokens are wanted, and what becomes of the request, is the router's.
"""

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from shoal.pool import Request
from shoal.routing.events import Arrived, Fetched, TokenKeys
from shoal.routing.models import Resolved

# More than this many never wait at once: the rest goes by the estimate.
MAX_FETCHING = 10_000


class PromptKeys(NamedTuple):
    """The exact keys of a prompt.  model: the base model's name that they were made with; none means the estimate."""

    model: str = ""
    by_size: tuple[TokenKeys, ...] = ()


class Fetching(NamedTuple):
    """A request that waits for its tokens.  model: as in `Fetch`.  due: when it goes by the estimate."""

    arrived: Arrived
    resolved: Resolved
    model: str
    arrived_at: float
    due: float

    def outcome(self, fetched: Fetched | None) -> tuple[Request, PromptKeys]:
        """Return the request as it goes on, and its keys: none without tokens."""
        request = self.arrived.request
        if fetched is None:
            return request, PromptKeys()
        request = msgspec.structs.replace(request, prompt_tokens=fetched.prompt_tokens, is_token_exact=True)
        return request, PromptKeys(self.model, fetched.keys)


class Fetches:
    """All of them, in the order in which they came."""

    __slots__ = ("_by_id",)

    def __init__(self) -> None:
        self._by_id: dict[str, Fetching] = {}

    def add(self, arrived: Arrived, resolved: Resolved, model: str, now: float, due: float) -> bool:
        """Have a request wait; returns False when too many do."""
        if len(self._by_id) >= MAX_FETCHING:
            return False
        self._by_id[arrived.request.id] = Fetching(arrived, resolved, model, now, due)
        return True

    def request(self, request_id: str) -> Request:
        """A request that waits."""
        return self._by_id[request_id].arrived.request

    def take(self, request_id: str) -> Fetching | None:
        """End a wait; None when the request does not wait."""
        return self._by_id.pop(request_id, None)

    def of_session(self, session_id: str, tenant_id: str | None) -> list[Request]:
        """The requests of a session, of one tenant or of all."""
        asked = [each.arrived.request for each in self._by_id.values()]
        return [each for each in asked if each.is_of(session_id, tenant_id)]

    def late(self, now: float) -> Iterator[str]:
        """The requests whose time is over; each is to be taken before the next is asked for."""
        while self._by_id:
            request_id, oldest = next(iter(self._by_id.items()))
            if oldest.due > now:
                return
            yield request_id

    def deadline(self) -> float | None:
        """When the next one goes on without its tokens, None when none waits."""
        return next(iter(self._by_id.values())).due if self._by_id else None
