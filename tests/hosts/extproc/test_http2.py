"""The HTTP/2 machine against the h2 library as its client, and against whatever bytes there are."""

import itertools
import struct
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.settings
import hpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.hosts.extproc import http2
from shoal.hosts.extproc.http2 import Connection, Http2Event, Opened, Received, Reset, frame
from shoal.hosts.extproc.lean import HEAD, TRAILERS

PATH = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
HEADERS = [
    (":method", "POST"),
    (":path", PATH),
    (":scheme", "http"),
    (":authority", "pickers"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
    ("x-envoy-internal", "true"),
]
SETTINGS = frame(http2.SETTINGS, 0, 0)
HELLO = http2.PREFACE + SETTINGS
BLOCK = hpack.Encoder().encode(HEADERS)


class Wire:
    """A client of the h2 library and our connection, with every byte carried between them."""

    def __init__(self, window: int | None = None) -> None:
        self.client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))
        self.client.initiate_connection()
        if window is not None:
            self.client.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window})
        self.server = Connection()
        self.events: list[Http2Event] = []
        self.answers: list[h2.events.Event] = []
        self.carry()

    def carry(self) -> None:
        """Let both say everything that they have to say."""
        while True:
            there = self.client.data_to_send()
            self.events += self.server.receive(there)
            back = self.server.take()
            if back:
                self.answers += self.client.receive_data(back)
            if not there and not back:
                return

    def open(self, is_end: bool = False) -> int:
        stream_id: int = self.client.get_next_available_stream_id()
        self.client.send_headers(stream_id, HEADERS, end_stream=is_end)
        self.carry()
        return stream_id

    def answered(self, kind: type) -> list[Any]:
        return [each for each in self.answers if isinstance(each, kind)]

    def data(self) -> bytes:
        return b"".join(each.data for each in self.answers if isinstance(each, h2.events.DataReceived))


def test_a_request_and_its_answer_pass_between_the_two() -> None:
    wire = Wire()
    stream_id = wire.open()
    wire.client.send_data(stream_id, b"question")
    wire.client.end_stream(stream_id)
    wire.carry()
    assert wire.events[0] == Opened(stream_id, PATH, False)
    assert b"".join(bytes(each.data) for each in wire.events if isinstance(each, Received)) == b"question"
    wire.server.send_headers(stream_id, HEAD)
    wire.server.send_data(stream_id, b"answer")
    wire.server.send_headers(stream_id, TRAILERS[0], is_end=True)
    wire.carry()
    (head,) = wire.answered(h2.events.ResponseReceived)
    (trailers,) = wire.answered(h2.events.TrailersReceived)
    assert head.headers == [(":status", "200"), ("content-type", "application/grpc")]
    assert trailers.headers == [("grpc-status", "0")]
    assert wire.data() == b"answer"
    assert wire.server.open_streams == 0


def test_the_client_keeps_no_header_table_and_repeated_heads_are_read_once() -> None:
    wire = Wire()
    for _ in range(5):
        wire.open()
    assert wire.client.encoder.header_table_size == 0
    assert [each.path for each in wire.events if isinstance(each, Opened)] == [PATH] * 5
    assert len(wire.server._paths._known) <= 2


def test_heads_that_use_the_table_before_the_client_knew_better_are_read_in_order() -> None:
    encoder = hpack.Encoder()
    blocks = [encoder.encode(HEADERS) for _ in range(3)]
    connection = Connection()
    events = connection.receive(HELLO)
    for number, block in enumerate(blocks):
        events += connection.receive(frame(http2.HEADERS, http2.END_HEADERS, 2 * number + 1, block))
    events += connection.receive(frame(http2.SETTINGS, http2.ACK, 0))
    encoder.header_table_size = 0
    for number in range(3, 6):
        block = encoder.encode(HEADERS)
        events += connection.receive(frame(http2.HEADERS, http2.END_HEADERS, 2 * number + 1, block))
    assert [each.path for each in events if isinstance(each, Opened)] == [PATH] * 6
    assert not connection.is_closed


def test_a_client_that_goes_on_using_the_table_is_sent_away() -> None:
    connection = Connection()
    connection.receive(HELLO + frame(http2.SETTINGS, http2.ACK, 0))
    connection.receive(frame(http2.HEADERS, http2.END_HEADERS, 1, BLOCK))
    assert connection.is_closed
    assert goodbye(connection) == http2.COMPRESSION_ERROR


