"""An endpoint is offered only while Envoy knows it."""

import asyncio
from collections.abc import Sequence

from shoal.hosts.supervisor.gate import FleetGate
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
        self.gate = FleetGate(Ledger(), self.show, self.tell, self.settled)

    async def show(self, endpoints: dict[str, Endpoint], waits: bool) -> bool:
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
