"""What engines answer, however it is cut: a client gets what h11 reads of it, or sees that there is no whole answer."""

from random import Random
from typing import NamedTuple

import h11
from hypothesis import example, given
from hypothesis import strategies as st

from tests.hosts.direct.fuzz_readers import Answer, Asked, read_answers
from tests.hosts.direct.fuzz_rig import Transport, World, cut, examples, world
from tests.hosts.direct.test_fuzz_requests import PARTS, bodies, chunked, fields, seeds

ASK = b"%b /any HTTP/1.%d\r\nhost: a\r\nconnection: keep-alive\r\ncontent-length: 0\r\n\r\n"
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n"


class Said(NamedTuple):
    """An engine's answer.  ends: the engine closes behind it."""

    raw: bytes
    ends: bool


@st.composite
def answers(draw: st.DrawFn) -> Said:
    """One legal answer."""
    status = draw(st.sampled_from([b"200 OK", b"200", b"201 \xe9", b"404 Not Found", b"500 Oh", b"204 No", b"304 Not"]))
    lines = b"".join(draw(st.lists(fields, max_size=3)))
    lines += draw(st.sampled_from([b"", b"content-type: text/event-stream\r\n", b"Content-Type: application/json\r\n"]))
    lines += draw(
        st.sampled_from([b"", b"", b"Server: e\r\nConnection: keep-alive\r\n", b"set-cookie: a\r\nset-cookie: b\r\n"])
    )
    head = draw(st.sampled_from([b"", b"", INTERIM])) + b"HTTP/1.1 %b\r\n%b" % (status, lines)
    if status[:3] in (b"204", b"304"):
        return Said(head + b"\r\n", False)
    body, way = draw(bodies), draw(st.integers(0, 3))
    if way < 2:
        return Said(head + b"transfer-encoding: chunked\r\n\r\n" + draw(chunked(body)), False)
    if way == 2:
        return Said(head + b"Content-Length: %d\r\n\r\n" % len(body) + body, False)
    return Said(head + b"\r\n" + body, True)


def read(raw: bytes, method: bytes, has_ended: bool) -> Answer | None:
    """Read an engine's bytes as h11 does; None where it refuses them."""
    try:
        reader = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 20)
        reader.send(h11.Request(method=method, target="/", headers=[("host", "a")]))
        reader.send(h11.EndOfMessage())
        reader.receive_data(raw)
        if has_ended:
            reader.receive_data(b"")
        response, body = None, b""
        while not isinstance(event := reader.next_event(), h11.EndOfMessage):
            if isinstance(event, h11.Response):
                response = event
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif not isinstance(event, h11.InformationalResponse):
                return None
        assert response is not None
        return Answer(response.status_code, dict(response.headers), body, True)
    except h11.RemoteProtocolError:
        return None


def run(it: World, asks: list[bytes], said: list[Said], random: Random) -> Transport:
    """Ask each when the last was answered, and have the engine say its answers in pieces."""
    client, left = it.client(), iter(said)

    def answer(engine: Transport, _: Asked) -> None:
        mine = next(left)
        for piece in cut(mine.raw, random):
            it.loop.call_soon(engine.peer_says, piece)
        if mine.ends:
            it.loop.call_soon(engine.peer_ends)

    it.answer = answer
    for ask in asks:
        client.peer_says(ask)
        it.loop.run()
    return client


@examples(120)
@given(
    st.lists(answers(), min_size=1, max_size=3),
    st.sampled_from([b"POST", b"GET", b"HEAD"]),
    st.sampled_from([1, 1, 0]),
    seeds,
)
def test_a_client_gets_what_h11_reads_of_legal_answers(said: list[Said], method: bytes, minor: int, seed: int) -> None:
    if method == b"HEAD":
        said = [
            Said(each.raw[: each.raw.index(b"\r\n\r\n", each.raw.startswith(INTERIM) and len(INTERIM)) + 4], False)
            for each in said
        ]
    with world() as it:
        client = run(it, [ASK % (method, minor)] * len(said), said, Random(seed))
        got = read_answers(client, [method] * len(said))
        for each, answer in zip(said, got, strict=False):
            expected = read(each.raw, method, each.ends)
            assert expected is not None
            assert (answer.status, answer.body, answer.is_whole) == (expected.status, expected.body, True)
            assert answer.headers.items() >= {item for item in expected.headers.items() if item[0].startswith(b"x-")}
        assert len(got) == len(said) or got[-1].headers[b"connection"] == b"close"
        assert [account.outcome.status for account in it.accounts] == [answer.status for answer in got]
        assert not any(account.outcome.is_cut for account in it.accounts)


@st.composite
def spoiled(draw: st.DrawFn) -> Said:
    """A legal answer in which a few bytes were lost or put in, or that ends early."""
    made = draw(answers()).raw
    for _ in range(draw(st.integers(1, 3))):
        places = [at for at in range(len(made)) if made[at : at + 1] in (b"\r", b"\n", b":", b" ")]
        at = max(0, draw(st.sampled_from(places)) + draw(st.integers(-1, 1)))
        made = made[:at] + draw(st.sampled_from((b"", *PARTS))) + made[at + draw(st.sampled_from([0, 0, 1, 2, 20])) :]
        if not made.strip():
            break
    if draw(st.booleans()):
        made = made[: draw(st.integers(0, len(made)))]
    return Said(made, True)


@examples(250)
@given(spoiled(), st.sampled_from([b"POST", b"GET"]), st.sampled_from([1, 1, 0]), seeds)
@example(Said(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\nnone\r\n\r\n", True), b"GET", 1, 0)
def test_what_h11_refuses_of_an_engine_is_no_whole_answer(said: Said, method: bytes, minor: int, seed: int) -> None:
    with world() as it:
        fine = Said(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nnext", False)
        client = run(it, [ASK % (method, minor)] * 2, [said] * 3 + [fine] * 3, Random(seed))
        got = read_answers(client, [method] * 2, may_break=True)
        assert got or client.is_lost, "a request whose engine has gone and that nobody answers"
        if got and got[0].is_whole and got[0].status not in (502, 503):
            expected = read(said.raw, method, True)
            assert expected is not None
            assert (got[0].status, got[0].body) == (expected.status, expected.body)
        if len(got) == 2 and got[1].is_whole and got[1].status == 200:
            assert got[1].body in (b"next", got[0].body)


@examples(100)
@given(st.binary(max_size=200), st.booleans(), seeds)
@example(b"\r\n\r\n", True, 0)
def test_garbage_of_an_engine_is_502_or_503(raw: bytes, ends: bool, seed: int) -> None:
    with world() as it:
        client = run(it, [ASK % (b"GET", 1)], [Said(raw, ends or not raw)] * 4, Random(seed))
        if not client.heard:
            assert not ends
            client.peer_resets()
            return
        (answer,) = read_answers(client, [b"GET"])
        assert answer.status in (502, 503)
        assert answer.is_whole
