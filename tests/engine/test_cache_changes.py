"""What an engine tells of its cache, and the host tier below the GPU."""

import pytest

from shoal.engine import Aborted, Engine, EngineConfig
from shoal.engine.cache import HostPolicy
from shoal.engine.changes import CacheChanged, Cleared, Removed, Stored
from shoal.engine.commands import ConfirmReset
from shoal.engine.events import CacheReset
from shoal.engine.hosttier import HostTier
from shoal.pool.kvevents import Tier
from tests.engine.virtual_time import VirtualTime, hash_of, request, tokens_of


def small(**changes: object) -> EngineConfig:
    """A tiny engine with 4-token blocks that tells of its cache."""
    fields: dict[str, object] = {"block_size": 4, "num_blocks": 64, "max_num_batched_tokens": 32, "max_num_seqs": 8}
    return EngineConfig(**{**fields, "has_cache_events": True, **changes})  # type: ignore[arg-type]


def own(name: str, start: int, end: int) -> tuple[int, ...]:
    return tuple(hash_of(name, position) for position in range(start, end))


def test_a_prompt_is_told_as_one_run_and_each_block_that_decoding_fills_as_another() -> None:
    time = VirtualTime(small())
    time.send(request("a", prompt=13, output=8))
    time.run()
    runs = [change for change in time.changes if isinstance(change, Stored)]
    assert [run.hashes for run in runs] == [own("a", 0, 3), own("a", 3, 4), own("a", 4, 5)]
    assert [run.parent for run in runs] == [None, hash_of("a", 2), hash_of("a", 3)]
    assert [run.start for run in runs] == [0, 3, 4]
    assert runs[0].tokens == b"".join(tokens_of(each, 4) for each in own("a", 0, 3))
    assert runs[2].tokens == tokens_of(hash_of("a", 4), 4)
    assert all(run.tier is Tier.GPU for run in runs)


def test_a_chunked_prefill_tells_a_run_a_step() -> None:
    time = VirtualTime(small())
    time.send(request("a", prompt=70, output=1))
    time.run()
    assert [change.hashes for change in time.changes if isinstance(change, Stored)] == [
        own("a", 0, 8),
        own("a", 8, 16),
        own("a", 16, 17),
    ]


def test_a_cache_hit_tells_nothing() -> None:
    time = VirtualTime(small())
    for name in ("a", "b"):
        time.send(request(name, prompt=24, output=1, prefix=24))
        time.run()
    assert time.finished["b"].cached_tokens == 20
    assert [change.hashes for change in time.changes if isinstance(change, Stored)] == [tuple(range(1000, 1006))]


def test_each_evicted_block_is_told_before_what_took_its_place() -> None:
    time = VirtualTime(small(num_blocks=6))
    time.send(request("a", prompt=16, output=1))
    time.run()
    time.changes.clear()
    time.send(request("b", prompt=16, output=1))
    time.run()
    assert time.changes == [
        Removed(hash_of("a", 3)),
        Removed(hash_of("a", 2)),
        Stored(own("b", 0, 4), None, b"".join(tokens_of(each, 4) for each in own("b", 0, 4))),
    ]


def test_changes_come_with_the_end_of_their_step_before_its_tokens() -> None:
    time = VirtualTime(small())
    assert time.send(request("a", prompt=8, output=1)) == []
    deadline = time.engine.deadline()
    assert deadline is not None
    time.step()
    assert len(time.changes) == 1
    time.send(request("b", prompt=8, output=1))
    time.send(Aborted(request_id="b"))
    time.step()
    assert time.changes[-1] == Stored(own("b", 0, 2), None, b"".join(tokens_of(each, 4) for each in own("b", 0, 2)))


def test_a_reset_is_told_with_the_next_step_or_at_once() -> None:
    for is_at_once in (False, True):
        time = VirtualTime(small(is_clearing_at_once=is_at_once))
        time.send(request("a", prompt=8, output=1))
        time.run()
        time.changes.clear()
        commands = time.send(CacheReset())
        assert commands[0] == ConfirmReset(is_done=True)
        assert time.changes == ([Cleared(is_all=False)] if is_at_once else [])
        time.send(request("b", prompt=1, output=1))
        time.run()
        assert time.changes == [Cleared(is_all=False)]


def test_nothing_is_told_when_nobody_asked() -> None:
    time = VirtualTime(small(has_cache_events=False, host_blocks=8, num_blocks=6))
    for name in "abcd":
        assert not any(isinstance(each, CacheChanged) for each in time.send(request(name, prompt=16, output=4)))
        time.run()
    assert time.changes == []


