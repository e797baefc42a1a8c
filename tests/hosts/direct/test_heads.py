"""Heads that were read before are not read again, and that changes nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.hosts.direct.answerheads import AnswerReader, BadAnswer
from shoal.hosts.direct.heads import BadHead, HeadReader, RequestHead

LINES = (
    b"content-length: 5",
    b"Content-Length: 6",
    b"CONTENT-LENGTH: 5",
    b"content-length:  5",
    b"content-length: 5 ",
    b"content-length: +5",
    b"content-length: 0",
    b"transfer-encoding: chunked",
    b"connection: upgrade",
    b"connection: close",
    b"connection: x-a",
    b"upgrade: websocket",
    b"x-a: b",
    b"x-a: c",
    b"cookie: a=b",
    b"expect: 100-continue",
    b"x-request-id: 1",
    b"authorization: k",
    b"host: other",
    b"x-forwarded-for: 1.1.1.1",
    b"x-envoy-a: b",
    b"bad",
)


def told(reader: HeadReader, head: bytes) -> object:
    """Everything that a reader says of a head."""
    try:
        request, length = reader.read(head)
    except BadHead as error:
        return error.status
    slots = [getattr(request, name) for name in RequestHead.__slots__ if name != "target"]
    return [length, request.target.path, request.target.minor, *slots]


@given(
    st.lists(
        st.tuples(
            st.sampled_from((b"POST /a HTTP/1.1", b"GET /a HTTP/1.1", b"POST /a HTTP/1.0", b"GET http://h/a HTTP/1.1")),
            st.lists(st.sampled_from(LINES), max_size=4),
        ),
        max_size=12,
    )
)
def test_a_reader_with_a_memory_says_what_a_fresh_one_says(heads: list[tuple[bytes, list[bytes]]]) -> None:
    reader = HeadReader(("x-envoy-",))
    for first, lines in heads:
        head = b"\r\n".join((first, b"host: a", *lines))
        for _ in range(2):
            assert told(reader, head) == told(HeadReader(("x-envoy-",)), head)


def test_what_is_remembered_is_bounded() -> None:
    reader, answers = HeadReader(()), AnswerReader()
    for number in range(10_000):
        reader.read(b"POST /%d HTTP/1.1\r\nhost: a\r\nx-a: %d\r\ncontent-length: 5" % (number, number))
        answers.read(b"HTTP/1.1 200 OK\r\nx-a: %d" % number)
    for memo in (reader._heads, reader._fields, reader._targets, answers._memo):
        assert 0 < len(memo) <= 4096


def test_fields_that_are_new_in_each_request_push_nothing_out() -> None:
    reader = HeadReader(())
    reader.read(b"POST /a HTTP/1.1\r\nhost: a\r\ncontent-length: 5")
    kept = dict(reader._heads)
    for number in range(1000):
        reader.read(b"POST /a HTTP/1.1\r\nhost: a\r\nx-request-id: %d\r\ncontent-length: 5" % number)
    assert reader._heads == kept


@given(st.binary(max_size=200))
def test_no_bytes_make_a_reader_raise_anything_else(data: bytes) -> None:
    for head in (data, b"POST /a HTTP/1.1\r\n" + data, b"POST /a HTTP/1.1\r\nhost: a\r\n" + data):
        assert told(HeadReader(()), head)
    for answer in (data, b"HTTP/1.1 200 OK\r\n" + data):
        try:
            AnswerReader().read(answer)
        except BadAnswer:
            continue


def test_a_secret_line_is_not_kept_by_itself() -> None:
    reader = HeadReader(())
    reader.read(b"POST /a HTTP/1.1\r\nhost: a\r\nauthorization: secret\r\ncookie: secret")
    assert not any(b"secret" in line for line in reader._fields)


@pytest.mark.parametrize("name", ["content-length: 5", "Content-Length: 5"])
def test_the_length_stands_apart_from_what_is_remembered(name: str) -> None:
    reader = HeadReader(())
    first, _ = reader.read(f"POST /a HTTP/1.1\r\nhost: a\r\n{name}\r\nx-a: b".encode())
    again, length = reader.read(f"POST /a HTTP/1.1\r\nhost: a\r\n{name}0\r\nx-a: b".encode())
    assert again is first
    assert length == 50
