"""Writes the journal off the event loop: bounded memory, bounded files.

Owns the files and the thread.  When the disk cannot keep up, steps are dropped and counted, and the file is closed: a
journal with a hole cannot be replayed, so a new one begins with the next start.
"""

import logging
import os
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from shoal.routing import Command, Event
from shoal.routing.journal import MAGIC, Opening, Step, encode

log = logging.getLogger("shoal.journal")

MAX_QUEUED_FRAMES = 50_000
# How long a step may stay in memory: to wake the thread for each costs ten times its encoding.
WRITE_EVERY_S = 0.1


class JournalWriter:
    """One journal of one process: `<stem>.journal`, then `<stem>.1.journal`, ... up to `max_files` of `max_bytes`.

    The router's state at the start of a later part is the end of the part before, so all parts replay together; when
    `max_files` are full, recording stops (it says so) rather than losing the beginning.
    """

    def __init__(self, directory: Path, stem: str, opening: Opening, *, max_bytes: int, max_files: int) -> None:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._directory = directory
        self._stem = stem
        self._opening = opening
        self._max_bytes = max_bytes
        self._max_files = max_files
        self._frames: deque[bytes] = deque()
        self._closing = threading.Event()
        self._is_full = False
        self._thread = threading.Thread(target=self._write, name="journal", daemon=True)
        self._thread.start()

    def append(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """Take one step; encoding happens here, writing elsewhere."""
        if self._is_full:
            return
        if len(self._frames) >= MAX_QUEUED_FRAMES:
            self._is_full = True
            log.warning("journal stopped: the disk is slower than the traffic; it begins anew with the next start")
            return
        self._frames.append(encode(Step(now, event, commands)))

    def close(self) -> None:
        """Write what is queued and close the file."""
        self._is_full = True
        self._closing.set()
        self._thread.join(timeout=10.0)

    def path(self, part: int) -> Path:
        """The file of a part."""
        suffix = f".{part}" if part else ""
        return self._directory / f"{self._stem}{suffix}.journal"

    def _write(self) -> None:
        try:
            for part in range(self._max_files):
                if not self._write_part(part):
                    return
            self._is_full = True
            log.warning("journal is full: %d files of %d bytes; recording stopped", self._max_files, self._max_bytes)
        except OSError as error:
            self._is_full = True
            log.error("journal stopped: %s", error)

    def _write_part(self, part: int) -> bool:
        """Fill one file; returns whether there is more to write."""
        opening = Opening(
            self._opening.seed, self._opening.config_text, self._opening.shares_pool, part, self._opening.run
        )
        descriptor = os.open(self.path(part), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb", buffering=1 << 16) as file:
            written = file.write(MAGIC) + file.write(encode(opening))
            # Who looks at once finds a journal, if one without steps.
            file.flush()
            while written < self._max_bytes:
                is_closing = self._closing.wait(WRITE_EVERY_S)
                while self._frames and written < self._max_bytes:
                    written += file.write(self._frames.popleft())
                file.flush()
                if is_closing and not self._frames:
                    return False
        return True
