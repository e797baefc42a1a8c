"""One address at which a peer may be heard: order, gaps, silence, and catching up.

Owns whether this peer's bookings are known for certain.  A gap, a first word or a return is followed by asking for all
that the peer has in flight; what is said meanwhile is kept and applied after, which does no harm twice.
"""

from collections.abc import Callable
from time import monotonic

import msgspec
import zmq

from shoal.hosts import logs
from shoal.hosts.sharing.messages import VERSION, Answer, Ask, Garbage, OtherVersion, Told, answer_of, encode, told_of
from shoal.hosts.sharing.picture import PeerPicture
from shoal.hosts.sharing.wires import Frames, Inbox, Wires
from shoal.routing.events import PeerEvent, PeerJoined, PeerLeft, PeerSynced, PeerTaught, PeerTold

LOST_S = 1.5
"""Silence after which a peer counts as lost: six signs of life."""

ANSWER_S = 1.0
_ASK_AGAIN_S = 5.0
_TRIES = 3
MAX_KEPT = 4_000
"""Messages kept while a peer is asked; past this it is asked anew."""

_log = logs.get("sharing")


class Ear:
    """Listens at one pair of addresses.  feed: gives the router an event.

    is_taken: whether a run is this process, or is heard at another address already.
    """

    def __init__(
        self,
        wires: Wires,
        said: str,
        asked: str,
        feed: Callable[[PeerEvent], object],
        is_taken: Callable[[str, "Ear"], bool],
    ) -> None:
        self.address = said
        self._asked = asked
        self._wires = wires
        self._feed = feed
        self._is_taken = is_taken
        self._inbox = Inbox(self._subscribe(), self._hear)
        self._asking: Inbox | None = None
        self.run = self.name = ""
        self.state = "silent"
        self._heard_at: float | None = None
        self._sequence = 0
        self._kept: list[Told] = []
        self._number = 0
        self._number_of_bookings = -1
        self._asked_at = 0.0
        self._tries = 0
        self._ask_again_at = float("inf")
        self._taught: Callable[[Answer | None], None] | None = None
        self._teach_number = -1
        self.messages = self.gaps = self.skipped = self.syncs = 0
        self._told_of: set[str] = set()

    @property
    def is_heard(self) -> bool:
        """Whether a peer speaks here, and all that it has in flight is known."""
        return self.state == "heard"

    def picture(self) -> PeerPicture:
        """What is known of this address now."""
        return PeerPicture(
            address=self.address,
            name=self.name,
            run=self.run,
            state=self.state,
            age_s=None if self._heard_at is None else monotonic() - self._heard_at,
            messages=self.messages,
            gaps=self.gaps,
            skipped=self.skipped,
            syncs=self.syncs,
        )

    def hear(self) -> None:
        """Take in what the peer has said already, without waiting for the loop's next turn."""
        self._inbox.look()

    def tick(self) -> None:
        """Look whether the peer fell silent or owes an answer; call it several times a second."""
        self._inbox.look()
        if self._asking is not None:
            self._asking.look()
        now = monotonic()
        if self.state in ("catching-up", "heard") and self._heard_at is not None and now - self._heard_at > LOST_S:
            self._lose("silent for too long")
        elif self.state == "catching-up" and now - self._asked_at > ANSWER_S:
            if self._tries < _TRIES:
                self._ask_bookings(0)
            else:
                self._go_on()
                self._ask_again_at = now + _ASK_AGAIN_S
        elif self.state == "heard" and now > self._ask_again_at:
            self._catch_up()
        if self._taught is not None and now - self._asked_at > ANSWER_S:
            self._end_lesson(None)

    def ask(self, what: str, at: int, clock: int, take: Callable[[Answer | None], None]) -> None:
        """Ask for a part of what the peer knows; `take` gets the answer, or None when none comes."""
        self._taught = take
        self._teach_number = self._send(what, at, clock)

    def close(self) -> None:
        """Listen no more; a peer that was heard here counts as lost."""
        if self.state in ("catching-up", "heard"):
            self._lose("not a peer any more")
        self._end_lesson(None)
        self._inbox.close()
        if self._asking is not None:
            self._asking.close()

    # ------------------------------------------------------------------ what the peer says

    def _subscribe(self) -> "zmq.Socket[bytes]":
        socket = self._wires.open(zmq.SUB)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._wires.connect(socket, self.address)
        return socket

    def _hear(self, frames: Frames) -> None:
        try:
            told = told_of(frames[0] if len(frames) == 1 else b"")
        except (OtherVersion, Garbage) as error:
            self._skip(error)
            return
        if told.run != self.run:
            self._meet(told)
        if self.state == "itself":
            if self._is_taken(self.run, self):
                return
            self.state = "lost"
        self._heard_at = monotonic()
        if told.is_leaving:
            self._lose("left")
            return
        if self.state == "lost":
            self._return(told)
        expected = self._sequence + (1 if told.news else 0)
        self._sequence = told.sequence
        if told.sequence != expected:
            self.gaps += max(1, told.sequence - expected)
            self._catch_up()
        if told.news:
            self._take(told)

    def _take(self, told: Told) -> None:
        self.messages += 1
        if self.state == "heard":
            self._feed(PeerTold(told.run, told.news))
            return
        self._kept.append(told)
        if len(self._kept) > MAX_KEPT:
            self._catch_up()

    def _meet(self, told: Told) -> None:
        """Another process speaks here than before, or the first one."""
        if self.state in ("catching-up", "heard"):
            self._lose("another process took its place")
        self.run, self.name = told.run, told.name
        if self._is_taken(told.run, self):
            self.state = "itself"
            return
        self.state = "lost"

    def _return(self, told: Told) -> None:
        """Begin to follow a peer, for the first time or again."""
        if self._is_taken(self.run, self):
            self.state = "itself"
            return
        _log.info("peer heard", peer=self.name, run=self.run, at=self.address)
        self._sequence = told.sequence - (1 if told.news else 0)
        self._feed(PeerJoined(self.run))
        self._catch_up()

    def _lose(self, why: str) -> None:
        _log.info("peer lost", peer=self.name, run=self.run, why=why)
        self.state = "lost"
        self._kept.clear()
        self._end_lesson(None)
        self._feed(PeerLeft(self.run))

    def _skip(self, error: ValueError) -> None:
        self.skipped += 1
        why = f"version {error}" if isinstance(error, OtherVersion) else "not readable"
        if why not in self._told_of and len(self._told_of) < 8:
            self._told_of.add(why)
            _log.warning("messages of a peer are skipped", at=self.address, why=why, own_version=VERSION)

    # ------------------------------------------------------------------ catching up

    def _catch_up(self) -> None:
        """Ask for all that the peer has in flight; what it says meanwhile is kept."""
        self.state = "catching-up"
        self._kept.clear()
        self._tries = 0
        self.syncs += 1
        self._ask_again_at = float("inf")
        self._ask_bookings(0)

    def _ask_bookings(self, after: int) -> None:
        if after == 0:
            self._tries += 1
        self._number_of_bookings = self._send("bookings", after, 0)

    def _go_on(self) -> None:
        """Follow what the peer says, beginning with what was kept."""
        self.state = "heard"
        kept, self._kept = self._kept, []
        for told in kept:
            self._feed(PeerTold(told.run, told.news))

    def _send(self, what: str, at: int, clock: int) -> int:
        if self._asking is None:
            socket = self._wires.open(zmq.DEALER)
            self._wires.connect(socket, self._asked)
            self._asking = Inbox(socket, self._answered)
        self._number += 1
        self._asked_at = monotonic()
        self._asking.send([encode(Ask(VERSION, self._number, what, at, clock))])
        return self._number

    def _answered(self, frames: Frames) -> None:
        try:
            answer = answer_of(frames[-1])
        except (OtherVersion, Garbage) as error:
            self._skip(error)
            return
        if answer.number == self._teach_number and self._taught is not None:
            self._end_lesson(answer)
        elif answer.number == self._number_of_bookings and self.state == "catching-up" and answer.synced is not None:
            self._synced(answer.synced, answer.more)

    def _synced(self, synced: PeerSynced, more: int | None) -> None:
        self._feed(msgspec.structs.replace(synced, peer=self.run))
        if more is not None and more > synced.after:
            self._ask_bookings(more)
        else:
            self._go_on()

    def _end_lesson(self, answer: Answer | None) -> None:
        take, self._taught = self._taught, None
        if take is not None:
            take(answer)

    def teach(self, taught: PeerTaught) -> None:
        """Give the router a part of what this peer knows."""
        self._feed(msgspec.structs.replace(taught, peer=self.run))