@pytest.mark.parametrize("size", [70_000, 3_000_000])
def test_a_long_answer_waits_for_the_clients_windows(size: int) -> None:
    wire = Wire(window=20_000)
    stream_id = wire.open()
    answer = bytes(number % 251 for number in range(size))
    wire.server.send_headers(stream_id, HEAD)
    wire.server.send_data(stream_id, answer)
    wire.server.send_data(stream_id, b"more")
    wire.server.send_headers(stream_id, TRAILERS[0], is_end=True)
    wire.carry()
    assert len(wire.data()) == 20_000
    while not wire.answered(h2.events.TrailersReceived):
        wire.client.increment_flow_control_window(7_000)
        wire.client.increment_flow_control_window(7_000, stream_id)
        wire.carry()
    assert wire.data() == answer + b"more"
    assert wire.server.open_streams == 0


def test_a_changed_initial_window_lets_waiting_streams_go_on() -> None:
    wire = Wire(window=10)
    streams = [wire.open() for _ in range(3)]
    for stream_id in streams:
        wire.server.send_headers(stream_id, HEAD)
        wire.server.send_data(stream_id, b"x" * 25)
    wire.carry()
    assert len(wire.data()) == 30
    wire.client.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 5})
    wire.carry()
    wire.client.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 100})
    wire.carry()
    assert len(wire.data()) == 75


def test_streams_share_the_connections_window_in_turn() -> None:
    wire = Wire(window=1_000_000)
    streams = [wire.open() for _ in range(3)]
    for stream_id in streams:
        wire.server.send_headers(stream_id, HEAD)
        wire.server.send_data(stream_id, b"y" * 40_000)
    wire.carry()
    assert len(wire.data()) == 65_535
    wire.client.increment_flow_control_window(100_000)
    wire.carry()
    assert len(wire.data()) == 120_000


def test_the_receive_windows_are_given_back_in_big_steps() -> None:
    connection = Connection()
    connection.receive(HELLO + frame(http2.HEADERS, http2.END_HEADERS, 1, BLOCK))
    connection.take()
    piece = frame(http2.DATA, 0, 1, bytes(http2.MAX_FRAME_BYTES))
    given: dict[int, int] = {}
    received = 0
    while not given:
        received += sum(len(each.data) for each in connection.receive(piece * 64) if isinstance(each, Received))
        for kind, _, stream_id, payload in frames(connection.take()):
            assert kind == http2.WINDOW_UPDATE
            given[stream_id] = struct.unpack(">I", payload)[0]
    assert received > 1 << 30
    assert given.keys() == {0, 1}
    assert all(abs(more - received) <= 64 * http2.MAX_FRAME_BYTES for more in given.values())


def test_data_is_handed_on_as_it_comes_and_not_when_its_frame_is_whole() -> None:
    connection = Connection()
    connection.receive(HELLO + frame(http2.HEADERS, http2.END_HEADERS, 1, BLOCK))
    said = frame(http2.DATA, http2.END_STREAM, 1, b"abcdef") + frame(http2.PING, 0, 0, bytes(8))
    assert connection.receive(said[:9]) == []
    assert connection.receive(said[9:12]) == [Received(1, memoryview(b"abc"), False)]
    assert connection.receive(said[12:]) == [Received(1, memoryview(b"def"), True)]
    assert frames(connection.take())[-1] == (http2.PING, http2.ACK, 0, bytes(8))


def test_the_rest_of_a_frame_of_a_stream_that_was_ended_means_nothing() -> None:
    connection = Connection()
    connection.receive(HELLO + frame(http2.HEADERS, http2.END_HEADERS, 1, BLOCK))
    said = frame(http2.DATA, 0, 1, b"abcdef") + frame(http2.PING, 0, 0, bytes(8))
    connection.receive(said[:12])
    connection.send_headers(1, HEAD + TRAILERS[13], is_end=True)
    assert connection.receive(said[12:]) == []
    assert frames(connection.take())[-1] == (http2.PING, http2.ACK, 0, bytes(8))


