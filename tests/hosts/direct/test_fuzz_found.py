"""What the fuzzing found, each in the smallest form that shows it."""

from tests.hosts.direct.fuzz_readers import Asked, read_answers
from tests.hosts.direct.fuzz_rig import Transport, world

CHUNKED = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
MODELS = b"GET /v1/models HTTP/1.1\r\nhost: a\r\n\r\n"


def test_thousands_of_refused_chunked_requests_in_one_read_are_all_answered() -> None:
    with world() as it:
        client = it.client()
        client.peer_says((CHUNKED + b"1\r\nx\r\n0\r\n\r\n") * 2500)
        it.loop.run()
        answers = read_answers(client, [b"POST"] * 2500)
        assert [answer.status for answer in answers] == [400] * 2500


def test_a_head_in_two_reads_that_is_answered_at_the_door_leaves_no_clock_behind() -> None:
    with world() as it:
        client = it.client()
        client.peer_says(MODELS[:10])
        client.peer_says(MODELS[10:])
        (answer,) = read_answers(client, [b"GET"])
        assert answer.status == 200
        # The next head has its own time, and an unused connection ends without a word.
        client.peer_says(MODELS[:10])
        it.pass_time(40.0)
        assert b" 408 " in bytes(client.heard)
        other = it.client()
        other.peer_says(MODELS[:10])
        other.peer_says(MODELS[10:])
        it.pass_time(4000.0)
        assert len(read_answers(other, [b"GET"])) == 1
        assert other.is_lost


def test_a_body_in_tiny_chunks_arrives_whole() -> None:
    with world() as it:
        client = it.client()
        client.peer_says(CHUNKED.replace(b"/v1/chat/completions", b"/any"))
        client.peer_says(b"2\r\nab\r\n" * 100_000)
        client.peer_says(b"0\r\n\r\n")
        it.loop.run()
        assert it.asked[0].body == b"ab" * 100_000


def test_no_event_is_put_in_the_middle_of_a_chunk_when_the_next_one_is_none() -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    for first, second in ((b"5\r\nda", b"ta:\r\nzz\r\n"), (b"5\r\ndata:\r\nz", b"z\r\n")):
        with world() as it:

            def answer(engine: Transport, _: Asked, first: bytes = first, second: bytes = second) -> None:
                engine.peer_says(head + first)
                engine.peer_says(second)

            it.answer = answer
            client = it.client()
            client.peer_says(b"POST /any HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n")
            it.loop.run()
            assert bytes(client.heard).endswith(first)
            assert client.is_lost


def test_more_than_may_be_sent_ahead_of_unread_answers_ends_the_connection() -> None:
    with world() as it:
        client = it.client()
        client.peer_stops_reading()
        client.peer_says(MODELS * 1000)
        client.peer_says(b"POST /any HTTP/1.1\r\nhost: a\r\ncontent-length: 400000\r\n\r\n")
        client.peer_says(b"x" * 300_000)
        client.peer_reads()
        it.loop.run()
        client.peer_says(b"GET /hidden HTTP/1.1\r\nhost: a\r\n\r\n")
        it.loop.run()
        assert it.asked == []
        assert client.is_lost
