"""Strides: many decode steps at once change what single steps change, to the last bit."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.engine import PROFILES, Aborted, Engine, EngineConfig, Event, Finish, PaceChanged, Ticked
from shoal.engine.changes import CacheChanged
from shoal.engine.events import CacheReset, Paused, PauseMode, Resumed
from tests.engine.virtual_time import request

BLOCK = 4


class Run:
    """One engine in virtual time.  heard: what it told beside tokens, each with its time."""

    def __init__(self, config: EngineConfig, *, is_streaming: bool) -> None:
        self.engine = Engine(config, is_streaming=is_streaming)
        self.heard: list[tuple[float, object]] = []
        self.ticks = 0

    def send(self, event: Event, now: float) -> None:
        for command in self.engine.handle(event, now):
            if isinstance(command, Finish | CacheChanged):
                self.heard.append((now, command))

    def go_to(self, now: float) -> None:
        while (deadline := self.engine.deadline()) is not None and deadline <= now:
            self.send(Ticked(), deadline)
            self.ticks += 1

    def look(self, now: float) -> float:
        """How full it is; what a stride has done by now is applied, though what comes changes nothing."""
        usage = self.engine.usage_ratio(now)
        self.send(Aborted(request_id="nobody"), now)
        assert usage == self.engine.pool.usage_ratio
        return usage

    def state(self) -> tuple[object, ...]:
        engine, counters = self.engine, self.engine.counters
        pool = engine.pool
        return (
            engine.num_running,
            engine.num_waiting,
            pool.num_free,
            sorted(pool.cached_hashes()),
            list(pool._free),
            engine.host.hashes() if engine.host is not None else (),
            (counters.steps, counters.generation, counters.preemptions, counters.prefix_hits, counters.cached),
        )


submits = st.tuples(
    st.just("submit"), st.integers(1, 50), st.integers(0, 60), st.sampled_from([0, 8, 24]), st.sampled_from(["", "x"])
)
moves = st.lists(
    st.tuples(
        st.floats(0.0, 0.2),
        st.one_of(
            submits,
            submits,
            st.tuples(st.just("abort"), st.integers(0, 20)),
            st.tuples(st.just("pace"), st.sampled_from([1.0, 3.0])),
            st.tuples(st.just("pause"), st.sampled_from(["wait", "keep"])),
            st.tuples(st.just("resume")),
            st.tuples(st.just("reset")),
            st.tuples(st.just("look")),
        ),
    ),
    max_size=40,
)


def event_of(move: tuple[object, ...], number: int) -> Event | None:
    match move:
        case ("submit", int(prompt), int(output), int(prefix), str(adapter)):
            shared = min(prefix, prompt + output)
            event = request(f"r{number}", prompt, output, prefix=shared, block_size=BLOCK, adapter=adapter)
            # Every second one leaves its answer without hashes, as the twin does where nobody knows what it says.
            hashes = event.block_hashes[: prompt // BLOCK] if number % 2 else event.block_hashes
            return msgspec.structs.replace(event, block_hashes=hashes)
        case ("abort", int(which)):
            return Aborted(request_id=f"r{which}")
        case ("pace", float(factor)):
            return PaceChanged(slow_factor=factor)
        case ("pause", str(mode)):
            return Paused(mode=PauseMode(mode), is_clearing=False)
        case ("resume",):
            return Resumed()
        case ("reset",):
            return CacheReset(is_forced=True)
    return None


def compare(config: EngineConfig, script: list[tuple[float, tuple[object, ...]]]) -> tuple[Run, Run]:
    single, strides = Run(config, is_streaming=True), Run(config, is_streaming=False)
    now = 0.0
    for number, (pause_s, move) in enumerate([*script, (0.0, ("resume",)), (1e9, ("look",))]):
        now += pause_s
        for run in (single, strides):
            run.go_to(now)
            event = event_of(move, number)
            if event is not None:
                run.send(event, now)
        assert strides.look(now) == single.look(now)
        assert strides.state() == single.state()
    assert strides.heard == single.heard
    assert strides.engine.counters.busy_s == pytest.approx(single.engine.counters.busy_s, rel=1e-12)
    return single, strides


@settings(max_examples=200, deadline=None)
@given(moves, st.sampled_from([14, 40, 400]), st.sampled_from([0, 12]), st.booleans(), st.sampled_from([5, 20]))
def test_strides_change_what_single_steps_change(
    script: list[tuple[float, tuple[object, ...]]], blocks: int, host: int, has_events: bool, budget: int
) -> None:
    config = EngineConfig(
        block_size=BLOCK,
        num_blocks=blocks,
        speculation=1.0 if has_events else 1.7,
        max_num_batched_tokens=budget,
        max_num_seqs=5,
        max_loras=1,
        host_blocks=host,
        has_cache_events=has_events,
    )
    compare(config, script)


def test_a_stride_ends_where_single_steps_end_on_real_profiles() -> None:
    config = EngineConfig(profile=PROFILES["h100-8b"], block_size=BLOCK, num_blocks=3000)
    script = [(0.037 * (n % 5), ("submit", 200 + 13 * n, 100 + 37 * n % 400, 24, "")) for n in range(60)]
    single, strides = compare(config, [(pause_s, tuple(move)) for pause_s, move in script])
    assert single.engine.counters.preemptions > 0
    assert strides.ticks * 5 < single.ticks
