"""Pickers without requests of clients: routers that share over real sockets, in one process."""

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path

from shoal.hosts.driver import Driver
from shoal.hosts.sharing import Places, Sharing, read_secret
from shoal.kernel import Chance
from shoal.measures import Fold
from shoal.pool import Api, Endpoint, EndpointState, Outcome, Request, ServedModel
from shoal.routing import Arrived, Ended, Recorded, Router, events
from shoal.routing.config import load
from shoal.routing.settings import Sharing as SharingSettings
from tests.routing.script import blocks_of


class Picker:
    """A router over endpoints e0 to e3 that may share.  number: its name, and part of its addresses."""

    def __init__(
        self, folder: Path, number: int, settings: SharingSettings | None = None, secret: Path | None = None
    ) -> None:
        self.router = Router(load("", "test"), Chance(number))
        self.driver = Driver(self.router, Fold())
        self.number = number
        self.run = f"run-{number}"
        self.pair = (f"ipc://{folder}/s{number}.sock", f"ipc://{folder}/a{number}.sock")
        settings = settings or SharingSettings()
        self.sharing = Sharing(
            self.driver, self.run, f"picker-{number}", settings, read_secret(secret) if secret else None
        )
        for place in range(4):
            self.driver.feed(events.EndpointJoined(Endpoint(id=f"e{place}", address=f"10.0.0.{place}:80")))
            self.driver.feed(events.ModelsSeen(f"e{place}", (ServedModel(id="m"),)))
            self.driver.feed(events.EndpointChanged(f"e{place}", EndpointState.READY))
        self._count = 0

    def follow(self, *siblings: "Picker") -> None:
        self.sharing.follow(Places(own=self.pair, siblings=tuple(each.pair for each in siblings)))

    def send(self, prompt: str = "p", tokens: int = 640) -> str:
        self._count += 1
        name = f"{self.run}-{self._count}"
        request = Request(
            id=name, api=Api.CHAT, model="m", is_streaming=True, prompt_tokens=tokens, prompt_bytes=4 * tokens
        )
        self.driver.feed(Arrived(request, blocks_of(prompt, tokens)))
        return name

    def finish(self, name: str, place: int = 0) -> int:
        """End a request; returns the cached tokens that were expected."""
        self.driver.feed(Ended(name))
        outcome = Outcome(status=200, served_address=f"10.0.0.{place}:80", ttft_s=0.05, duration_s=0.2)
        (account,) = self.driver.feed(Recorded(name, outcome))
        return int(getattr(account, "predicted_cached_tokens"))  # noqa: B009

    @property
    def bookings(self) -> int:
        """Requests in flight of its peers."""
        return self.router.status().peers.bookings

    @property
    def states(self) -> list[str]:
        return [each.state for each in self.sharing.pictures()]

    @property
    def is_idle(self) -> bool:
        """Whether every column of work in flight is exactly zero."""
        names = ("inflight_requests", "inflight_output_tokens", "booked_uncached_tokens", "clear_at", "peer_requests")
        return all(not self.router._fleet.columns[name].any() for name in names)

    def close(self) -> None:
        self.sharing.close()
        self.driver.close()


def all_follow_all(pickers: Iterable[Picker]) -> None:
    pickers = list(pickers)
    for each in pickers:
        each.follow(*(other for other in pickers if other is not each))


async def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


async def all_hear(pickers: Iterable[Picker]) -> None:
    pickers = list(pickers)
    await until(lambda: all(each.states == ["heard"] * (len(pickers) - 1) for each in pickers))
