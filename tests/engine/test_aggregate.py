"""The engine in the large: it loses nothing, and its figures are near those of single steps."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.engine import (
    PROFILES,
    Aborted,
    AggregateEngine,
    Engine,
    EngineConfig,
    Event,
    Finish,
    PaceChanged,
    Submitted,
    Ticked,
)
from shoal.engine.changes import CacheChanged, Removed, Stored
from tests.engine.virtual_time import request

BLOCK = 4


class Run:
    """One engine in virtual time, whichever."""

    def __init__(self, engine: Engine | AggregateEngine) -> None:
        self.engine = engine
        self.finished: dict[str, Finish] = {}
        self.known: set[int] = set()

    def send(self, event: Event, now: float) -> None:
        for command in self.engine.handle(event, now):
            if isinstance(command, Finish):
                assert command.request_id not in self.finished
                self.finished[command.request_id] = command
            elif isinstance(command, CacheChanged):
                for change in command.changes:
                    if isinstance(change, Stored):
                        assert not self.known & set(change.hashes)
                        self.known.update(change.hashes)
                    elif isinstance(change, Removed):
                        self.known.remove(change.block_hash)

    def go_to(self, now: float) -> None:
        while (deadline := self.engine.deadline()) is not None and deadline <= now:
            self.send(Ticked(), deadline)


moves = st.lists(
    st.tuples(
        st.floats(0.0, 0.2),
        st.one_of(
            st.tuples(st.just("submit"), st.integers(1, 50), st.integers(0, 60), st.sampled_from([0, 8, 24])),
            st.tuples(st.just("abort"), st.integers(0, 20)),
            st.tuples(st.just("pace"), st.sampled_from([1.0, 3.0])),
        ),
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(moves, st.sampled_from([14, 40, 400]), st.booleans())
def test_every_request_ends_once_with_all_its_tokens_and_holds_nothing(
    script: list[tuple[float, tuple[object, ...]]], blocks: int, has_events: bool
) -> None:
    engine = AggregateEngine(
        EngineConfig(
            block_size=BLOCK, num_blocks=blocks, max_num_batched_tokens=20, max_num_seqs=5, has_cache_events=has_events
        )
    )
    run = Run(engine)
    asked: dict[str, int] = {}
    now = 0.0
    for number, (pause_s, move) in enumerate(script):
        now += pause_s
        run.go_to(now)
        match move:
            case ("submit", int(prompt), int(output), int(prefix)):
                event = request(f"r{number}", prompt, output, prefix=min(prefix, prompt + output), block_size=BLOCK)
                if prompt + max(0, output - 1) <= blocks * BLOCK:
                    asked[event.request_id] = output
                run.send(event, now)
            case ("abort", int(which)):
                run.send(Aborted(request_id=f"r{which}"), now)
            case ("pace", float(factor)):
                run.send(PaceChanged(slow_factor=factor), now)
        assert engine.num_running + engine.num_waiting == len(asked) - len(run.finished)
        assert 0.0 <= engine.usage_ratio(now) <= 1.0
    run.go_to(1e9)
    run.send(request("last", 1, 1), 1e9)  # what an abort changed is told with the next step
    run.go_to(2e9)
    assert run.finished.keys() - {"last"} == asked.keys()
    asked["last"] = 1
    for name, finish in run.finished.items():
        assert finish.output_tokens == asked[name] or (finish.reason == "abort" and finish.output_tokens <= asked[name])
        assert finish.arrived_at <= (finish.first_token_at or finish.arrived_at) <= finish.finished_at
    cache = engine._cache
    assert (cache.held, cache.private, engine._context_tokens, engine._decoding) == (0, 0.0, 0, 0)
    assert cache.room == blocks >= len(cache)
    assert cache._idle_blocks == sum(segment.size for segment in cache._idle) <= blocks
    if has_events:
        assert run.known == cache._segment_of.keys()


def both(config: EngineConfig, plan: list[tuple[float, Submitted]]) -> list[Run]:
    """What single steps and large ones make of the same requests, all of them served."""
    runs = [Run(Engine(config, is_streaming=False)), Run(AggregateEngine(config))]
    for run in runs:
        for at, event in plan:
            run.go_to(at)
            run.send(event, at)
        run.go_to(1e9)
        assert len(run.finished) == len(plan)
    return runs


def test_its_figures_are_those_of_single_steps_but_for_little() -> None:
    """A cache that overflows, batches of some dozens, prompts that share a beginning."""
    config = EngineConfig(profile=PROFILES["h100-8b"], num_blocks=4_000)
    rng = np.random.default_rng(3)
    plan: list[tuple[float, Submitted]] = []
    at = 0.0
    for n in range(600):
        at += float(rng.exponential(0.08))
        prompt, output = int(rng.integers(100, 3000)), int(rng.integers(20, 500))
        name = f"{n % 20}" if n % 3 else f"x{n}"
        event = request(name, prompt, output, prefix=64, block_size=16)
        plan.append((at, Submitted(request_id=f"r{n}", prompt_tokens=prompt, output_tokens=output,
                                   block_hashes=event.block_hashes[: prompt // 16])))  # fmt: skip
    runs = both(config, plan)
    ttft, total, cached = (
        np.array([[figure(run.finished[event.request_id]) for _, event in plan] for run in runs])
        for figure in (
            lambda each: (each.first_token_at or 0.0) - each.arrived_at,
            lambda each: each.finished_at - each.arrived_at,
            lambda each: float(each.cached_tokens),
        )
    )
    assert cached[0].mean() > 200
    for figures, most in ((ttft, 0.03), (total, 0.02), (cached, 0.03)):
        assert abs(figures[1].mean() / figures[0].mean() - 1) < most


def test_what_is_left_of_an_answer_is_its_blocks_and_each_once() -> None:
    engine = AggregateEngine(EngineConfig(block_size=BLOCK, num_blocks=40))
    run = Run(engine)
    run.send(request("a", 10, 9, block_size=BLOCK), 0.0)
    run.go_to(1e9)
    # Of 19 tokens the last one was sampled only: four full blocks that can be found, and one that is half full.
    assert (len(engine._cache), engine._cache._idle_blocks) == (4, 5)


def test_as_many_are_thrown_back_as_by_single_steps_where_blocks_run_out() -> None:
    config = EngineConfig(profile=PROFILES["h100-8b"], num_blocks=1_200)
    rng = np.random.default_rng(5)
    plan: list[tuple[float, Submitted]] = []
    at = 0.0
    for n in range(400):
        at += float(rng.exponential(0.25))
        plan.append((at, request(f"r{n}", int(rng.integers(500, 3_000)), int(rng.integers(200, 400)), block_size=16)))
    runs = both(config, plan)
    single, large = (run.engine.counters.preemptions for run in runs)
    assert single > 50
    assert abs(large / single - 1) < 0.2
    single_s, large_s = (
        np.mean([each.finished_at - each.arrived_at for each in run.finished.values()]) for run in runs
    )
    assert abs(large_s / single_s - 1) < 0.03
