"""What plugins read of a fleet that is too large for plain numbers."""

import numpy as np
import pytest

from shoal.kernel import Chance
from shoal.pool import Endpoint, EndpointState, FleetView, Request, Signals
from shoal.prefix import capacity_blocks
from shoal.routing import Router
from shoal.routing.columns import COMPLETE, STALE_SIGNALS_S, Columns
from shoal.routing.config import load
from shoal.routing.events import EndpointJoined, EndpointLeft, LoadSeen

COUNT = 20


def router() -> Router:
    router = Router(load("", "test"), Chance(1))
    for number in range(COUNT):
        id = f"10.0.0.{number:03}:8000"
        router.handle(EndpointJoined(Endpoint(id=id, address=id), EndpointState.READY), 0.0)
    return router


def waiting(router: Router, now: float) -> list[float]:
    fleet = router._fleet
    columns = Columns(fleet, router._books, router._models, Request(id="r"), None, now, 0.0)
    values: list[float] = FleetView(fleet.endpoints, columns, fleet.signals, None, COMPLETE).column("waiting").tolist()
    return values


def read(router: Router, number: int, now: float) -> None:
    router.handle(LoadSeen(f"10.0.0.{number:03}:8000", Signals(waiting=float(number))), now)


def test_a_reading_is_known_until_it_is_too_old_and_again_when_there_is_a_new_one() -> None:
    pool = router()
    assert np.isnan(waiting(pool, 0.5)).all()
    for number in range(COUNT):
        read(pool, number, 1.0 + number * 0.1)
    fresh = [float(number) for number in range(COUNT)]
    assert waiting(pool, 3.0) == fresh
    old = 1.05 + STALE_SIGNALS_S
    assert waiting(pool, old) == pytest.approx([np.nan, *fresh[1:]], nan_ok=True)
    read(pool, 0, old)
    assert waiting(pool, old) == fresh


def test_an_endpoint_that_joins_is_unknown_and_one_that_leaves_takes_its_reading_along() -> None:
    pool = router()
    for number in range(COUNT):
        read(pool, number, 1.0)
    assert not np.isnan(waiting(pool, 2.0)).any()
    pool.handle(EndpointJoined(Endpoint(id="10.0.0.0005", address="10.0.0.9:1"), EndpointState.READY), 2.0)
    assert np.isnan(waiting(pool, 2.0)).sum() == 1
    pool.handle(EndpointLeft("10.0.0.0005"), 2.0)
    assert not np.isnan(waiting(pool, 2.0)).any()


def test_the_same_reading_again_is_a_new_one() -> None:
    pool, same = router(), Signals(waiting=2.0)
    for now in (1.0, 1.0 + STALE_SIGNALS_S, 1.5 + STALE_SIGNALS_S):
        pool.handle(LoadSeen("10.0.0.000:8000", same), now)
    assert waiting(pool, 2.0 + STALE_SIGNALS_S)[0] == 2.0


def test_a_cache_of_another_size_counts_from_its_first_reading_on() -> None:
    pool = router()
    for blocks in (1_000, 1_000, 3_000):
        pool.handle(LoadSeen("10.0.0.000:8000", Signals(num_blocks=blocks, block_size_tokens=16)), 1.0)
        assert pool._index.capacity(pool._fleet.at("10.0.0.000:8000").slot) == capacity_blocks(blocks, 16)
        assert pool._fleet.columns["kv_capacity_tokens"][0] == blocks * 16
