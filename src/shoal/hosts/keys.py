"""API keys of clients: a file of names and key hashes, and the check of one request.

Keys are random and long, so one plain SHA-256 is enough and costs about a microsecond; passwords that
people choose do not belong here.  Who is asked for a key, and what the answer to a bad one looks like,
is decided elsewhere.  Neither keys nor file content are ever logged or put into an error.
"""

import hashlib
import hmac
import re
import secrets
from contextlib import aclosing
from pathlib import Path

from shoal.hosts.filewatch import WatchedFile
from shoal.hosts.logs import Log
from shoal.kernel import ConfigError

log = Log("keys")

KEY_PREFIX = "sk-shoal-"
_KEY_BYTES = 32
_MAX_KEY_CHARS = 1024
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,127}")
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_BUCKET_BYTES = 8

Table = dict[bytes, tuple[tuple[bytes, str], ...]]


def new_key(name: str) -> tuple[str, str]:
    """Make a key: (the key, to be shown once; its line for the keys file).  Raises ConfigError for a bad name."""
    if not _NAME.fullmatch(name):
        raise ConfigError("a key's name is 1 to 128 of A-Z a-z 0-9 . _ @ - and begins with a letter or digit")
    key = KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)
    return key, f"{name}:{hashlib.sha256(key.encode()).hexdigest()}"


def parse_keys(data: bytes, source: str) -> list[tuple[bytes, str]]:
    """Read a keys file into (digest, name) pairs; `#` begins a comment line.

    One name may have several keys, so that a key can be replaced without a gap.  Raises ConfigError with the
    line number, and without its content: people paste keys where hashes belong.
    """
    entries: list[tuple[bytes, str]] = []
    lines: dict[bytes, int] = {}
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise ConfigError("is not UTF-8 text", source=source) from None
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        name, _, digest_hex = line.partition(":")
        if not _NAME.fullmatch(name) or not _DIGEST.fullmatch(digest_hex):
            raise ConfigError(
                "expected NAME:SHA256 with 64 hex digits; `shoal keys new NAME` prints such a line",
                source=source,
                line=number,
            )
        digest = bytes.fromhex(digest_hex)
        if digest in lines:
            raise ConfigError(f"the same key as in line {lines[digest]}", source=source, line=number)
        lines[digest] = number
        entries.append((digest, name))
    return entries


class KeyRing:
    """The keys that are let in now.  A broken edit of the file keeps the keys that were read last."""

    __slots__ = ("_file", "_table")

    def __init__(self, path: Path) -> None:
        """Read `path`.  Raises ConfigError."""
        self._file = WatchedFile(path)
        self._table: Table = {}
        self.reload()

    def __len__(self) -> int:
        return sum(len(bucket) for bucket in self._table.values())

    def reload(self) -> None:
        """Read the file again and swap the keys at once.  Raises ConfigError and then changes nothing."""
        entries = parse_keys(self._file.read(), str(self._file.path))
        table: Table = {}
        for digest, name in entries:
            bucket = digest[:_BUCKET_BYTES]
            table[bucket] = (*table.get(bucket, ()), (digest, name))
        self._table = table
        if not entries:
            log.warning(f"{self._file.path} holds no key: every request will be refused")

    async def watch(self) -> None:
        """Follow the file until cancelled; an edit that cannot be read is logged and changes nothing."""
        async with aclosing(self._file.changes()) as changes:
            async for _ in changes:
                try:
                    self.reload()
                except ConfigError as error:
                    log.error(f"keys not reloaded, the last ones stay valid: {error}")
                else:
                    log.info(f"{self._file.path} reloaded", keys=len(self))

    def check(self, authorization: str | None, x_api_key: str | None = None) -> str | None:
        """Return the name behind a request's `authorization` (Bearer) or `x-api-key` header, None when not let in."""
        if authorization and authorization[:7].lower() == "bearer ":
            name = self._find(authorization[7:].strip())
            if name is not None:
                return name
        return self._find(x_api_key.strip()) if x_api_key else None

    def _find(self, key: str) -> str | None:
        if not key or len(key) > _MAX_KEY_CHARS:
            return None
        digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
        # A client cannot steer the digest of a guess, so the bucket tells it nothing; the full compare takes the
        # same time wherever it differs.
        for known, name in self._table.get(digest[:_BUCKET_BYTES], ()):
            if hmac.compare_digest(known, digest):
                return name
        return None
