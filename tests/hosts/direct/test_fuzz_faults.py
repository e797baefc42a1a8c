"""Peers that leave, break, stall and read slowly, in any order: everything ends, is accounted for, and is let go of."""

import json
from random import Random

from hypothesis import given

from tests.hosts.direct.fuzz_readers import Asked, read_answers
from tests.hosts.direct.fuzz_rig import Transport, World, cut, examples, world
from tests.hosts.direct.test_fuzz_requests import seeds

STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
SAID = 200_000


class Chance:
    """What happens in one example, all of it out of one seed."""

    def __init__(self, it: World, random: Random) -> None:
        self.it = it
        self.random = random
        self.names = 0
        # Clients that stopped within a request: what they sent next would be its rest.
        self.stuck: set[int] = set()
        it.answer = self.answer

    def answer(self, engine: Transport, asked: Asked) -> None:
        """Answer well, badly, late or not at all; what is said names the request."""
        random = self.random
        name = b"<%b>" % asked.body[10:18]
        body = name * random.choice([1, 3, SAID // len(name)])
        raw = random.choice(
            [
                b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body),
                STREAM + b"transfer-encoding: chunked\r\n\r\n" + b"%x\r\n%b\r\n" % (len(body), body) * 2 + b"0\r\n\r\n",
                STREAM + b"\r\n" + body,
                b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n",
                b"HTTP/1.1 200 OK\r\ncontent-length: 3, 3\r\n\r\n",
                b"",
            ]
        )
        has_end = b"length" in raw or b"chunked" in raw
        if random.random() < 0.3:
            raw, has_end = raw[: random.randrange(len(raw) + 1)], False
        pieces = cut(raw, random)
        if has_end and random.random() < 0.1:
            # What comes later, when the next request is already there, nobody could tell from its answer.
            pieces[-1] += b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n<smuggled>"
        for piece in pieces:
            self.it.loop.call_soon(engine.peer_says, piece)
        ending = random.choice([None, None, engine.peer_ends, engine.peer_resets])
        if ending is not None:
            self.it.loop.call_soon(ending)

    def request(self) -> bytes:
        """One request with a name of its own."""
        self.names += 1
        asked = {
            "user": f"{self.names:08}",
            "model": "m",
            "messages": [],
            "pad": "x" * self.random.choice([0, 100, 90_000]),
        }
        body = json.dumps(asked).encode()
        if self.random.random() < 0.5:
            return b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        return (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n"
            % (
                len(body),
                body,
            )
        )

    def act(self, clients: list[Transport], asked: dict[int, list[int]]) -> None:
        """Do one thing."""
        random, loop = self.random, self.it.loop
        number = random.randrange(len(clients))
        client = clients[number]
        way = random.random()
        if way < 0.4:
            if number in self.stuck:
                return
            raw = self.request()
            asked[number].append(self.names)
            if random.random() < 0.1:
                raw = raw[: random.randrange(len(raw))]
                self.stuck.add(number)
            for piece in cut(raw, random):
                client.peer_says(piece)
                if random.random() < 0.3:
                    loop.step()
        elif way < 0.5:
            client.peer_stops_reading()
        elif way < 0.6:
            client.peer_reads()
        elif way < 0.64:
            client.peer_resets()
        elif way < 0.68:
            client.peer_ends()
        elif way < 0.7:
            self.it.pass_time(random.choice([1.0, 40.0, 700.0, 8000.0]))
        elif way < 0.75 and self.it.engines:
            random.choice(self.it.engines).transport.peer_resets()
        elif way < 0.8:
            self.it.dials.append(False)
        else:
            for _ in range(random.randrange(30)):
                loop.step()


@examples(400)
@given(seeds)
def test_whoever_leaves_breaks_or_stalls_everything_ends_and_nobody_gets_what_was_for_another(seed: int) -> None:
    random = Random(seed)
    budget = random.choice([100_000, 1 << 30])
    with world(engines=2, max_buffered_bytes=budget, min_retries=random.choice([0, 1, 100])) as it:
        chance = Chance(it, random)
        clients = [it.client() for _ in range(random.randrange(1, 4))]
        asked: dict[int, list[int]] = {number: [] for number in range(len(clients))}
        for _ in range(random.randrange(2, 40)):
            chance.act(clients, asked)
            assert it.picker.buffered_bytes <= 4 * budget + 4_000_000
        for client in clients:
            client.peer_reads()
        it.loop.run()
        rounds = 200
        # What an engine has begun, and each further try on the next one, and each request behind it.
        while it.plane.active and rounds > 0:
            rounds -= 1
            for engine in list(it.engines):
                engine.transport.peer_ends()
            it.loop.run()
            for engine in list(it.engines):
                engine.transport.peer_resets()
            it.loop.run()
        assert it.plane.active == 0, "a request at an engine that has gone"
        for number, client in enumerate(clients):
            got = read_answers(client, [b"POST"] * (len(asked[number]) + 1), may_break=True)
            for place, answer in enumerate(got):
                if answer.status == 200 and answer.body:
                    # It may be cut, and then an event may tell so.
                    said = answer.body.partition(b"data: ")[0]
                    name = b"<%08d>" % asked[number][place]
                    assert (name * (len(said) // len(name) + 1)).startswith(said), (place, said[:40])
