import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvloop

from shoal.hosts.driver import Driver
from shoal.hosts.picker import Answered, Picker, Placed
from shoal.hosts.waiting import NO_TOKENS, Waiting
from shoal.measures import Fold
from shoal.pool import Endpoint, EndpointState, ServedModel
from shoal.prefix import BlockHasher
from shoal.routing import Router, Ticked
from shoal.routing.config import load
from shoal.routing.events import EndpointChanged, EndpointJoined, FetchFailed, ModelsSeen
from tests.hosts.waiting_router import AskingRouter, HeldTokens

ALIASES = "apiVersion: shoal.dev/v1alpha1\nkind: Pool\naliases: {gpt: m}\n"


class Door:
    """A picker whose router asks for tokens, with one endpoint behind it."""

    def __init__(self, router: Router, config: str = "") -> None:
        self.driver = Driver(router, Fold())
        self.picker = Picker(self.driver, load(config, "test"), BlockHasher(7), "0", "run")
        self.tokens = HeldTokens()
        self.picker.tokens = self.tokens
        self.told: list[Placed | Answered | Exception] = []
        self.driver.feed(EndpointJoined(Endpoint(id="a", address="10.0.0.1:8000")))
        self.driver.feed(ModelsSeen("a", (ServedModel(id="m"),)))
        self.driver.feed(EndpointChanged("a", EndpointState.READY))

    def ask(self, request_id: str, model: str = "m") -> Waiting:
        body = json.dumps({"model": model, "messages": [{"role": "user", "content": "hello"}]}).encode()
        asked = self.picker.ask(request_id, "POST", "/v1/chat/completions", {}, body)
        assert isinstance(asked, Waiting)
        asked.then(self.told.append)
        return asked

    @property
    def inflight(self) -> int:
        return self.driver.router.status().inflight


Play = Callable[[Callable[[], Awaitable[None]]], None]


@pytest.fixture(params=["uvloop", "asyncio"])
def play(request: pytest.FixtureRequest) -> Play:
    def run(scene: Callable[[], Awaitable[None]]) -> None:
        async def main() -> None:
            async with asyncio.timeout(30):
                await scene()

        (uvloop.run if request.param == "uvloop" else asyncio.run)(main())

    return run


async def until(is_true: Callable[[], object]) -> None:
    while not is_true():
        await asyncio.sleep(0.001)


def test_a_request_is_placed_when_its_tokens_come(play: Play) -> None:
    async def scene() -> None:
        door = Door(AskingRouter())
        door.ask("r-1")
        (held,) = door.tokens.open
        assert (held.command.model, held.asked.request.id) == ("m", "r-1")
        assert door.driver.waiting == 1
        door.tokens.give()
        assert door.told == []
        await until(lambda: door.told)
        (placed,) = door.told
        assert isinstance(placed, Placed)
        assert placed.forward.endpoints == ("10.0.0.1:8000",)
        assert (door.inflight, door.driver.waiting) == (1, 0)
        door.driver.close()

    play(scene)


def test_requests_that_wait_are_answered_each_with_its_own_word(play: Play) -> None:
    async def scene() -> None:
        door = Door(AskingRouter())
        for number in range(20):
            door.ask(f"r-{number}", "m" if number % 2 else "nope")
        door.tokens.give()
        await until(lambda: len(door.told) == 20)
        for number, told in enumerate(door.told):
            if number % 2:
                assert isinstance(told, Placed)
                assert told.request.id == f"r-{number}"
            else:
                assert isinstance(told, Answered)
                assert told.status == 404
        assert (door.inflight, door.driver.waiting) == (10, 0)
        door.driver.close()

    play(scene)


def test_a_client_that_leaves_while_it_waits_leaves_nothing_behind(play: Play) -> None:
    async def scene() -> None:
        router = AskingRouter()
        door = Door(router)
        waiting = door.ask("r-1")
        waiting.cancel()
        assert (door.tokens.open, router.asked, door.driver.waiting) == ([], {}, 0)
        door.driver.close()

    play(scene)


def test_a_client_that_leaves_after_the_word_and_before_it_was_told_is_off_the_books(play: Play) -> None:
    async def scene() -> None:
        door = Door(AskingRouter())
        waiting = door.ask("r-1")
        door.tokens.give()
        assert door.inflight == 1
        waiting.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert (door.told, door.inflight, door.driver.waiting) == ([], 0, 0)
        door.driver.close()

    play(scene)


def test_the_routers_deadline_is_kept_although_a_later_one_was_armed(play: Play) -> None:
    async def scene() -> None:
        router = AskingRouter(wait_s=20.0)
        door = Door(router)
        door.ask("r-1")
        router._wait_s = 0.01
        door.ask("r-2")
        await until(lambda: door.told)
        (placed,) = door.told
        assert isinstance(placed, Placed)
        assert placed.request.id == "r-2"
        assert [held.asked.request.id for held in door.tokens.open] == ["r-1"]
        door.driver.close()

    play(scene)


def test_without_a_source_of_tokens_the_router_is_told_that_they_cannot_be_had(play: Play) -> None:
    async def scene() -> None:
        router = AskingRouter()
        door = Door(router)
        door.picker.tokens = None
        door.ask("r-1")
        await until(lambda: door.told)
        assert router.told == [FetchFailed("r-1", NO_TOKENS)]
        assert isinstance(door.told[0], Placed)
        door.driver.close()

    play(scene)


def test_a_fault_of_the_router_is_told_and_leaves_nothing_booked(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("a plugin's fault")

    async def scene() -> None:
        door = Door(AskingRouter())
        door.ask("r-1")
        with monkeypatch.context() as patched:
            patched.setattr("shoal.scheduling.Scheduler.dispatched", fail)
            door.tokens.give()
        await until(lambda: door.told)
        assert isinstance(door.told[0], RuntimeError)
        assert (door.inflight, door.driver.waiting) == (0, 0)
        door.driver.close()

    play(scene)


def test_a_late_word_rewrites_the_body_as_an_early_one_does(play: Play) -> None:
    async def scene() -> None:
        door = Door(AskingRouter(ALIASES), ALIASES)
        door.ask("r-1", "gpt")
        door.tokens.give()
        await until(lambda: door.told)
        (placed,) = door.told
        assert isinstance(placed, Placed)
        assert json.loads(placed.body)["model"] == "m"
        door.driver.close()

    play(scene)


def test_a_router_that_says_nothing_yet_may_answer_in_any_step(play: Play) -> None:
    class Queue(AskingRouter):
        def handle(self, event: Any, now: float) -> Any:
            commands = super().handle(event, now)
            return [] if self.asked and not isinstance(event, Ticked) else commands

    async def scene() -> None:
        door = Door(Queue(wait_s=0.005))
        door.ask("r-1")
        assert door.tokens.open == []
        await until(lambda: door.told)
        assert isinstance(door.told[0], Placed)
        door.driver.close()

    play(scene)
