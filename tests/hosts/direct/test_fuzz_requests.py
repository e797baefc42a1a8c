"""What clients send, however it is cut: an engine gets what h11 reads of it, and what h11 refuses goes no further."""

import re
from random import Random

from hypothesis import example, given
from hypothesis import strategies as st

from tests.hosts.direct.fuzz_readers import Asked, read_answers, read_requests
from tests.hosts.direct.fuzz_rig import Transport, World, cut, examples, world

seeds = st.integers(0, 1 << 32)
tokens = st.text("abcXYZ019-_.!#$%&'*+^`|~", min_size=1, max_size=12).map(str.encode)
values = st.binary(max_size=30).map(lambda raw: bytes(byte for byte in raw if byte >= 0x20 and byte != 0x7F))
bodies = st.one_of(
    st.just(b""), st.binary(max_size=60), st.integers(0, 8_000).map(lambda size: b"0\r\n\r\n" * (size // 5))
)
extensions = st.sampled_from([b"", b"", b"", b";a", b";a=b", b'; a="b c"', b";\xe9=\xff"])
fields = st.tuples(tokens.map(lambda name: b"x-" + name), values).map(lambda pair: b"%b: %b\r\n" % pair)


@st.composite
def chunked(draw: st.DrawFn, body: bytes) -> bytes:
    """A body in chunks of any size, with extensions and trailers."""
    at, made = 0, b""
    while at < len(body):
        size = draw(st.integers(1, len(body) - at))
        form = draw(st.sampled_from([b"%x", b"%X", b"00%x"]))
        made += form % size + draw(extensions) + b"\r\n" + body[at : at + size] + b"\r\n"
        at += size
        if at < len(body) and made.count(b"\n") > 400:
            made += b"%x\r\n%b\r\n" % (len(body) - at, body[at:])
            break
    return made + b"0" + draw(extensions) + b"\r\n" + b"".join(draw(st.lists(fields, max_size=2))) + b"\r\n"


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """One legal request for a path without an API."""
    method = draw(st.sampled_from([b"POST", b"POST", b"GET", b"PUT", b"DELETE", b"OPTIONS", b"HEAD", b"PATCH", b"ODD"]))
    target = draw(st.sampled_from([b"/any", b"/any?q=%20&r", b"/a//b/../c", b"http://b:81/any?x", b"/" + b"y" * 3000]))
    lines = b"".join(draw(st.lists(fields, max_size=4)))
    if draw(st.integers(0, 9)) == 0:
        lines += b"Expect: 100-continue\r\n"
    lines += draw(st.sampled_from([b"", b"", b"Connection: keep-alive\r\n", b"connection: x-abc, Keep-Alive\r\n"]))
    body, head = draw(bodies), b"%b %b HTTP/1.1\r\nHost: a\r\n%b" % (method, target, lines)
    if draw(st.booleans()):
        return head + b"Transfer-Encoding: chunked\r\n\r\n" + draw(chunked(body))
    if body or draw(st.booleans()):
        return head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    return head + b"\r\n"


def run(it: World, sent: bytes, random: Random) -> Transport:
    """Send in pieces, letting the plane come to rest or not between them; returns the client."""
    client = it.client()
    for piece in cut(sent, random):
        client.peer_says(piece)
        while random.random() < 0.7 and it.loop.step():
            pass
    it.loop.run()
    return client


def seen(asked: Asked) -> tuple[bytes, bytes, bytes]:
    """What must be the same on both sides; an absolute target goes on as its path."""
    target = asked.target
    if target.startswith(b"http://"):
        target = b"/" + target[7:].partition(b"/")[2]
    return asked.method, target, asked.body


@examples(150)
@given(st.lists(requests(), min_size=1, max_size=4), st.sampled_from([b"", b"\r\n"]), seeds)
def test_an_engine_gets_what_h11_reads_of_legal_requests(sent: list[bytes], gap: bytes, seed: int) -> None:
    with world() as it:
        whole = gap.join(sent)
        client = run(it, whole, Random(seed))
        expected, is_refused = read_requests(whole)
        assert not is_refused
        assert len(expected) == len(sent)
        assert [seen(asked) for asked in it.asked] == [seen(asked) for asked in expected]
        answers = read_answers(client, [asked.method for asked in expected])
        assert [(answer.status, answer.is_whole) for answer in answers] == [(200, True)] * len(sent)
        for asked, answer in zip(expected, answers, strict=True):
            assert answer.body == (b"" if asked.method == b"HEAD" else b'{"bytes": %d}' % len(asked.body))
        assert len(it.accounts) == len(sent)
        assert not client.is_lost


BLANK_EXTENSION = re.compile(rb"[0-9a-fA-F][ \t]+;")
PARTS = (
    b"\r\n",
    b"\n",
    b"\r",
    b"\x00",
    b" ",
    b"\t",
    b":",
    b"0\r\n\r\n",
    b"Content-Length: 3\r\n",
    b"content-length: 3, 3\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"transfer-encoding: gzip\r\n",
    b"Host: b\r\n",
    b" folded\r\n",
    b"Connection: close\r\n",
    b"POST /in HTTP/1.1\r\nhost: a\r\n\r\n",
    b"HTTP/1.0",
    b"HTTP/1.1",
    b"HTTP/2.0",
    b"ffffffffffffffff",
    b"-1",
    b"\xff",
    b"Expect: x\r\n",
    b"Upgrade: websocket\r\nConnection: upgrade\r\n",
    b";",
    b"0",
    b"5",
    b"\r\n\r\n",
    b"Connection: content-length\r\n",
)


@st.composite
def spoiled(draw: st.DrawFn) -> bytes:
    """Legal requests in which a few bytes were lost, doubled, or put in."""
    made = b"".join(draw(st.lists(requests(), min_size=1, max_size=2)))
    for _ in range(draw(st.integers(1, 3))):
        # Mostly about the ends of lines, where messages are told apart.
        ends = [at for at in range(len(made)) if made[at : at + 1] in (b"\r", b"\n", b":", b" ")]
        at = draw(st.sampled_from(ends)) + draw(st.integers(-1, 1)) if ends else 0
        at = max(0, at)
        lost = draw(st.sampled_from([0, 0, 0, 1, 1, 2, 20]))
        made = made[:at] + draw(st.sampled_from((b"", *PARTS))) + made[at + lost :]
    return made.replace(b"HEAD", b"READ")


@examples(300)
@given(spoiled(), seeds)
@example(b"POST /x HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n0\r\nno colon\r\n\r\n", 0)
@example(b"POST /x HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n0\r\na: b\n\nGET /in HTTP/1.1\r\n\r\n", 0)
def test_what_h11_refuses_goes_no_further(sent: bytes, seed: int) -> None:
    with world() as it:
        client = run(it, sent, Random(seed))
        expected, is_refused = read_requests(sent)
        answers = read_answers(client, [b"GET"] * (len(expected) + 1))
        # What an engine gets was read by h11 too, in this order and with these bodies; we may stop earlier.
        readable = iter([seen(asked) for asked in expected])
        for asked in it.asked:
            assert seen(asked) in readable, asked
        assert all(answer.is_whole for answer in answers)
        statuses = [answer.status for answer in answers]
        assert 500 not in statuses
        is_over = answers != [] and answers[-1].headers.get(b"connection") == b"close"
        # White space before an extension is legal (RFC 9112, section 7.1.1); h11 refuses it.
        if is_refused and not BLANK_EXTENSION.search(sent):
            assert is_over
            assert statuses[-1] in (200, 400, 404, 413, 417, 431, 505)
        if not is_over and len(answers) < len(expected):
            raise AssertionError("a request without an answer on a connection that goes on")
        it.pass_time(1000.0)
        it.pass_time(1000.0)
        it.pass_time(4000.0)
        assert client.is_lost


@examples(150)
@given(st.binary(max_size=300), seeds)
@example(b"\r\n" * 3000, 0)
@example(b"\r", 0)
@example(b"! ! HTTP/0.0\r\n\r\n", 0)
def test_whatever_a_client_sends_is_answered_with_http_or_waited_for(sent: bytes, seed: int) -> None:
    with world() as it:
        client = run(it, sent, Random(seed))
        answers = read_answers(client, [b"GET"] * 10) if client.heard else []
        # 505 is a version of HTTP that is none, or none of ours.
        assert all(answer.is_whole and (400 <= answer.status < 500 or answer.status == 505) for answer in answers)
        assert it.asked == []
