"""A request that the router answers in a later step: tokens are being fetched for it, or it is queued.

Owns what is kept of such a request, the fetching of its tokens, and that it ends once: placed, answered, failed, or
left by its client.  How long it may wait is the router's to say.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol, final

from shoal.hosts.driver import OfRequest
from shoal.measures import Family
from shoal.pool import Request
from shoal.routing.commands import Fetch
from shoal.routing.events import Fetched, FetchFailed

if TYPE_CHECKING:
    from shoal.hosts.picker import Answered, Picker, Placed

NO_TOKENS = "unconfigured"


class Asked(NamedTuple):
    """A request as its client sent it, for whoever reads its prompt.  headers: lower-case names."""

    request: Request
    headers: Mapping[str, str]
    body: bytes


class Cancellable(Protocol):
    """Work under way."""

    def cancel(self) -> object:
        """Stop it; nothing is told of it any more."""
        ...


class TokenSource(Protocol):
    """Where the tokens of prompts come from.  `hosts.tokens` is one."""

    def fetch(self, command: Fetch, asked: Asked, done: Callable[[Fetched | FetchFailed], None]) -> Cancellable:
        """Begin to fetch; `done` is called once, from the loop and never from here, unless it is cancelled.

        Raises nothing: what goes wrong is a FetchFailed.
        """
        ...

    def families(self) -> list[Family]:
        """Return its metrics."""
        ...


@final
class Waiting:
    """One such request.  `then` says who is told; `cancel` when its client has gone.

    It is over when it has told, and told only once: of a place, which is booked, of an answer, or of the fault that the
    router had with it, which leaves nothing booked.
    """

    __slots__ = ("_asked", "_fetch", "_picker", "_told")

    def __init__(self, picker: "Picker", asked: Asked) -> None:
        self._picker = picker
        self._asked = asked
        self._fetch: Cancellable | None = None
        self._told: Callable[[Placed | Answered | Exception], None] | None = None
        picker.driver.wait(asked.request.id, self.take)

    def then(self, told: "Callable[[Placed | Answered | Exception], None]") -> None:
        """Have `told` called from the loop, never from here."""
        self._told = told

    def cancel(self) -> None:
        """Forget the request, and tell the router that it has ended."""
        self._told = None
        self._stop()
        self._picker.driver.give_up(self._asked.request.id)

    def take(self, command: OfRequest) -> None:
        """Do what the router wants done about the request."""
        if isinstance(command, Fetch):
            self._begin(command)
            return
        self._stop()
        try:
            answer = self._picker.carry_out(command, *self._asked)
        except Exception as error:
            self._fail(error)
            return
        self._tell(answer)

    def _begin(self, command: Fetch) -> None:
        self._stop()
        tokens = self._picker.tokens
        if tokens is None:
            failed = FetchFailed(command.request_id, NO_TOKENS)
            self._fetch = asyncio.get_running_loop().call_soon(self._fetched, failed)
        else:
            self._fetch = tokens.fetch(command, self._asked, self._fetched)

    def _fetched(self, event: Fetched | FetchFailed) -> None:
        self._fetch = None
        try:
            self._picker.driver.feed(event)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._stop()
        self._picker.driver.give_up(self._asked.request.id)
        self._tell(error)

    def _stop(self) -> None:
        fetch, self._fetch = self._fetch, None
        if fetch is not None:
            fetch.cancel()

    def _tell(self, answer: "Placed | Answered | Exception") -> None:
        told, self._told = self._told, None
        if told is not None:
            told(answer)
