"""Files that a verb is given, read whole and within one bound for all of them.

Owns the reading; what they hold is for who asked.
"""

import os
from collections.abc import Iterable
from pathlib import Path

from shoal.kernel import ConfigError

__all__ = ["files_at", "journals_at", "read_files"]

_PIECE_BYTES = 16 << 20


def read_files(paths: Iterable[Path], most_bytes: int) -> list[bytes]:
    """Return what the files hold, in their order; pipes are read to their end.

    Raises ConfigError for one that cannot be read, and when they are longer than `most_bytes` together.
    """
    found: list[bytes] = []
    left = most_bytes
    for path in paths:
        try:
            data = _read(path, left)
        except OSError as error:
            raise ConfigError(f"cannot be read: {error.strerror or error}", source=str(path)) from None
        if data is None:
            together = " together with the files before it" if found else ""
            raise ConfigError(f"is larger than {most_bytes} bytes{together}", source=str(path))
        left -= len(data)
        found.append(data)
    return found


def _read(path: Path, most_bytes: int) -> bytes | None:
    """Return what a file holds, None when that is more than `most_bytes`; a longer one is not read to its end."""
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size > most_bytes:
            return None
        pieces: list[bytes] = []
        size = 0
        while piece := file.read(_PIECE_BYTES):
            pieces.append(piece)
            size += len(piece)
            if size > most_bytes:
                return None
    return b"".join(pieces)


def journals_at(path: Path) -> list[Path]:
    """Return the files of journals that a path stands for: itself, or those in a folder.  Raises ConfigError."""
    return files_at(path, ".journal")


def files_at(path: Path, suffix: str) -> list[Path]:
    """Return a path, or in place of a folder its files whose names end so, in order; with "" it stays a folder.

    Raises ConfigError.
    """
    if not (suffix and path.is_dir()):
        return [path]
    try:
        found = sorted(each for each in path.iterdir() if each.name.endswith(suffix))
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", source=str(path)) from None
    if not found:
        raise ConfigError(f"has no file that ends in {suffix}", source=str(path))
    return found
