"""Pauses and forced resets of an engine: nothing is lost, nothing runs meanwhile."""

from shoal.engine import Aborted, EngineConfig
from shoal.engine.changes import Cleared, Stored
from shoal.engine.commands import ConfirmPause, ConfirmReset
from shoal.engine.events import CacheReset, Paused, PauseMode, Resumed
from tests.engine.virtual_time import VirtualTime, request


def small(**changes: object) -> EngineConfig:
    fields: dict[str, object] = {"block_size": 4, "num_blocks": 64, "max_num_batched_tokens": 32, "max_num_seqs": 8}
    return EngineConfig(**{**fields, "has_cache_events": True, **changes})  # type: ignore[arg-type]


def busy() -> VirtualTime:
    """An engine in the middle of one answer."""
    time = VirtualTime(small())
    time.send(request("a", prompt=8, output=20))
    for _ in range(4):
        time.step()
    return time


def test_a_pause_that_aborts_ends_everything_and_holds_what_comes_after() -> None:
    time = busy()
    commands = time.send(Paused(mode=PauseMode.ABORT))
    assert (time.finished["a"].reason, time.finished["a"].output_tokens) == ("abort", 4)
    assert ConfirmPause() in commands
    assert time.engine.pool.num_cached == 0
    time.send(request("b", prompt=8, output=2))
    time.run()
    assert (time.engine.is_paused, time.engine.num_waiting, "b" in time.finished) == (True, 1, False)
    time.send(Resumed())
    time.run()
    assert time.finished["b"].reason == "length"


def test_a_pause_that_waits_lets_earlier_requests_end_and_no_later_one_begin() -> None:
    time = busy()
    assert time.send(Paused(mode=PauseMode.WAIT)) == []
    time.send(request("b", prompt=8, output=2))
    time.send(request("c", prompt=8, output=2))
    time.send(Aborted(request_id="c"))
    time.run()
    assert (time.finished["a"].reason, time.finished["a"].output_tokens) == ("length", 20)
    assert "b" not in time.finished
    assert (time.engine.num_waiting, time.engine.pool.num_cached) == (1, 0)
    time.send(Resumed())
    time.run()
    assert time.finished["b"].reason == "length"
    assert time.finished["c"].reason == "abort"


def test_a_pause_that_keeps_goes_on_where_it_stood_and_stores_its_blocks_again() -> None:
    time = busy()
    time.send(Paused(mode=PauseMode.KEEP))
    time.step()
    assert time.engine.deadline() is None
    assert (time.engine.num_waiting, time.tokens["a"]) == (1, 5)
    time.changes.clear()
    time.send(Resumed())
    time.run()
    assert (time.finished["a"].reason, time.tokens["a"]) == ("length", 20)
    assert isinstance(time.changes[0], Cleared)
    assert isinstance(time.changes[1], Stored)
    assert time.changes[1].parent is None


def test_a_pause_without_clearing_keeps_cache_and_batch() -> None:
    time = busy()
    time.send(Paused(mode=PauseMode.KEEP, is_clearing=False))
    time.step()
    assert time.engine.num_running == 1
    time.send(Resumed())
    time.run()
    assert (time.tokens["a"], time.finished["a"].preemptions) == (20, 0)


def test_resuming_ends_a_pause_that_never_became_complete() -> None:
    time = busy()
    time.send(Paused(mode=PauseMode.WAIT))
    time.send(request("b", prompt=8, output=2))
    assert time.send(Resumed()) == [ConfirmPause()]
    time.run()
    assert set(time.finished) == {"a", "b"}


def test_an_abort_overtakes_a_pause_that_waits() -> None:
    time = busy()
    time.send(Paused(mode=PauseMode.WAIT))
    time.send(request("b", prompt=8, output=2))
    assert ConfirmPause() in time.send(Paused(mode=PauseMode.ABORT))
    assert {done.reason for done in time.finished.values()} == {"abort"}
    assert time.engine.pool.num_held == 0


def test_a_forced_reset_makes_running_requests_compute_again() -> None:
    time = busy()
    assert time.send(CacheReset()) == [ConfirmReset(is_done=False)]
    assert time.send(CacheReset(is_forced=True)) == []
    time.changes.clear()
    time.run()
    assert (time.finished["a"].preemptions, time.tokens["a"]) == (1, 20)
    stored = [
        change for change in time.changes[time.changes.index(Cleared(is_all=False)) :] if isinstance(change, Stored)
    ]
    assert sum(len(run.hashes) for run in stored) == time.engine.pool.num_cached
