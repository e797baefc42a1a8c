"""An endpoint is offered only while Envoy knows it."""

import asyncio
from collections.abc import Hashable, Sequence

import pytest

from shoal.hosts.supervisor.gate import FleetGate, NotShown
from shoal.hosts.supervisor.ledger import Ledger
from shoal.pool import Endpoint, EndpointState, Signals
from shoal.routing.events import EndpointChanged, EndpointJoined, EndpointLeft, Event, LoadSeen

A = Endpoint(id="a", address="10.0.0.1:8000")
B = Endpoint(id="b", address="10.0.0.2:8000")
READY = EndpointState.READY


class Scene:
    """Writes down what Envoy and the workers are told, in order."""

    def __init__(self, envoy_confirms: bool = True) -> None:
        self.told: list[str] = []
        self._envoy_confirms = envoy_confirms
        self.marks: dict[str, Hashable] = {}
        self.fault: Exception | None = None
        self.gate = FleetGate(Ledger(), self.show, self.tell, self.settled, lambda: dict(self.marks))

    async def show(self, endpoints: dict[str, Endpoint], waits: bool) -> bool:
        if self.fault is not None:
            raise self.fault
        self.told.append(f"envoy {','.join(sorted(endpoints)) or '-'}{' confirmed' if waits else ''}")
        return self._envoy_confirms

    def tell(self, batch: Sequence[Event]) -> None:
        self.told.append("workers " + ",".join(type(event).__name__ for event in batch))

    async def settled(self) -> None:
        self.told.append("workers took it")

    def play(self, *batches: list[Event]) -> list[str]:
        async def run() -> None:
            for batch in batches:
                await self.gate.take(batch)

        asyncio.run(run())
        return self.told


def test_workers_hear_that_an_endpoint_is_ready_after_envoy_holds_it() -> None:
    assert Scene().play([EndpointJoined(A)], [EndpointChanged("a", READY)]) == [
        "workers EndpointJoined",
        "envoy a confirmed",
        "workers EndpointChanged",
    ]


def test_envoy_forgets_an_endpoint_after_no_worker_names_it_any_more() -> None:
    told = Scene().play(
        [EndpointJoined(A, READY), EndpointJoined(B, READY)], [EndpointChanged("a", EndpointState.DRAINING)]
    )
    assert told[2:] == ["workers EndpointChanged", "workers took it", "envoy b"]


def test_one_that_leaves_while_another_comes_is_kept_until_the_workers_know() -> None:
    told = Scene().play([EndpointJoined(A, READY)], [EndpointLeft("a"), EndpointJoined(B, READY)])
    assert told[2:] == [
        "envoy a,b confirmed",
        "workers EndpointLeft,EndpointJoined",
        "workers took it",
        "envoy b",
    ]


def test_readings_of_load_pass_without_touching_envoy() -> None:
    scene = Scene()
    scene.play([EndpointJoined(A, READY)], [LoadSeen("a", Signals(running=1.0))])
    assert scene.told[2:] == ["workers LoadSeen"]


def test_an_envoy_that_does_not_confirm_delays_the_fleet_and_does_not_stop_it() -> None:
    scene = Scene(envoy_confirms=False)
    scene.play([EndpointJoined(A, READY)])
    assert scene.told == ["envoy a confirmed", "workers EndpointJoined"]
    assert scene.gate.ready == {"a": A}


def test_envoy_is_told_again_when_the_key_or_authority_of_an_endpoint_changes() -> None:
    scene = Scene()
    scene.marks["a"] = ("old key", "")
    scene.play([EndpointJoined(A, READY)], [EndpointJoined(A, READY)])
    assert scene.told[2:] == ["workers EndpointJoined"]
    scene.marks["a"] = ("new key", "")
    scene.play([EndpointJoined(A, READY)])
    assert scene.told[3:] == ["envoy a confirmed", "workers EndpointJoined"]


def test_while_envoy_cannot_be_told_a_new_endpoint_is_not_offered_and_others_come_and_go() -> None:
    scene = Scene()
    scene.play([EndpointJoined(A, READY)])
    scene.fault = OSError("no space left on device")
    with pytest.raises(NotShown, match="no space left"):
        scene.play([EndpointJoined(B, READY)])
    assert scene.gate.ready == {"a": A}
    with pytest.raises(NotShown):
        scene.play([EndpointChanged("b", READY), EndpointLeft("a")])
    assert scene.gate.ready == {}
    scene.fault = None
    scene.play([EndpointJoined(B, READY), EndpointChanged("b", READY)])
    assert scene.gate.ready == {"b": B}
    assert scene.told[-3:] == ["workers EndpointJoined,EndpointChanged", "workers took it", "envoy b"]
