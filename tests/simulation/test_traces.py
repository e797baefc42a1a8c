"""Public trace formats become sessions: lengths, times and what prompts share are as recorded."""

import json
import time

import pytest

from shoal.kernel import InvalidInput
from shoal.simulation import Session, Turn, traces
from shoal.simulation.experiment import Trace, sessions_of


def turns(session: Session) -> list[Turn]:
    return [turn for turn in session.turns() if isinstance(turn, Turn)]


def test_mooncake_rows_keep_their_times_lengths_and_shared_blocks() -> None:
    rows = [
        {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp": 3000, "input_length": 1500, "output_length": 7, "hash_ids": [0, 1, 9]},
    ]
    one, two = traces.mooncake([json.dumps(row).encode() for row in rows], rate=2.0)
    assert (one.arrives_s, two.arrives_s) == (0.0, 1.5)
    (first,), (second,) = turns(one), turns(two)
    assert (first.prompt.tokens, first.output_tokens) == (1100, 5)
    shared = [a == b for a, b in zip(first.prompt.chain, second.prompt.chain, strict=False)]
    assert shared == [True] * 64 + [False] * 4


def test_what_is_left_behind_a_skip_begins_at_nought_and_is_the_rest_of_the_trace() -> None:
    rows = [{"timestamp": 1000 * n, "input_length": 600 + n, "output_length": 5, "hash_ids": [n, 90]} for n in range(9)]
    lines = [b"\n".join(json.dumps(row).encode() for row in rows)]
    first, behind = (
        sessions_of(Trace(path="x", format="mooncake", limit=4, skip=skip, rate=2.0), lines) for skip in (0, 4)
    )
    assert [session.arrives_s for session in first] == [session.arrives_s for session in behind] == [0.0, 0.5, 1.0, 1.5]
    assert [turns(session)[0].prompt.tokens for session in first + behind] == [600 + n for n in range(8)]
    assert len(sessions_of(Trace(path="x", format="mooncake", skip=2), lines)) == 7
    with pytest.raises(InvalidInput, match="no session behind the 9 to skip"):
        sessions_of(Trace(path="x", format="mooncake", skip=9), lines)


@pytest.mark.parametrize("limit", [1, 2, 9, 0])
def test_a_limit_behind_a_skip_counts_whole_sessions(limit: int) -> None:
    rows = [
        {
            "timestamp": 10_000 * turn + n,
            "input_length": 600 + 600 * turn,
            "output_length": 5,
            "hash_ids": ids[: turn + 2],
        }
        for turn in range(3)
        for n, ids in enumerate([range(100 * k, 100 * k + 9) for k in range(4)])
    ]
    lines = b"\n".join(json.dumps({**row, "hash_ids": list(row["hash_ids"])}).encode() for row in rows)
    trace = Trace(path="x", format="mooncake", has_sessions=True, limit=limit, skip=2)
    found = sessions_of(trace, [lines])
    assert [len(turns(session)) for session in found] == [3, 3][: limit or None]
    assert [session.arrives_s for session in found] == pytest.approx([0.0, 0.001][: limit or None])


def test_azure_rows_share_nothing() -> None:
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n"
        "2023-11-16 18:17:05.9799600,4808,12\n"
    )
    one, two = traces.azure(text)
    assert (one.arrives_s, two.arrives_s) == (0.0, 2.0)
    (first,), (second,) = turns(one), turns(two)
    assert first.prompt.tokens == 4808
    assert not set(first.prompt.chain.tolist()) & set(second.prompt.chain.tolist())


def test_claude_code_sessions_grow_and_keep_to_their_own_ids() -> None:
    requests = [
        {"t": 0.0, "type": "n", "in": 130, "out": 20, "hash_ids": [1, 2, 3], "think_time": 1.0},
        {"type": "subagent", "requests": [{"in": 64, "out": 5, "hash_ids": [9], "think_time": 500.0}]},
        {"t": 9.0, "type": "s", "in": 200, "out": 20, "hash_ids": [1, 2, 3, 4], "think_time": 2.0},
    ]
    data = json.dumps({"id": "s", "block_size": 64, "requests": requests}).encode()
    one, two = traces.claude_code([data, data])
    first, sub, last = turns(one)
    assert (first.prompt.tokens, sub.prompt.tokens, last.prompt.tokens) == (130, 64, 200)
    assert sub.think_s == 60.0
    assert last.prompt.chain[:8].tolist() == first.prompt.chain[:8].tolist()
    assert not set(turns(two)[0].prompt.chain.tolist()) & set(first.prompt.chain.tolist())


