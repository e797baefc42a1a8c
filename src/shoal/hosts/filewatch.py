"""Small files that people edit while we run: bounded reads, and a signal when their content changed.

Atomic replacement, in-place writes and the symlink swap of a mounted ConfigMap are all seen, because the
folder is watched and the file's identity compared.  What the bytes mean is the reader's business; that what was read
last stays in use while a file cannot be, and that this is said once, is here.
"""

import asyncio
import errno
import os
import stat
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from pathlib import Path

from watchfiles import awatch

from shoal.hosts.logs import Log
from shoal.kernel import ConfigError

MAX_FILE_BYTES = 1 << 20

Mark = tuple[int, int, int, int]


def mark_of(path: str | Path) -> Mark | None:
    """Return what changes whenever a file does, None when it is not there."""
    try:
        return _mark(os.stat(path))
    except OSError:
        return None


def _mark(status: os.stat_result) -> Mark:
    # The time of the last change of the inode tells of one that was given back its rights, or an older time.
    return status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_size


def read_small(path: str | Path, limit_bytes: int = MAX_FILE_BYTES) -> bytes:
    """Return what a regular file holds.  Raises OSError, also for a pipe, a device, or what is over the limit.

    Who gives a path to OpenSSL reads it first, for that waits at a pipe and reads files of any length.
    """
    return _read(path, limit_bytes)[0]


def _read(path: str | Path, limit_bytes: int) -> tuple[bytes, Mark]:
    with open(path, "rb", opener=_open_at_once) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        data = file.read(limit_bytes + 1)
    if len(data) > limit_bytes:
        raise OSError(errno.EFBIG, f"it is larger than the limit of {limit_bytes} bytes", str(path))
    return data, _mark(status)


def _open_at_once(path: str, flags: int) -> int:
    """Open without waiting: a pipe would have us wait for its writer, and with us all that this process does."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


class WatchedFile:
    """A file with a size limit that knows whether it changed since it was last read, also where that failed."""

    __slots__ = ("_limit", "_seen", "path")

    def __init__(self, path: Path, limit_bytes: int = MAX_FILE_BYTES) -> None:
        self.path = path
        self._limit = limit_bytes
        self._seen: Mark | None = None

    def read(self) -> bytes:
        """Return the content.  Raises ConfigError for what `read_small` does not read."""
        self._seen = mark_of(self.path)
        try:
            data, self._seen = _read(self.path, self._limit)
        except OSError as error:
            raise ConfigError(f"cannot be read: {error.strerror}", source=str(self.path)) from None
        return data

    def is_changed(self) -> bool:
        """Whether the file is there and differs from what `read` saw last."""
        mark = mark_of(self.path)
        return mark is not None and mark != self._seen

    async def changes(self, recheck_s: float = 5.0) -> AsyncGenerator[None, None]:
        """Yield after each change, until closed; the caller reads before it asks for the next.

        recheck_s: the file is looked at this often even when no notice comes (network file systems send none).
        """
        while True:
            try:
                notices = awatch(
                    self.path.parent,
                    watch_filter=None,
                    recursive=False,
                    debounce=400,
                    rust_timeout=int(recheck_s * 1000),
                    yield_on_timeout=True,
                )
                async with aclosing(notices):
                    async for _ in notices:
                        if self.is_changed():
                            yield
            except (OSError, RuntimeError):
                # The folder itself is gone or cannot be watched: fall back to looking now and then.
                await asyncio.sleep(recheck_s)
                if self.is_changed():
                    yield


class Refusals:
    """Says that something cannot be taken over and what was before stays: once for each reason."""

    __slots__ = ("_last", "_log", "_what")

    def __init__(self, what: str, log: Log) -> None:
        self._what = what
        self._log = log
        self._last = ""

    def tell(self, error: ConfigError) -> None:
        """Say why, unless that was said last."""
        if str(error) != self._last:
            self._last = str(error)
            self._log.error(f"{self._what} not reloaded, the last ones stay in use", why=error)

    def forget(self) -> None:
        """All is well again: the next reason is said, whatever it is."""
        self._last = ""


class FollowedFiles:
    """Files that are read together, and again when one of them has changed.

    what: as the log calls what is in them.  paths: which they are now; those that were read may name others.  take:
    reads them and puts them in use; raises ConfigError when they cannot be used, and has changed nothing then.
    """

    __slots__ = ("_paths", "_refusals", "_seen", "_take")

    def __init__(
        self, what: str, paths: Callable[[], Iterable[str | Path]], take: Callable[[], None], log: Log
    ) -> None:
        self._paths = paths
        self._take = take
        self._refusals = Refusals(what, log)
        self._seen: dict[str | Path, Mark | None] = {}

    def read(self) -> None:
        """Read them whether they have changed or not.  Raises ConfigError."""
        self._seen = before = self._marks()
        self._take()
        # What changed while it was read is read again, and a file that is named only now counts as read.
        self._seen = {path: before.get(path, mark) for path, mark in self._marks().items()}

    def look(self) -> bool:
        """Read them if one has changed, or they are others.  Returns whether they were put in use."""
        if self._marks() == self._seen:
            return False
        try:
            self.read()
        except ConfigError as error:
            self._refusals.tell(error)
            return False
        self._refusals.forget()
        return True

    def _marks(self) -> dict[str | Path, Mark | None]:
        return {path: mark_of(path) for path in self._paths()}


async def look_every(every_s: float, look: Callable[[], object]) -> None:
    """Look now and then, until cancelled."""
    while True:
        await asyncio.sleep(every_s)
        look()
