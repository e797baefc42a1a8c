"""One small file that people edit while we run: bounded reads, and a signal when its content changed.

Atomic replacement, in-place writes and the symlink swap of a mounted ConfigMap are all seen, because the
folder is watched and the file's identity compared.  What the bytes mean is the reader's business.
"""

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

from watchfiles import awatch

from shoal.kernel import ConfigError

MAX_FILE_BYTES = 1 << 20


class WatchedFile:
    """A file with a size limit that knows whether it changed since it was last read."""

    __slots__ = ("_limit", "_seen", "path")

    def __init__(self, path: Path, limit_bytes: int = MAX_FILE_BYTES) -> None:
        self.path = path
        self._limit = limit_bytes
        self._seen: tuple[int, int, int] | None = None

    def read(self) -> bytes:
        """Return the content.  Raises ConfigError when it cannot be read or is over the limit."""
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                self._seen = (status.st_mtime_ns, status.st_ino, status.st_size)
                data = file.read(self._limit + 1)
        except OSError as error:
            raise ConfigError(f"cannot be read: {error.strerror}", source=str(self.path)) from None
        if len(data) > self._limit:
            raise ConfigError(f"is larger than the limit of {self._limit} bytes", source=str(self.path))
        return data

    def is_changed(self) -> bool:
        """Whether the file is there and differs from what `read` saw last."""
        try:
            status = self.path.stat()
        except OSError:
            return False
        return (status.st_mtime_ns, status.st_ino, status.st_size) != self._seen

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
