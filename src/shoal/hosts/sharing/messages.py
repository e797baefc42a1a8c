"""The bytes between pickers: msgpack arrays that begin with the version, bounded in size.

Owns encoding, decoding and how news are cut into messages.  A message of another version is told apart from garbage.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec

from shoal.kernel import UNREADABLE
from shoal.routing.events import PeerSynced, PeerTaught
from shoal.routing.news import MAX_NEWS, Name, News, Number, PeerBooked, PeerForgot, PeerLearnt

VERSION = 3
"""Raised when an older picker could misread a message; new fields at the end do not need it."""

MAX_MESSAGE_BYTES = 1 << 20
CUT_BYTES = 128 << 10
"""News are cut into messages of about this size."""

_ENTRY_BYTES = 48

Version = Annotated[int, msgspec.Meta(ge=0, le=1 << 16)]


class Told(msgspec.Struct, frozen=True, array_like=True):
    """What is published.

    run: of the sender, its name in events.  name: for people.  sequence: how many messages with news were sent, this
    one included; one without news only says that the sender is alive.  is_leaving: the last word.
    """

    version: Version
    run: Annotated[Name, msgspec.Meta(min_length=1)]
    name: Name
    sequence: Number
    news: Annotated[tuple[News, ...], msgspec.Meta(max_length=MAX_NEWS)] = ()
    is_leaving: bool = False


class Ask(msgspec.Struct, frozen=True, array_like=True):
    """A question.  what: `bookings`, `endpoints` or `rows`.  number: comes back with the answer.  at, clock: where to
    go on, 0 at first."""

    version: Version
    number: Number
    what: Name
    at: Number = 0
    clock: Number = 0


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """The answer to `Ask` of that number, under the giver's own name.  more: where to go on, None at the end."""

    version: Version
    number: Number
    synced: PeerSynced | None = None
    taught: PeerTaught | None = None
    more: Number | None = None


class OtherVersion(ValueError):
    """The message is of a version that this program does not speak."""


class Garbage(ValueError):
    """The bytes are no message."""


class _Head(msgspec.Struct, array_like=True):
    version: Version


_encoder = msgspec.msgpack.Encoder()
_told = msgspec.msgpack.Decoder(Told)
_ask = msgspec.msgpack.Decoder(Ask)
_answer = msgspec.msgpack.Decoder(Answer)
_head = msgspec.msgpack.Decoder(_Head)

encode = _encoder.encode


def told_of(raw: bytes) -> Told:
    """Read what a peer published.  Raises OtherVersion or Garbage."""
    try:
        told = _told.decode(raw)
    except UNREADABLE as error:
        raise _reason(raw, error) from None
    _check(told.version)
    return told


def ask_of(raw: bytes) -> Ask:
    """Read a question.  Raises OtherVersion or Garbage."""
    try:
        ask = _ask.decode(raw)
    except UNREADABLE as error:
        raise _reason(raw, error) from None
    _check(ask.version)
    return ask


def answer_of(raw: bytes) -> Answer:
    """Read an answer.  Raises OtherVersion or Garbage."""
    try:
        answer = _answer.decode(raw)
    except UNREADABLE as error:
        raise _reason(raw, error) from None
    _check(answer.version)
    return answer


def cut(news: Sequence[News]) -> Iterator[tuple[News, ...]]:
    """Split news into what fits into messages, in order."""
    start = size = 0
    for at, each in enumerate(news):
        size += _ENTRY_BYTES
        if type(each) is PeerBooked or type(each) is PeerForgot or type(each) is PeerLearnt:
            size += len(each.blocks)
        if size > CUT_BYTES:
            yield tuple(news[start : at + 1])
            start, size = at + 1, 0
    if start < len(news):
        yield tuple(news[start:])


def _check(version: int) -> None:
    if version != VERSION:
        raise OtherVersion(version)


def _reason(raw: bytes, error: Exception) -> ValueError:
    """Why bytes could not be read; what another version means by its fields is not known here."""
    try:
        version = _head.decode(raw).version
    except UNREADABLE:
        return Garbage(str(error))
    return OtherVersion(version) if version != VERSION else Garbage(str(error))
