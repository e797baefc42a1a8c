"""The certificate of the public listener, read again when its files change.

A pair that cannot be used is refused, and the one in use stays.
"""

import ssl

from shoal.hosts.filewatch import FollowedFiles, look_every, read_small
from shoal.hosts.logs import Log
from shoal.kernel import ConfigError
from shoal.routing.settings import Tls

log = Log("direct")

_LOOK_S = 2.0


class Certificate:
    """The listener's TLS.  context: given to the listener once; a reload changes it in place for new connections."""

    def __init__(self, files: Tls) -> None:
        """Read the pair.  Raises ConfigError."""
        self._pair = files
        self.context = _fresh()
        self._files = FollowedFiles("certificates", lambda: (self._pair.cert, self._pair.key), self._read, log)
        self._files.read()

    def look(self, files: Tls) -> None:
        """Read the pair again if it has changed, or its files are others."""
        self._pair = files
        if self._files.look():
            log.info("certificates reloaded", file=files.cert)

    async def follow(self) -> None:
        """Look now and then, until cancelled."""
        await look_every(_LOOK_S, lambda: self.look(self._pair))

    def _read(self) -> None:
        # Key and chain are replaced one after the other: a scratch context tells whether they belong together.
        _load(_fresh(), self._pair)
        _load(self.context, self._pair)


def _fresh() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context


def _load(context: ssl.SSLContext, files: Tls) -> None:
    try:
        for path in (files.cert, files.key):
            read_small(path)
        context.load_cert_chain(files.cert, files.key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"certificate and key {files.key} cannot be used: {error}", source=files.cert) from error
