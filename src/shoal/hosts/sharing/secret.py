"""The secret that pickers of several pools share: who has the file may listen and tell.

Owns reading it and what is derived from it: one CURVE key pair for all of them, and the key of the prompt hash, since
blocks mean the same only under the same key.  The public half is derived too and is never on the wire, so who does not
know the secret can neither begin nor answer a handshake.
"""

import os
import secrets
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from shoal.hosts.filewatch import read_small
from shoal.kernel import ConfigError

_SECRET_BYTES = 32
_MIN_CHARS = 32
_MAX_BYTES = 4096


class Secret(NamedTuple):
    """curve_key: private CURVE key, 32 bytes.  hash_key: of the prompt hash, as hex."""

    curve_key: bytes
    hash_key: str


def new_secret(path: Path) -> None:
    """Make a file with a new secret, mode 600.  Raises ConfigError when it is there already or cannot be written."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w") as file:
            file.write(secrets.token_urlsafe(_SECRET_BYTES) + "\n")
    except FileExistsError:
        raise ConfigError(
            "is there already; remove it first, and give all pickers the new one", source=str(path)
        ) from None
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror}", source=str(path)) from None


def read_secret(path: Path) -> Secret:
    """Read a secret file.  Raises ConfigError, without its content."""
    try:
        text = read_small(path, _MAX_BYTES).strip()
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", source=str(path)) from None
    if not _MIN_CHARS <= len(text) <= _MAX_BYTES:
        raise ConfigError(
            f"holds {len(text)} bytes; a secret has {_MIN_CHARS} to {_MAX_BYTES}: `shoal keys secret FILE` makes one",
            source=str(path),
        )
    return Secret(
        blake2b(text, digest_size=32, person=b"shoal-curve").digest(),
        blake2b(text, digest_size=8, person=b"shoal-hash").hexdigest(),
    )
