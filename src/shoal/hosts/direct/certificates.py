"""The certificate of the public listener, read again when its files change.

A pair that cannot be used is refused, and the one in use stays.
"""

import asyncio
import os
import ssl

from shoal.hosts.logs import Log
from shoal.kernel import ConfigError
from shoal.routing.settings import Tls

log = Log("direct")

_LOOK_S = 2.0


class Certificate:
    """The listener's TLS.  context: given to the listener once; a reload changes it in place for new connections."""

    def __init__(self, files: Tls) -> None:
        """Read the pair.  Raises ConfigError."""
        self._files = files
        _load(_fresh(), files)
        self.context = _fresh()
        _load(self.context, files)
        self._seen = self._marks()
        self._refused = ""

    def look(self, files: Tls) -> None:
        """Read the pair again if it has changed, or its files are others."""
        if files == self._files and self._marks() == self._seen:
            return
        self._files = files
        self._seen = self._marks()
        try:
            # Key and chain are replaced one after the other: a scratch context tells whether they belong together.
            _load(_fresh(), files)
            _load(self.context, files)
        except ConfigError as error:
            if str(error) != self._refused:
                self._refused = str(error)
                log.error("certificate not reloaded, the last one stays in use", why=error)
            return
        self._refused = ""
        log.info("certificate reloaded", file=files.cert)

    async def follow(self) -> None:
        """Look now and then, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            self.look(self._files)

    def _marks(self) -> tuple[object, ...]:
        return tuple(_mark(path) for path in (self._files.cert, self._files.key))


def _fresh() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context


def _load(context: ssl.SSLContext, files: Tls) -> None:
    try:
        context.load_cert_chain(files.cert, files.key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"certificate and key {files.key} cannot be used: {error}", source=files.cert) from error


def _mark(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size
