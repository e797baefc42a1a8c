import asyncio

from shoal.hosts.fleet.outbox import Outbox
from shoal.pool import Endpoint, EndpointState, Signals
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

        outbox = Outbox(sink, 0.0, list)
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


def test_a_sink_that_failed_is_told_the_present_until_it_takes_it() -> None:
    async def test() -> None:
        taken: list[list[events.Event]] = []
        faults = [RuntimeError("the disk is full")] * 2
        joined = {name: events.EndpointJoined(Endpoint(id=name, address=f"{name}:1")) for name in ("a", "b")}
        members = dict(joined)

        def sink(batch: list[events.Event]) -> None:
            if faults and taken:
                raise faults.pop()
            taken.append(batch)

        outbox = Outbox(sink, 0.0, lambda: list(members.values()), 0.0)
        task = asyncio.create_task(outbox.run())
        outbox.put(*joined.values())
        await outbox.settled()
        del members["b"]
        outbox.put(events.EndpointLeft("b"))
        while len(taken) < 2:
            await asyncio.sleep(0)
        loading = events.EndpointChanged("a", EndpointState.LOADING)
        assert taken[1] == [events.EndpointLeft("b"), joined["a"], loading]
        assert not faults
        outbox.put(load("a", 2))
        await outbox.settled()
        assert taken[2:] == [[load("a", 2)]]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(test)


def test_a_sink_that_failed_is_told_of_caches_that_were_dropped_meanwhile() -> None:
    async def test() -> None:
        taken: list[list[events.Event]] = []
        faults = [RuntimeError("not now")] * 2
        joined = events.EndpointJoined(Endpoint(id="a", address="a:1"))

        def sink(batch: list[events.Event]) -> None:
            if faults:
                raise faults.pop()
            taken.append(batch)

        outbox = Outbox(sink, 0.0, lambda: [joined], 0.0)
        task = asyncio.create_task(outbox.run())
        outbox.put(joined, events.BlocksCleared("a"), events.BlocksCleared("gone"))
        while not taken:
            await asyncio.sleep(0)
        assert taken == [[joined, events.EndpointChanged("a", EndpointState.LOADING), events.BlocksCleared("a")]]
        outbox.put(load("a", 1))
        await outbox.settled()
        assert taken[1:] == [[load("a", 1)]]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(test)
