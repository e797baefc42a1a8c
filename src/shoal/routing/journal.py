"""The journal's form: what the router was told and what it commanded, as length-prefixed msgpack frames.

Owns encoding, decoding and replay, all pure.  Files, rotation and the writing thread are `hosts.journal`.  Frames hold
block hashes and counts, never prompt text.
"""

import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from shoal.kernel import UNREADABLE, Chance, InvalidInput, ShoalError
from shoal.routing.commands import Command
from shoal.routing.config import load
from shoal.routing.events import Event
from shoal.routing.router import Router

MAGIC = b"shoal-journal-1\n"
# A 2 MB prompt has 8,192 blocks of 8 bytes; headers and names stay far below the rest.
MAX_FRAME_BYTES = 1 << 20
_LENGTH = struct.Struct("<I")


class Opening(msgspec.Struct, frozen=True, tag="opening"):
    """The first frame: how to build the same router.  part: 0 for the first file of a process, then 1, 2, ..."""

    seed: int
    config_text: str
    shares_pool: bool
    part: int = 0
    run: str = ""


class Step(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One call of `handle`: the time on the router's clock, the event, the commands."""

    now: float
    event: Event
    commands: Sequence[Command]


class Difference(NamedTuple):
    """The first step whose commands came out otherwise.  number: its place, from 1."""

    number: int
    now: float
    event: Event
    recorded: Sequence[Command]
    replayed: list[Command]


_encoder = msgspec.msgpack.Encoder()
_step_decoder = msgspec.msgpack.Decoder(Step)
_opening_decoder = msgspec.msgpack.Decoder(Opening)


def encode(record: Opening | Step) -> bytes:
    """Return one frame: length (uint32, little-endian) and msgpack."""
    payload = _encoder.encode(record)
    return _LENGTH.pack(len(payload)) + payload


def frames(data: bytes) -> Iterator[bytes]:
    """Split a journal file after its magic; a frame cut off at the end (a crash) ends the walk.

    Raises InvalidInput when the file is no journal or a frame claims an impossible size.
    """
    if not data.startswith(MAGIC):
        raise InvalidInput("not a Shoal journal: the file does not begin with its magic line")
    at = len(MAGIC)
    while at + _LENGTH.size <= len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        if length > MAX_FRAME_BYTES:
            raise InvalidInput(f"journal frame at byte {at} claims {length} bytes; the limit is {MAX_FRAME_BYTES}")
        at += _LENGTH.size
        if at + length > len(data):
            return
        yield data[at : at + length]
        at += length


def read(data: bytes) -> tuple[Opening, Iterator[Step]]:
    """Return the opening and the steps of one file.  Raises InvalidInput on anything that is neither."""
    walk = frames(data)
    try:
        opening = _opening_decoder.decode(next(walk))
    except StopIteration:
        raise InvalidInput("the journal is empty: not even its opening was written") from None
    except UNREADABLE as error:
        raise InvalidInput(f"the journal's opening cannot be read: {error}") from error
    return opening, _steps(walk)


def _steps(walk: Iterator[bytes]) -> Iterator[Step]:
    for number, frame in enumerate(walk, 1):
        try:
            step = _step_decoder.decode(frame)
        except UNREADABLE as error:
            raise InvalidInput(f"step {number} of the journal cannot be read: {error}") from error
        if not math.isfinite(step.now):
            raise InvalidInput(f"step {number} of the journal has no time")
        yield step


def replay(opening: Opening, steps: Iterable[Step]) -> tuple[int, Difference | None]:
    """Feed the steps to a fresh router; return how many were the same and the first that was not, if any."""
    router = Router(load(opening.config_text, "journal"), Chance(opening.seed), shares_pool=opening.shares_pool)
    number = 0
    for number, step in enumerate(steps, 1):
        try:
            replayed = router.handle(step.event, step.now)
        except ShoalError:
            raise
        except Exception as error:
            raise InvalidInput(f"step {number}: no router can take it: {error!r}") from error
        if _encoder.encode(replayed) != _encoder.encode(step.commands):
            return number - 1, Difference(number, step.now, step.event, step.commands, replayed)
    return number, None
