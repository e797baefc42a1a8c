"""A router that asks for every prompt's tokens before it decides, and the hands of a test on what fetches them."""

from collections.abc import Callable

from shoal.hosts.waiting import Asked
from shoal.kernel import Chance
from shoal.measures import Family
from shoal.routing import Arrived, Command, Ended, Event, Router, Ticked
from shoal.routing.commands import Fetch
from shoal.routing.config import load
from shoal.routing.events import Fetched, FetchFailed


class AskingRouter(Router):
    """Decides a request when its tokens came or failed, or `wait_s` after it arrived."""

    def __init__(self, config: str = "", wait_s: float = 1e9) -> None:
        super().__init__(load(config, "test"), Chance(1))
        self._wait_s = wait_s
        self.asked: dict[str, tuple[Arrived, float]] = {}
        self.told: list[Event] = []

    def handle(self, event: Event, now: float) -> list[Command]:
        """As the router does, later."""
        match event:
            case Arrived():
                self.asked[event.request.id] = (event, now + self._wait_s)
                return [Fetch(event.request.id, event.request.model, "", (16,))]
            case Fetched() | FetchFailed():
                self.told.append(event)
                asked = self.asked.pop(event.request_id, None)
                return super().handle(asked[0], now) if asked else []
            case Ended() if event.request_id in self.asked:
                del self.asked[event.request_id]
            case Ticked():
                commands = super().handle(event, now)
                for request_id, (arrived, due) in list(self.asked.items()):
                    if due <= now:
                        del self.asked[request_id]
                        commands += super().handle(arrived, now)
                return commands
        return super().handle(event, now)

    def deadline(self) -> float | None:
        """The earliest of all."""
        times = [due for _, due in self.asked.values()]
        own = super().deadline()
        return min([*times, own] if own is not None else times, default=None)


class HeldTokens:
    """A source of tokens that gives none until a test says so."""

    def __init__(self) -> None:
        self.open: list[HeldFetch] = []

    def fetch(self, command: Fetch, asked: Asked, done: Callable[[Fetched | FetchFailed], None]) -> "HeldFetch":
        """Hold the request."""
        self.open.append(HeldFetch(self, command, asked, done))
        return self.open[-1]

    def families(self) -> list[Family]:
        """Nothing is counted."""
        return []

    def give(self) -> None:
        """Say of every request held that it has seven tokens."""
        for held in self.open[:]:
            self.open.remove(held)
            held.done(Fetched(held.command.request_id, 7, ()))


class HeldFetch:
    """One request held."""

    def __init__(
        self, tokens: HeldTokens, command: Fetch, asked: Asked, done: Callable[[Fetched | FetchFailed], None]
    ) -> None:
        self._tokens = tokens
        self.command = command
        self.asked = asked
        self.done = done

    def cancel(self) -> None:
        """Let it go."""
        if self in self._tokens.open:
            self._tokens.open.remove(self)
