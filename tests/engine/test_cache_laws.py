"""The law of cache events: whoever applies all of them from the beginning holds exactly what the cache holds."""

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.engine import Aborted, EngineConfig, Event
from shoal.engine.cache import HostPolicy
from shoal.engine.changes import Change, Cleared, Stored
from shoal.engine.events import CacheReset, Paused, PauseMode, Resumed
from shoal.pool.kvevents import Tier
from tests.engine.test_engine_laws import BLOCK, POOL, check_books
from tests.engine.virtual_time import VirtualTime, request, tokens_of

HOST = 10

submits = st.builds(
    request,
    st.uuids().map(str),
    st.integers(1, 50),
    st.integers(0, 40),
    prefix=st.sampled_from([0, 8, 24]),
    block_size=st.just(BLOCK),
    adapter=st.sampled_from(["", "x", "y"]),
)
operations: st.SearchStrategy[Event] = st.one_of(
    st.builds(CacheReset, is_forced=st.booleans(), is_all=st.just(True)),
    st.builds(Paused, mode=st.sampled_from(PauseMode), is_clearing=st.just(False)),
    st.builds(Resumed),
)
scripts = st.lists(st.one_of(submits, operations, st.integers(0, 30), st.integers(-6, -1)), max_size=60)


class Follower:
    """What a reader of the events believes; it refuses what cannot be."""

    def __init__(self) -> None:
        self.held: dict[Tier, set[int]] = {Tier.GPU: set(), Tier.CPU: set()}

    def apply(self, changes: Iterable[Change], *, has_tokens: bool) -> None:
        for change in changes:
            if isinstance(change, Cleared):
                assert change.is_all
                self.held = {Tier.GPU: set(), Tier.CPU: set()}
            elif isinstance(change, Stored):
                held = self.held[change.tier]
                assert not held & set(change.hashes), "stored twice"
                held |= set(change.hashes)
                if change.tier is Tier.GPU or has_tokens:
                    assert change.tokens == b"".join(tokens_of(each, BLOCK) for each in change.hashes)
            else:
                self.held[change.tier].remove(change.block_hash)


@pytest.mark.parametrize("policy", HostPolicy)
@pytest.mark.parametrize("is_describing", [False, True])
@settings(max_examples=60, deadline=None)
@given(script=scripts)
def test_replaying_all_changes_gives_what_the_cache_holds(
    policy: HostPolicy, is_describing: bool, script: list[Event | int]
) -> None:
    time = VirtualTime(
        EngineConfig(
            block_size=BLOCK,
            num_blocks=POOL,
            max_num_batched_tokens=20,
            max_num_seqs=5,
            max_loras=1,
            has_cache_events=True,
            host_blocks=HOST,
            host_policy=policy,
            is_describing_host_blocks=is_describing,
        )
    )
    follower = Follower()
    names: list[str] = []
    engine = time.engine

    def check() -> None:
        pending = engine._cache.take_changes()
        follower.apply([*time.changes, *pending], has_tokens=is_describing)
        time.changes.clear()
        assert follower.held[Tier.GPU] == set(engine.pool.cached_hashes())
        assert engine.host is not None
        assert follower.held[Tier.CPU] == set(engine.host.hashes())
        assert len(engine.host) <= HOST
        check_books(time)

    for move in script:
        if isinstance(move, int) and move < 0:
            for _ in range(-move):
                time.step()
                check()
        elif isinstance(move, int):
            time.send(Aborted(request_id=names[move % len(names)] if names else ""))
        else:
            names.append(getattr(move, "request_id", ""))
            time.send(move)
        check()
    time.send(Resumed())
    time.run()
    check()
    assert (engine.num_running, engine.num_waiting, engine.pool.num_held) == (0, 0, 0)
    refused = {name for name in names if name} - set(time.finished)
    assert all(name not in time.tokens for name in refused)