def test_a_reset_and_late_frames_of_its_stream_are_taken_calmly() -> None:
    wire = Wire()
    stream_id = wire.open()
    wire.client.reset_stream(stream_id, 8)
    wire.carry()
    assert wire.events[-1] == Reset(stream_id, 8)
    wire.server.send_headers(stream_id, HEAD)
    wire.server.send_data(stream_id, b"late")
    wire.server.reset(stream_id, 0)
    assert wire.server.take() == b""
    late = frame(http2.DATA, 0, stream_id, b"late") + frame(http2.WINDOW_UPDATE, 0, stream_id, b"\0\0\0\1")
    assert wire.server.receive(late) == []
    assert not wire.server.is_closed


def test_an_answer_before_the_end_of_the_request_stops_the_rest_of_it() -> None:
    wire = Wire()
    stream_id = wire.open()
    wire.server.send_headers(stream_id, HEAD + TRAILERS[13], is_end=True)
    wire.carry()
    assert wire.answered(h2.events.StreamEnded)
    assert [each.error_code for each in wire.answered(h2.events.StreamReset)] == [http2.NO_ERROR]


def test_a_ping_is_answered_and_unknown_frames_and_priorities_mean_nothing() -> None:
    connection = Connection()
    connection.receive(HELLO)
    connection.take()
    said = frame(0xAA, 0xFF, 7, b"?") + frame(http2.PRIORITY, 0, 1, bytes(5)) + frame(http2.PING, 0, 0, b"12345678")
    assert connection.receive(said) == []
    assert frames(connection.take()) == [(http2.PING, http2.ACK, 0, b"12345678")]


def test_heads_come_padded_prioritised_and_in_parts() -> None:
    connection = Connection()
    padded = b"\3" + bytes(5) + BLOCK[:10] + bytes(3)
    flags = http2.PADDED | http2.HAS_PRIORITY | http2.END_STREAM
    events = connection.receive(
        HELLO
        + frame(http2.HEADERS, flags, 1, padded)
        + frame(http2.CONTINUATION, 0, 1, BLOCK[10:20])
        + frame(http2.CONTINUATION, http2.END_HEADERS, 1, BLOCK[20:])
    )
    assert events == [Opened(1, PATH, True)]


def test_leaving_refuses_only_what_came_after_the_client_knew() -> None:
    wire = Wire()
    first = wire.open()
    wire.server.leave()
    wire.server.leave()
    hello = wire.server.take()
    late = frame(http2.HEADERS, http2.END_HEADERS, 3, wire.client.encoder.encode(HEADERS))
    assert wire.server.receive(late) == [Opened(3, PATH, False)]
    pings = [payload for kind, _, _, payload in frames(hello) if kind == http2.PING]
    assert wire.server.receive(frame(http2.PING, http2.ACK, 0, pings[0])) == []
    assert not wire.server.has_left
    too_late = frame(http2.HEADERS, http2.END_HEADERS, 5, wire.client.encoder.encode(HEADERS))
    assert wire.server.receive(too_late) == []
    goaway, refusal = frames(wire.server.take())
    assert goaway[0] == http2.GOAWAY
    assert struct.unpack(">II", goaway[3]) == (3, http2.NO_ERROR)
    assert refusal == (http2.RST_STREAM, 0, 5, struct.pack(">I", http2.REFUSED_STREAM))
    for stream_id in (first, 3):
        wire.server.send_headers(stream_id, HEAD + TRAILERS[0], is_end=True)
    assert wire.server.has_left


def test_streams_past_the_limit_are_refused_unharmed() -> None:
    connection = Connection(max_streams=1)
    head = frame(http2.HEADERS, http2.END_HEADERS, 1, BLOCK)
    assert len(connection.receive(HELLO + head)) == 1
    connection.take()
    assert connection.receive(frame(http2.HEADERS, http2.END_HEADERS, 3, b"\x82\x84")) == []
    assert frames(connection.take()) == [(http2.RST_STREAM, 0, 3, struct.pack(">I", http2.REFUSED_STREAM))]


