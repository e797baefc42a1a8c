"""What this picker says: its news in batches, a sign of life, and answers to those that begin.

Owns the sequence numbers and the pace.  What is news is gathered by the router's outbox.
"""

import asyncio
import contextlib
from time import monotonic

import zmq

from shoal.hosts.driver import Driver
from shoal.hosts.sharing.messages import VERSION, Answer, Ask, Garbage, OtherVersion, Told, ask_of, cut, encode
from shoal.hosts.sharing.wires import Frames, Inbox, Wires
from shoal.routing.events import PeerSynced

FLUSH_S = 0.005
"""How long news wait for others: what is told later is decided worse, what is sent singly costs more."""

AT_ONCE = 256
"""Messages that need not wait for more news: what peers do not hear of a burst they place a second time, or elsewhere.
One more for each `FLUSH_S`."""

FLUSH_COUNT = 256
ALIVE_S = 0.25
GOODBYE_MS = 200
"""How long a last word may take to leave."""


class Voice:
    """Publishes at `said` addresses and answers at `asked` ones, which come in pairs.

    run: the name of this process in peers' events.  name: for people.  messages: sent so far, with news.
    """

    def __init__(self, wires: Wires, driver: Driver, run: str, name: str) -> None:
        self._driver = driver
        self._outbox = driver.router.outbox
        self._wires = wires
        self._run = run
        self._name = name
        # One pair of sockets for each pair of addresses: keys are for networks alone.
        self._publishers: list[Inbox] = []
        self._answers: list[Inbox] = []
        self._timer: asyncio.TimerHandle | None = None
        self._said_at = 0.0
        self._credit = float(AT_ONCE)
        self._credit_at = monotonic()
        self.messages = 0
        self._outbox.open()
        driver.after = self.stir

    def listen(self, said: str, asked: str) -> None:
        """Be heard at a pair of addresses.  Raises OSError."""
        # As PUB, and it tells when somebody begins to listen, who then need not wait for the next sign of life.
        publisher, answerer = self._wires.open(zmq.XPUB), self._wires.open(zmq.ROUTER)
        publisher.setsockopt(zmq.XPUB_VERBOSE, 1)
        try:
            self._wires.bind(publisher, said)
            self._wires.bind(answerer, asked)
        except OSError:
            publisher.close(0)
            answerer.close(0)
            raise
        self._publishers.append(Inbox(publisher, self._met))
        inbox = Inbox(answerer, lambda frames: self._answer(inbox, frames))
        self._answers.append(inbox)

    def stir(self) -> None:
        """Say what there is to say: now while that may be, else soon."""
        count = len(self._outbox)
        if count >= FLUSH_COUNT or (count and self._may_hurry()):
            self.flush()
        elif count and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_S, self.flush)

    def flush(self) -> None:
        """Say it now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for news in cut(self._outbox.take()):
            self.messages += 1
            self._say(Told(VERSION, self._run, self._name, self.messages, news))

    def _may_hurry(self) -> bool:
        """Take one of the messages that need not wait."""
        now = monotonic()
        self._credit = min(self._credit + (now - self._credit_at) / FLUSH_S, AT_ONCE)
        self._credit_at = now
        if self._credit < 1.0:
            return False
        self._credit -= 1.0
        return True

    def _met(self, frames: Frames) -> None:
        if frames[0][:1] == b"\x01":
            self._say(Told(VERSION, self._run, self._name, self.messages))

    def tick(self) -> None:
        """Give a sign of life when nothing was said for a while."""
        if monotonic() - self._said_at >= ALIVE_S:
            self._say(Told(VERSION, self._run, self._name, self.messages))

    def close(self, *, is_leaving: bool) -> None:
        """Fall silent.  is_leaving: say good-bye, for the process ends."""
        self.flush()
        if is_leaving:
            self._say(Told(VERSION, self._run, self._name, self.messages, (), True))
        self._driver.after = None
        self._outbox.close()
        for answers in self._answers:
            answers.close()
        for publisher in self._publishers:
            publisher.close(GOODBYE_MS if is_leaving else 0)

    def _say(self, told: Told) -> None:
        self._said_at = monotonic()
        message = encode(told)
        for publisher in self._publishers:
            with contextlib.suppress(zmq.ZMQError):  # who listens notices the gap
                publisher.socket.send(message, zmq.NOBLOCK)

    # ------------------------------------------------------------------ answers

    def _answer(self, inbox: Inbox, frames: Frames) -> None:
        if len(frames) != 2:
            return
        try:
            ask = ask_of(frames[1])
        except (OtherVersion, Garbage):
            return
        self.flush()
        inbox.send([frames[0], encode(self._answer_to(ask))])

    def _answer_to(self, ask: Ask) -> Answer:
        router = self._driver.router
        match ask.what:
            case "bookings":
                bookings, until = self._outbox.bookings(ask.at, self._driver.now())
                synced = PeerSynced(self._run, tuple(bookings), ask.at, until)
                return Answer(VERSION, ask.number, synced=synced, more=until)
            case "endpoints":
                taught, more = router.teach(self._run, ask.at, ask.clock)
                return Answer(VERSION, ask.number, taught=taught, more=more)
            case "rows":
                taught, more = router.teach_rows(self._run, ask.at, max(1, ask.clock))
                return Answer(VERSION, ask.number, taught=taught, more=more)
        return Answer(VERSION, ask.number)