@pytest.mark.parametrize(
    "line", [b"{", b'{"timestamp": 1}', b'{"timestamp":0,"input_length":99999999999,"output_length":1}']
)
def test_a_bad_line_is_named(line: bytes) -> None:
    with pytest.raises(InvalidInput, match="line 1"):
        traces.mooncake([line])


def test_times_of_all_traces_are_read_whether_they_name_a_zone_or_not() -> None:
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-05-10 00:00:00+00:00,100,10\n"
        "2024-05-10 00:00:00.5+00:00,100,10\n"
        "2024-05-10 00:00:01.2500000,100,10\n"
    )
    assert [session.arrives_s for session in traces.azure(text)] == [0.0, 0.5, 1.25]


def test_mooncake_rows_that_continue_each_other_are_sessions_and_keep_their_pauses_at_any_rate() -> None:
    rows = [
        {"timestamp": 6000, "input_length": 1030, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp": 6000, "input_length": 1040, "output_length": 5, "hash_ids": [0, 1, 3]},
        {"timestamp": 9000, "input_length": 2050, "output_length": 7, "hash_ids": [0, 1, 4, 5, 6]},
        {"timestamp": 9000, "input_length": 600, "output_length": 7, "hash_ids": [9, 10]},
    ]
    lines = [json.dumps(row).encode() for row in rows]
    sessions = traces.mooncake(lines, rate=3.0, has_sessions=True)
    assert [(session.arrives_s, len(turns(session))) for session in sessions] == [(0.0, 1), (0.0, 2), (1.0, 1)]
    first, second = turns(sessions[1])
    assert (first.at_s, second.at_s) == (0.0, 3.0)
    assert len(traces.mooncake(lines)) == 4


def rounds(*sizes: tuple[int, int, int], session: str = "claude:a") -> list[bytes]:
    """Rounds of (input, cached, output) tokens, one every 10 s, each answered after 4 s."""
    return [
        json.dumps(
            {
                "provider": "claude",
                "session_id": session,
                "round_index": n,
                "model": "x",
                "input_tokens_total": tokens,
                "prefix_tokens": cached,
                "output_tokens": out,
                "timing_events": [
                    {"event_type": "tool_result", "timestamp": f"2026-06-01T05:40:{10 * n:02}.000Z"},
                    {"event_type": "text", "timestamp": f"2026-06-01T05:40:{10 * n + 4:02}.500Z"},
                ],
            }
        ).encode()
        for n, (tokens, cached, out) in enumerate(sizes)
    ]


def test_tracelab_rounds_grow_are_cut_and_pause_as_they_did() -> None:
    lines = rounds((1600, 800, 160), (2400, 0, 160), (960, 640, 160)) + rounds((1600, 800, 10), session="claude:b")
    one, two = traces.tracelab(lines)
    first, grown, cut = turns(one)
    assert [turn.prompt.tokens for turn in (first, grown, cut)] == [1600, 2400, 960]
    assert [turn.think_s for turn in (first, grown, cut)] == [0.0, 5.5, 5.5]

    def shared(a: Turn, b: Turn) -> int:
        return 16 * int(sum(x == y for x, y in zip(a.prompt.chain, b.prompt.chain, strict=False)))

    assert shared(first, grown) == 1600
    assert grown.prompt.blocks(16)[:110] == first.blocks(16)  # its answer is part of what grew
    assert shared(grown, cut) == 640
    assert shared(first, turns(two)[0]) == 800  # the system prompt
    assert len(traces.tracelab(lines, limit=1)) == 1
    with pytest.raises(InvalidInput, match="line 5"):
        traces.tracelab([*lines, b'{"session_id": 3}'])


@pytest.mark.parametrize("block", [-1, 1 << 64])
def test_mooncake_ids_that_are_none_name_their_line(block: int) -> None:
    row = {"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [0, block]}
    with pytest.raises(InvalidInput, match="line 1: hash_ids must be"):
        traces.mooncake([json.dumps(row).encode()])


def test_a_table_that_is_none_names_its_line() -> None:
    rows = ["2023-11-16 18:17:03.9,4808,10", f"2023-11-16 18:17:03.9,{'4' * 200_000},10"]
    with pytest.raises(InvalidInput, match="line 3: field larger"):
        traces.azure("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))


@pytest.mark.parametrize("field", ["prefix_tokens", "output_tokens", "input_tokens_total"])
@pytest.mark.parametrize("tokens", [-1, traces.MAX_TOKENS + 1])
def test_tokens_of_a_round_are_bounded(field: str, tokens: int) -> None:
    row = {"session_id": "s", "input_tokens_total": 10, "output_tokens": 5, "prefix_tokens": 0, field: tokens}
    with pytest.raises(InvalidInput, match=f"line 1: .* of {tokens} tokens"):
        traces.tracelab([json.dumps(row).encode()])


def test_pauses_of_rounds_do_not_depend_on_where_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the two moments clocks in New York went back by an hour."""
    rows = [
        {
            "session_id": "s", "input_tokens_total": 10 + at, "output_tokens": 5, "round_index": at,
            "timing_events": [{"event_type": "user_message", "timestamp": f"2025-11-02T0{5 + at}:59:50"},
                              {"event_type": "message", "timestamp": f"2025-11-02T0{5 + at}:59:55"}],
        }
        for at in (0, 1)
    ]  # fmt: skip
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        (session,) = traces.tracelab([json.dumps(row).encode() for row in rows], most_think_s=1e9)
        assert turns(session)[1].think_s == 3595.0
    finally:
        monkeypatch.undo()
        time.tzset()


def test_what_is_nested_too_deep_names_its_place() -> None:
    deep = b'{"more": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    for read, place in (
        (traces.mooncake, "line 1"),
        (traces.tracelab, "line 1"),
        (traces.claude_code, "file 1"),
    ):
        with pytest.raises(InvalidInput, match=place):
            read([deep])


def test_a_trace_begins_with_its_first_time_whatever_that_is() -> None:
    rows = [
        b'{"timestamp": %d, "input_length": 9, "output_length": 1}' % at
        for at in (1_700_000_002_000, 1_700_000_000_000)
    ]
    assert [session.arrives_s for session in traces.mooncake(rows)] == [2.0, 0.0]
    table = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,9,1\n2023-11-16 18:17:01,9,1\n"
    assert [session.arrives_s for session in traces.azure(table, rate=2.0)] == [1.0, 0.0]


@pytest.mark.parametrize("has_sessions", [False, True])
def test_times_that_a_run_would_never_come_to_are_refused(has_sessions: bool) -> None:
    rows = [
        b'{"timestamp": %s, "input_length": %d, "output_length": 1, "hash_ids": [1]}' % (at, 600 + n)
        for n, at in enumerate((b"0", b"1e300"))
    ]
    with pytest.raises(InvalidInput, match="more than 100 days"):
        traces.mooncake(rows, has_sessions=has_sessions)
    with pytest.raises(InvalidInput, match="more than 100 days"):
        traces.azure("TIMESTAMP,ContextTokens,GeneratedTokens\n0001-01-01 00:00:00,1,1\n9999-12-31 00:00:00,1,1\n")


def test_blocks_larger_than_any_prompt_are_refused_and_ids_behind_it_cost_nothing() -> None:
    text = '{"id": "a", "block_size": %d, "requests": [{"in": 40, "out": 1, "hash_ids": [%s]}]}'
    with pytest.raises(InvalidInput, match="block_size"):
        traces.claude_code([(text % (1 << 60, "1")).encode()])
    (session,) = traces.claude_code([(text % (16 * 250_000, ",".join("1" * 20_000))).encode()])
    (turn,) = turns(session)
    assert turn.prompt.tokens == 40
