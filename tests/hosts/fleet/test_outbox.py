import asyncio

from shoal.hosts.fleet.outbox import Outbox
from shoal.pool import EndpointState, Signals
from shoal.routing import events
from tests.hosts.fleet.fleet_engines import run


def load(endpoint_id: str, running: float) -> events.LoadSeen:
    return events.LoadSeen(endpoint_id, Signals(running=running))


def test_a_slow_sink_gets_the_newest_load_and_every_other_event_in_order() -> None:
    async def test() -> None:
        batches: list[list[events.Event]] = []
        gate = asyncio.Event()

        async def sink(batch: list[events.Event]) -> None:
            batches.append(batch)
            await gate.wait()

        outbox = Outbox(sink, 0.0)
        task = asyncio.create_task(outbox.run())
        outbox.put(load("a", 0))
        while not batches:
            await asyncio.sleep(0)
        for running in range(1, 1000):
            outbox.put(load("a", running), load("b", running))
        ready = events.EndpointChanged("a", EndpointState.READY)
        outbox.put(ready, events.EndpointLeft("b"), load("b", 7))
        gate.set()
        await outbox.settled()
        assert batches == [
            [load("a", 0)],
            [load("a", 999), load("b", 999), ready, events.EndpointLeft("b"), load("b", 7)],
        ]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(test)


def test_a_sink_that_fails_once_still_gets_what_comes_later() -> None:
    async def test() -> None:
        taken: list[events.Event] = []

        def sink(batch: list[events.Event]) -> None:
            if not taken and batch[0] == load("a", 1):
                taken.append(batch[0])
                raise RuntimeError("the worker is gone")
            taken.extend(batch)

        outbox = Outbox(sink, 0.0)
        task = asyncio.create_task(outbox.run())
        outbox.put(load("a", 1))
        await outbox.settled()
        outbox.put(load("a", 2))
        await outbox.settled()
        assert taken[-1] == load("a", 2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(test)
