"""The body of one answer, read by read: what passes, what is kept, and what is not mistaken for a whole chunk."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.hosts.direct.answerheads import AnswerHead, AnswerReader
from shoal.hosts.direct.chunks import WHOLE, WHOLE_BYTES
from shoal.hosts.direct.splice import KEEP_READS, Splice
from shoal.hosts.direct.tails import KEEP_BYTES
from tests.hosts.direct.direct_rig import CHUNKED_HEAD, chunk
from tests.hosts.direct.fuzz_rig import cut, examples

END = b"0\r\n\r\n"
MOST_HELD_BYTES = 2 * KEEP_BYTES + 2 * (KEEP_READS + 1) * (WHOLE_BYTES + 16)


def chunked_head() -> AnswerHead:
    head, rest = AnswerReader().split(CHUNKED_HEAD)
    assert head is not None
    assert rest == b""
    return head


class Passed:
    """What a splice writes and tells.  ended: `True`, `False` or the flag of what is broken, for each time."""

    def __init__(self, *, keeps_first: bool = False, keeps_tail: bool = True) -> None:
        self.out = b""
        self.ended: list[bool | str] = []
        self.splice = Splice(self, self, keeps_first=keeps_first, keeps_tail=keeps_tail)  # type: ignore[arg-type]
        self.take = self.splice.mode(chunked_head(), 1)
        self.most_held = 0

    def write(self, data: bytes) -> None:
        self.out += data

    def completed(self, is_reusable: bool) -> None:
        self.ended.append(is_reusable)

    def broken(self, flag: str) -> None:
        self.ended.append(flag)

    def read(self, *pieces: bytes) -> "Passed":
        for piece in pieces:
            self.take(piece)
            self.most_held = max(self.most_held, sum(len(kept) for kept in self.splice._tail))
        return self


def test_the_table_of_whole_chunks_is_what_chunks_look_like() -> None:
    assert len(WHOLE) == WHOLE_BYTES
    for size in (1, 9, 10, 15, 16, 255, 256, WHOLE_BYTES):
        made = chunk(b"x" * size)
        width, opening, payload = WHOLE[len(made)]
        assert made[:width] == opening == made[: -size - 2]
        assert payload == size


@pytest.mark.parametrize("size", [1, 15, 16, 200, 255, 256, WHOLE_BYTES - 1, WHOLE_BYTES, WHOLE_BYTES + 1, 3500])
def test_a_chunk_a_read_passes_as_it_came_and_is_counted(size: int) -> None:
    raw = [chunk(bytes([65 + number]) * size) for number in range(40)]
    passed = Passed().read(*raw)
    assert passed.splice.body_bytes == 40 * size
    assert passed.splice.may_put_in
    assert passed.most_held <= MOST_HELD_BYTES
    passed.read(END)
    assert (passed.out, passed.ended) == (b"".join(raw) + END, [True])


def test_a_read_in_the_middle_of_a_chunk_is_none_whatever_it_looks_like() -> None:
    inner = chunk(b"hello")
    outer = chunk(b"a" * 30 + inner + b"b" * 5)
    at = outer.index(inner)
    passed = Passed().read(chunk(b"first"), outer[:at], outer[at : at + len(inner)])
    assert not passed.splice.may_put_in
    passed.read(outer[at + len(inner) :], END)
    assert passed.out == chunk(b"first") + outer + END
    assert passed.splice.body_bytes == 5 + 30 + len(inner) + 5
    assert passed.ended == [True]


def test_a_read_in_the_middle_of_a_size_or_of_trailers_is_no_chunk_either() -> None:
    split = chunk(b"hello\r\n" + b"x" * 14)
    assert split.startswith(b"15\r\nhello\r\n")
    passed = Passed().read(chunk(b"first"), b"1", chunk(b"hello"), split[11:], END)
    assert (passed.out, passed.splice.body_bytes, passed.ended) == (chunk(b"first") + split + END, 26, [True])
    assert Passed().read(chunk(b"first"), b"0\r\n", chunk(b"hello")).ended == []
    assert Passed().read(chunk(b"first"), b"0\r\n", chunk(b"hello"), b"\r\n").ended == ["UPE"]


@pytest.mark.parametrize(
    "bad",
    [
        b"5\r\nhello\n\n",
        b"5\r\nhello..",
        b"6\r\nhello\r\n7\r\n",
        b"g\r\nhello\r\n",
        b"-5\r\nhell\r\n",
        b"5 ;\nhello\r\n",
        b"+5\r\nhell\r\n\r\n",
        b"\r\n\r\nhello\r\n",
    ],
)
def test_what_is_not_exactly_a_chunk_ends_the_answer(bad: bytes) -> None:
    assert Passed().read(chunk(b"first"), chunk(b"second"), bad).ended == ["UPE"]


@pytest.mark.parametrize("digits", [b"00C8", b"C8", b"c8;x=y", b"c8 "])
def test_other_ways_to_write_a_size_pass_as_they_came(digits: bytes) -> None:
    raw = digits + b"\r\n" + b"x" * 200 + b"\r\n"
    passed = Passed().read(chunk(b"first"), raw, raw, END)
    assert (passed.out, passed.splice.body_bytes, passed.ended) == (chunk(b"first") + 2 * raw + END, 405, [True])


@given(
    sizes=st.lists(st.integers(1, 2500), max_size=60),
    seed=st.integers(0, 2**32),
    by_chunk=st.booleans(),
    keeps_first=st.booleans(),
)
@examples(150)
def test_however_it_is_cut_the_same_passes_and_the_ends_are_kept_in_bounded_memory(
    sizes: list[int], seed: int, by_chunk: bool, keeps_first: bool
) -> None:
    random = Random(seed)
    chunks = [chunk(random.randbytes(size)) for size in sizes]
    whole = b"".join(chunks) + END
    pieces = [*chunks, END] if by_chunk else cut(whole, random)
    passed = Passed(keeps_first=keeps_first).read(*pieces)
    assert (passed.out, passed.ended) == (whole, [True])
    assert passed.splice.body_bytes == sum(sizes)
    assert passed.splice.tail.endswith(whole[-KEEP_BYTES:])
    assert passed.most_held <= MOST_HELD_BYTES
    if keeps_first:
        assert passed.splice.first.startswith(whole[:KEEP_BYTES])
        assert len(passed.splice.first) < 2 * KEEP_BYTES


def test_nothing_is_kept_of_an_answer_that_can_name_no_usage() -> None:
    passed = Passed(keeps_tail=False).read(*[chunk(b"x" * 200)] * 50, END)
    assert passed.splice.tail == b""
    assert (passed.splice.body_bytes, passed.ended) == (10_000, [True])
