"""Public trace formats become sessions: lengths, times and what prompts share are as recorded."""

import json

import pytest

from shoal.kernel import InvalidInput
from shoal.simulation import Session, Turn, traces


def turns(session: Session) -> list[Turn]:
    return list(session.turns())


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
