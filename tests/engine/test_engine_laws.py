"""Laws of the engine on random workloads: nothing is lost, nothing is held for ever, chance plays no part."""

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.engine import Aborted, EngineConfig
from shoal.engine.sequences import Sequence
from tests.engine.virtual_time import VirtualTime, request

BLOCK = 4
POOL = 24

arrivals = st.tuples(
    st.just("submit"),
    st.integers(1, 50),
    st.integers(0, 40),
    st.sampled_from([0, 8, 24]),
    st.sampled_from(["", "x", "y"]),
)
moves = st.lists(
    st.one_of(arrivals, st.tuples(st.just("abort"), st.integers(0, 30)), st.tuples(st.just("step"), st.integers(1, 6))),
    max_size=60,
)


def check_books(time: VirtualTime) -> None:
    """Blocks free and held add up, and every reference belongs to a running request."""
    engine = time.engine
    pool = engine.pool
    assert pool.num_free + pool.num_held == POOL
    expected = [0] * POOL
    live: list[Sequence] = engine._batcher.running
    for sequence in live:
        assert sequence.computed <= len(sequence.blocks) * BLOCK
        assert len(set(sequence.blocks)) == len(sequence.blocks)
        for block in sequence.blocks:
            expected[block] += 1
    assert [pool.references(block) for block in range(POOL)] == expected
    assert pool.num_held == sum(1 for count in expected if count)
    assert pool.num_cached <= POOL
    assert all(not sequence.blocks for sequence in engine._batcher.waiting())


def play(script: list[tuple[object, ...]], check: bool = True) -> tuple[VirtualTime, dict[str, int]]:
    """Run a script; returns the engine's time line and the output that each request asked for."""
    time = VirtualTime(
        EngineConfig(block_size=BLOCK, num_blocks=POOL, max_num_batched_tokens=20, max_num_seqs=5, max_loras=1)
    )
    asked: dict[str, int] = {}
    for move in script:
        if move[0] == "submit":
            _, prompt, output, prefix, adapter = move
            assert isinstance(prompt, int)
            assert isinstance(output, int)
            assert isinstance(prefix, int)
            assert isinstance(adapter, str)
            name = f"r{len(asked)}"
            asked[name] = output
            time.send(
                request(name, prompt, output, prefix=min(prefix, prompt + output), block_size=BLOCK, adapter=adapter)
            )
        elif move[0] == "abort":
            time.send(Aborted(request_id=f"r{move[1]}"))
        else:
            assert isinstance(move[1], int)
            for _ in range(move[1]):
                time.step()
        if check:
            check_books(time)
    time.run()
    return time, asked


@settings(max_examples=150, deadline=None)
@given(moves)
def test_blocks_are_conserved_and_every_request_ends_once(script: list[tuple[object, ...]]) -> None:
    time, asked = play(script)
    check_books(time)
    engine = time.engine
    assert (engine.num_running, engine.num_waiting, engine.pool.num_held) == (0, 0, 0)
    refused = set(asked) - set(time.finished)
    assert set(time.finished) <= set(asked)
    for name, done in time.finished.items():
        assert done.cached_tokens < done.prompt_tokens or done.cached_tokens == 0
        assert time.tokens.get(name, 0) == done.output_tokens
        assert done.reason == "abort" or done.output_tokens == asked[name]
        assert done.arrived_at <= done.finished_at
    assert all(name not in time.tokens for name in refused)
    assert engine.counters.generation == sum(time.tokens.values())
    assert engine.counters.cached <= engine.counters.prefix_hits <= engine.counters.prefix_queries


@settings(max_examples=40, deadline=None)
@given(moves)
def test_the_same_script_gives_the_same_run(script: list[tuple[object, ...]]) -> None:
    first, _ = play(script, check=False)
    second, _ = play(script, check=False)
    assert first.now == second.now
    assert first.finished == second.finished
