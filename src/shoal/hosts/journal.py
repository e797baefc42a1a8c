"""Writes the journal off the event loop: bounded memory, bounded files.

Owns the files and the thread.  While the disk takes nothing, steps wait in memory and go on where the file was left.
When more wait than may, recording stops and says so: a journal with a hole cannot be replayed, so a new one begins with
the next start.
"""

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from shoal.hosts.journals import Allowance, open_part, prune
from shoal.routing import Command, Event
from shoal.routing.journal import MAGIC, Opening, Step, encode

log = logging.getLogger("shoal.journal")

MAX_QUEUED_FRAMES = 50_000
MAX_QUEUED_BYTES = 64 << 20
# How long a step may stay in memory: to wake the thread for each costs ten times its encoding.
WRITE_EVERY_S = 0.1
_BATCH_BYTES = 1 << 18


class JournalWriter:
    """One journal of one process: `<stem>.journal`, then `<stem>.1.journal`, ... up to `max_files` of `max_bytes`.

    The router's state at the start of a later part is the end of the part before, so all parts replay together; when
    `max_files` are full, recording stops (it says so) rather than losing the beginning.  allowance: of all journals in
    the directory, to which earlier runs give way when this one begins; None keeps them all.
    """

    def __init__(
        self,
        directory: Path,
        stem: str,
        opening: Opening,
        *,
        max_bytes: int,
        max_files: int,
        allowance: Allowance | None = None,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._directory = directory
        self._stem = stem
        self._opening = opening
        self._max_bytes = max_bytes
        self._max_files = max_files
        self._allowance = allowance
        # The first part stays open to the end: that is how others see that this run goes on.
        self._held = -1
        self._frames: deque[bytes] = deque()
        # Two counts, for each has one thread that writes it.
        self._queued_bytes = self._taken_bytes = 0
        self._closing = threading.Event()
        self._is_full = self._is_stuck = False
        self._thread = threading.Thread(target=self._write, name="journal", daemon=True)
        self._thread.start()

    def append(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """Take one step; encoding happens here, writing elsewhere."""
        if self._is_full:
            return
        if len(self._frames) >= MAX_QUEUED_FRAMES or self._queued_bytes - self._taken_bytes >= MAX_QUEUED_BYTES:
            self._is_full = True
            why = "takes nothing" if self._is_stuck else "is slower than the traffic"
            log.error("journal stopped for good: the disk %s; a new one begins with the next start", why)
            return
        frame = encode(Step(now, event, commands))
        self._queued_bytes += len(frame)
        self._frames.append(frame)

    def close(self) -> None:
        """Write what is queued and close the file."""
        self._closing.set()
        self._thread.join(timeout=10.0)
        self._is_full = True
        held, self._held = self._held, -1
        if held >= 0:
            os.close(held)

    def path(self, part: int) -> Path:
        """The file of a part."""
        suffix = f".{part}" if part else ""
        return self._directory / f"{self._stem}{suffix}.journal"

    # ------------------------------------------------------------------ on the thread

    def _write(self) -> None:
        self._make_room()
        part = 0
        while part < self._max_files and self._write_part(part):
            part += 1
        if part == self._max_files and not self._is_full:
            log.warning("journal is full: %d files of %d bytes; recording stopped", part, self._max_bytes)
        self._is_full = True
        self._frames.clear()

    def _make_room(self) -> None:
        """Remove earlier runs beyond the allowance."""
        if self._allowance is None:
            return
        try:
            removed = prune(self._directory, self._allowance)
        except OSError as error:
            log.warning("journals of earlier runs cannot be counted: %s", error)
            return
        if removed.runs:
            log.info("journals of earlier runs removed: %d, of %d bytes", removed.runs, removed.size_bytes)

    def _write_part(self, part: int) -> bool:
        """Fill one file; returns whether there is more to write."""
        opening = Opening(
            self._opening.seed, self._opening.config_text, self._opening.shares_pool, part, self._opening.run
        )
        descriptor = -1
        # Who looks at once finds a journal, if one without steps.
        batch, written = MAGIC + encode(opening), 0
        is_closing = False
        try:
            while True:
                try:
                    if descriptor < 0:
                        descriptor = open_part(self.path(part))
                        if self._held < 0:
                            self._held = os.dup(descriptor)
                    _put(descriptor, batch, written)
                    written, batch = written + len(batch), b""
                    self._goes_on()
                except OSError as error:
                    self._stick(error)
                    if is_closing:
                        return False
                if not batch and written >= self._max_bytes:
                    return True
                if is_closing and not batch and not self._frames:
                    return False
                if batch or not self._frames:
                    is_closing = self._closing.wait(WRITE_EVERY_S)
                if self._is_full and not is_closing and batch:
                    return False
                if not batch:
                    batch = self._next(self._max_bytes - written)
        finally:
            if descriptor >= 0:
                _end(descriptor, written)

    def _next(self, most_bytes: int) -> bytes:
        """Take what is written next: whole frames, the last of which may go over `most_bytes`."""
        frames, size = [], 0
        while self._frames and size < min(most_bytes, _BATCH_BYTES):
            frames.append(self._frames.popleft())
            size += len(frames[-1])
        self._taken_bytes += size
        return b"".join(frames)

    def _stick(self, error: OSError) -> None:
        if not self._is_stuck:
            self._is_stuck = True
            log.error("journal cannot be written: %s; steps wait in memory until it can", error)

    def _goes_on(self) -> None:
        if self._is_stuck:
            self._is_stuck = False
            log.warning("journal goes on without a hole")


def _put(descriptor: int, data: bytes, at: int) -> None:
    """Write all of `data`; after an error the same can be written there again.  Raises OSError."""
    view = memoryview(data)
    while view:
        count = os.pwrite(descriptor, view, at)
        view, at = view[count:], at + count


def _end(descriptor: int, size: int) -> None:
    """Close the file behind its last whole frame."""
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, size)
    with contextlib.suppress(OSError):
        os.close(descriptor)