def test_a_prefix_that_left_the_gpu_comes_back_from_the_host() -> None:
    for policy in HostPolicy:
        time = VirtualTime(small(num_blocks=8, host_blocks=32, host_policy=policy))
        time.send(request("a", prompt=25, output=1))
        time.run()
        time.send(request("flood", prompt=30, output=1))
        time.run()
        assert time.engine.pool.match(own("a", 0, 6), 6) == []
        again = request("a", prompt=25, output=1)
        time.send(type(again)(**{f: getattr(again, f) for f in again.__struct_fields__} | {"request_id": "again"}))
        time.run()
        assert time.finished["again"].cached_tokens == 24
        counters = time.engine.counters
        assert (counters.prefix_hits, counters.external_hits) == (0, 24)
        assert (counters.cached, counters.loaded) == (24, 24)
        assert counters.external_queries == 25 + 30 + 25


def test_loading_takes_the_time_that_its_bytes_need() -> None:
    spans = []
    for rate in (50e9, 5e6):
        time = VirtualTime(small(num_blocks=8, host_blocks=32, host_bytes_per_s=rate))
        for name in ("a", "b"):
            time.send(request(name, prompt=25, output=1, prefix=24))
            time.run()
            time.send(request(f"flood {name}", prompt=30, output=1))
            time.run()
        start = time.now
        time.send(request("c", prompt=25, output=1, prefix=24))
        time.run()
        assert time.finished["c"].cached_tokens == 24
        spans.append(time.now - start)
    assert spans[1] - spans[0] == pytest.approx(24 * 131072 / 5e6 - 24 * 131072 / 50e9)


def test_the_host_is_told_by_hashes_only_or_block_by_block_with_tokens() -> None:
    time = VirtualTime(small(host_blocks=32))
    time.send(request("a", prompt=9, output=1))
    time.run()
    assert time.changes[1] == Stored(own("a", 0, 2)[::-1], tier=Tier.CPU)
    time = VirtualTime(small(host_blocks=32, is_describing_host_blocks=True))
    time.send(request("a", prompt=9, output=1))
    time.run()
    first, second = own("a", 0, 2)
    assert time.changes[1:] == [
        Stored((second,), first, tokens_of(second, 4), 1, tier=Tier.CPU),
        Stored((first,), None, tokens_of(first, 4), 0, tier=Tier.CPU),
    ]


def test_a_reset_leaves_the_host_unless_all_is_meant() -> None:
    for is_all in (False, True):
        time = VirtualTime(small(host_blocks=32))
        time.send(request("a", prompt=9, output=1))
        time.run()
        time.send(CacheReset(is_all=is_all))
        assert time.engine.host is not None
        assert len(time.engine.host) == (0 if is_all else 2)


def test_the_least_recently_used_block_leaves_the_host_first() -> None:
    tier = HostTier(3)
    assert tier.store([1, 2, 3]) == ([1, 2, 3], [])
    assert tier.store([1]) == ([], [])
    assert tier.store([4]) == ([4], [2])
    assert tier.store([5, 6, 7, 8]) == ([6, 7, 8], [3, 1, 4])
    assert len(tier) == 3
    assert [block_hash in tier for block_hash in (6, 7, 9)] == [True, True, False]


def test_what_the_host_drops_comes_back_from_the_disk_and_takes_its_time() -> None:
    spans = []
    for rate in (6e9, 6e6):
        time = VirtualTime(small(num_blocks=8, host_blocks=7, disk_blocks=100, disk_bytes_per_s=rate))
        for name in ("a", "flood", "more"):
            time.send(request(name, prompt=25, output=1, prefix=24 if name == "a" else 0))
            time.run()
        host = time.engine.host
        assert host is not None
        assert not set(host.hashes()) & set(request("a", 25, 1, prefix=24).block_hashes)
        start = time.now
        time.send(request("b", prompt=25, output=1, prefix=24))
        time.run()
        assert time.finished["b"].cached_tokens == 24
        spans.append(time.now - start)
        held: dict[Tier, set[int]] = {tier: set() for tier in Tier}
        for change in time.changes:
            if isinstance(change, Stored):
                assert not held[change.tier] & set(change.hashes)
                held[change.tier].update(change.hashes)
            elif isinstance(change, Removed):
                held[change.tier].remove(change.block_hash)
        assert held[Tier.CPU] == set(host.hashes())
        assert held[Tier.DISK] >= set(request("flood", 25, 1).block_hashes[:1])
    assert spans[1] - spans[0] == pytest.approx(24 * 131072 / 6e6 - 24 * 131072 / 6e9)


def test_what_one_engine_computed_another_one_loads_from_the_store_they_share() -> None:
    store = HostTier(100)
    first, second = (VirtualTime(small(store_bytes_per_s=6e6)) for _ in range(2))
    first.engine, second.engine = (Engine(small(store_bytes_per_s=6e6), store=store) for _ in range(2))
    first.send(request("a", prompt=25, output=1, prefix=24))
    first.run()
    second.send(request("b", prompt=25, output=1, prefix=24))
    second.run()
    assert second.finished["b"].cached_tokens == 24
    assert second.now > 24 * 131072 / 6e6 > first.now
    assert second.engine.counters.external_hits == 24
