import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.wire import SseSplitter
from shoal.wire.sse import data_of


def split(stream: bytes, cuts: list[int], max_event_bytes: int = 1 << 20) -> tuple[list[bytes], bytes]:
    splitter = SseSplitter(max_event_bytes)
    events: list[bytes] = []
    edges = [0, *sorted({cut % (len(stream) + 1) for cut in cuts}), len(stream)]
    for start, stop in itertools.pairwise(edges):
        events += [event.raw for event in splitter.feed(stream[start:stop])]
    return events, splitter.pending


_CUTS = st.lists(st.integers(min_value=0, max_value=200), max_size=8)


@given(st.lists(st.sampled_from((b"data: a", b"\n", b"\r\n", b"\r", b"x", b": c"))).map(b"".join), _CUTS)
def test_events_are_the_same_however_the_bytes_are_cut(stream: bytes, cuts: list[int]) -> None:
    events, pending = split(stream, cuts)
    assert b"".join(events) + pending == stream
    # A carriage return at the end of a chunk waits for a line feed, so only the end may differ by that wait.
    whole, left = split(stream + b"z", [])
    again, left_again = split(stream + b"z", cuts)
    assert (whole, left) == (again, left_again)


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r"])
def test_every_line_ending_ends_an_event(end: bytes) -> None:
    line = end[: len(end) // 2]
    stream = b"event: a" + line + b"data: 1" + end + b"data: 2" + end + b"data: 3"
    events, pending = split(stream, [])
    assert [data_of(event) for event in events] == [b"1", b"2"]
    assert pending == b"data: 3"


@given(st.binary(max_size=400), _CUTS)
def test_no_byte_is_lost_or_changed_under_a_tight_bound(stream: bytes, cuts: list[int]) -> None:
    events, pending = split(stream, cuts, max_event_bytes=16)
    assert b"".join(events) + pending == stream


def test_an_event_over_the_bound_comes_in_pieces_and_the_next_one_is_whole() -> None:
    splitter = SseSplitter(max_event_bytes=100)
    events = []
    for chunk in (b"data: " + b"a" * 90, b"a" * 90, b"\n", b"\ndata: 2\n\n"):
        events += splitter.feed(chunk)
        assert len(splitter.pending) <= 100
    assert [event.is_whole for event in events] == [False, False, True]
    assert data_of(events[-1].raw) == b"2"


@pytest.mark.parametrize(
    ("event", "data"),
    [
        (b'data: {"a":1}\n\n', b'{"a":1}'),
        (b"data:x\n\n", b"x"),
        (b"data: a\r\ndata: b\r\n\r\n", b"a\nb"),
        (b"event: ping\n\n", b""),
        (b": comment\n\n", b""),
        (b"id: 1\ndata:  two spaces\n\n", b" two spaces"),
    ],
)
def test_data_lines_are_joined(event: bytes, data: bytes) -> None:
    assert data_of(event) == data