WRONG = {
    "another protocol": (b"GET / HTTP/1.1\r\n", http2.PROTOCOL_ERROR),
    "no settings first": (http2.PREFACE + frame(http2.PING, 0, 0, bytes(8)), http2.PROTOCOL_ERROR),
    "a long frame": (HELLO + struct.pack(">IBI", (1 << 20) << 8, 0, 1), http2.FRAME_SIZE_ERROR),
    "data on no stream": (HELLO + frame(http2.DATA, 0, 0, b"x"), http2.PROTOCOL_ERROR),
    "data on an idle stream": (HELLO + frame(http2.DATA, 0, 1, b"x"), http2.PROTOCOL_ERROR),
    "an even stream": (HELLO + frame(http2.HEADERS, http2.END_HEADERS, 2, BLOCK), http2.PROTOCOL_ERROR),
    "a block of garbage": (HELLO + frame(http2.HEADERS, http2.END_HEADERS, 1, b"\xff" * 30), http2.COMPRESSION_ERROR),
    "a block in a block": (HELLO + frame(http2.HEADERS, 0, 1, BLOCK) + SETTINGS, http2.PROTOCOL_ERROR),
    "a lone continuation": (HELLO + frame(http2.CONTINUATION, 4, 1, BLOCK), http2.PROTOCOL_ERROR),
    "a flood of continuations": (
        HELLO + frame(http2.HEADERS, 0, 1, b"") + frame(http2.CONTINUATION, 0, 1) * 65,
        http2.ENHANCE_YOUR_CALM,
    ),
    "a long block": (HELLO + frame(http2.HEADERS, 0, 1, bytes(65_537)), http2.ENHANCE_YOUR_CALM),
    "a push": (HELLO + frame(http2.PUSH_PROMISE, 4, 1, bytes(4)), http2.PROTOCOL_ERROR),
    "a short ping": (HELLO + frame(http2.PING, 0, 0, b"1"), http2.FRAME_SIZE_ERROR),
    "settings of a stream": (HELLO + frame(http2.SETTINGS, 0, 1), http2.PROTOCOL_ERROR),
    "cut settings": (HELLO + frame(http2.SETTINGS, 0, 0, b"12345"), http2.FRAME_SIZE_ERROR),
    "a huge window": (
        HELLO + frame(http2.SETTINGS, 0, 0, struct.pack(">HI", 4, 1 << 31)),
        http2.FLOW_CONTROL_ERROR,
    ),
    "a tiny frame size": (HELLO + frame(http2.SETTINGS, 0, 0, struct.pack(">HI", 5, 100)), http2.PROTOCOL_ERROR),
    "no more window": (HELLO + frame(http2.WINDOW_UPDATE, 0, 0, bytes(4)), http2.PROTOCOL_ERROR),
    "too much window": (HELLO + frame(http2.WINDOW_UPDATE, 0, 0, b"\x7f\xff\xff\xff"), http2.FLOW_CONTROL_ERROR),
    "a reset of an idle stream": (HELLO + frame(http2.RST_STREAM, 0, 1, bytes(4)), http2.PROTOCOL_ERROR),
    "data after the end": (
        HELLO + frame(http2.HEADERS, 5, 1, BLOCK) + frame(http2.DATA, 0, 1, b"x"),
        http2.STREAM_CLOSED,
    ),
    "more padding than data": (
        HELLO + frame(http2.HEADERS, 4, 1, BLOCK) + frame(http2.DATA, http2.PADDED, 1, b"\5abc"),
        http2.PROTOCOL_ERROR,
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_breaks_the_protocol_ends_the_connection_with_its_code(name: str) -> None:
    said, code = WRONG[name]
    connection = Connection()
    connection.receive(said)
    assert connection.is_closed
    assert connection.why_closed
    assert goodbye(connection) == code
    assert connection.receive(b"more") == []
    assert connection.take() == b""


def test_too_much_window_for_a_stream_costs_that_stream_only() -> None:
    connection = Connection()
    connection.receive(HELLO + frame(http2.HEADERS, http2.END_HEADERS, 1, BLOCK))
    connection.take()
    assert connection.receive(frame(http2.WINDOW_UPDATE, 0, 1, b"\x7f\xff\xff\xff")) == [
        Reset(1, http2.FLOW_CONTROL_ERROR)
    ]
    assert not connection.is_closed


# ---------------------------------------------------------------------- laws


def conversation(streams: int, sizes: list[int]) -> bytes:
    """Everything a client says: heads in parts, padded data, pings, resets, ends."""
    said = [HELLO]
    encoder = hpack.Encoder()
    for number in range(streams):
        stream_id = 2 * number + 1
        block = encoder.encode(HEADERS)
        said.append(frame(http2.HEADERS, 0, stream_id, block[:7]))
        said.append(frame(http2.CONTINUATION, http2.END_HEADERS, stream_id, block[7:]))
        padded = [b"\2" + bytes(size) + b"\0\0" for size in sizes]
        said += [frame(http2.DATA, http2.PADDED, stream_id, each) for each in padded]
        said += [frame(http2.DATA, 0, stream_id, bytes(size)) for size in sizes]
        said.append(frame(http2.PING, 0, 0, bytes(8)))
        if number % 2:
            said.append(frame(http2.RST_STREAM, 0, stream_id, bytes(4)))
        else:
            said.append(frame(http2.DATA, http2.END_STREAM, stream_id, bytes(sizes[0] if sizes else 0)))
    return b"".join(said)


def heard(pieces: list[bytes]) -> tuple[list[tuple[object, ...]], bytes, bool]:
    """Everything that a connection makes of these; data is put together again that came in parts."""
    connection = Connection()
    events: list[tuple[object, ...]] = []
    for piece in pieces:
        for each in connection.receive(piece):
            rest: tuple[object, ...] = (repr(each),)
            if isinstance(each, Received):
                data, before = bytes(each.data), events[-1] if events else ()
                if before[:2] == ("Received", each.stream_id) and not before[3]:
                    data = events.pop()[2] + data  # type: ignore[operator]
                rest = (data, each.is_end)
            events.append((type(each).__name__, each.stream_id, *rest))
    return events, connection.take(), connection.is_closed


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[start:end] for start, end in itertools.pairwise(places)]


@settings(deadline=None)
@given(st.integers(1, 4), st.lists(st.integers(0, 400), max_size=4), st.lists(st.integers(0, 1 << 16), max_size=30))
def test_any_split_of_the_bytes_gives_the_same_events(streams: int, sizes: list[int], cuts: list[int]) -> None:
    said = conversation(streams, sizes)
    assert heard(split(said, cuts)) == heard([said])


def test_bytes_one_by_one_give_the_same_events() -> None:
    said = conversation(3, [0, 300])
    assert heard([said[place : place + 1] for place in range(len(said))]) == heard([said])


FRAMES = st.builds(
    frame,
    st.integers(0, 11),
    st.sampled_from([0, 1, 4, 5, 8, 9, 12, 13, 32, 36, 44, 255]),
    st.integers(0, 9),
    st.one_of(st.binary(max_size=40), st.just(BLOCK), st.just(bytes(4)), st.just(bytes(5)), st.just(bytes(8))),
)


@settings(deadline=None, max_examples=400)
@given(st.lists(FRAMES, max_size=12), st.binary(max_size=60), st.lists(st.integers(0, 1 << 12), max_size=10))
def test_garbage_never_raises_and_means_the_same_however_it_is_cut(
    said: list[bytes], tail: bytes, cuts: list[int]
) -> None:
    data = HELLO + b"".join(said) + tail
    whole, cut = heard([data]), heard(split(data, cuts))
    assert whole == cut


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=200), st.integers(0, 200))
def test_a_spoilt_conversation_never_raises_and_answers_stay_in_the_protocol(noise: bytes, place: int) -> None:
    said = bytearray(conversation(3, [20]))
    start = place % len(said)
    said[start : start + len(noise)] = noise
    connection = Connection()
    for event in connection.receive(bytes(said)):
        connection.send_headers(event.stream_id, HEAD)
        connection.send_data(event.stream_id, b"reply")
        connection.send_headers(event.stream_id, TRAILERS[0], is_end=True)
    assert frames(connection.take())


def frames(data: bytes) -> list[tuple[int, int, int, bytes]]:
    """Cut our own output into (kind, flags, stream, payload)."""
    found = []
    while data:
        word, flags, stream_id = struct.unpack_from(">IBI", data)
        end = 9 + (word >> 8)
        assert end <= len(data)
        found.append((word & 0xFF, flags, stream_id, data[9:end]))
        data = data[end:]
    return found


def goodbye(connection: Connection) -> int:
    """The code of the GOAWAY that is the last thing said."""
    kind, _, _, payload = frames(connection.take())[-1]
    assert kind == http2.GOAWAY
    code: int = struct.unpack_from(">I", payload, 4)[0]
    return code
