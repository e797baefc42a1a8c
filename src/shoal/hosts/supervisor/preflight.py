"""What a configuration asks of this machine, tried before it is accepted.

Workers read keys, open the journal and load OpenTelemetry at their start; one that cannot would crash again and again,
so each is tried here and said in one line.  Nothing is kept open, and nothing is written.
"""

import os
from pathlib import Path

from shoal.hosts.keys import KeyRing
from shoal.hosts.sharing import read_secret
from shoal.hosts.tracing import Tracer
from shoal.kernel import ConfigError
from shoal.routing.settings import PoolSettings


def preflight(pool: PoolSettings) -> None:
    """Raise ConfigError when a worker with these settings could not start on this machine."""
    if pool.auth.keys_file:
        try:
            KeyRing(Path(pool.auth.keys_file))
        except ConfigError as error:
            raise ConfigError(error.message, source=error.source, line=error.line, path="auth.keys_file") from None
    if pool.sharing.secret_file:
        try:
            read_secret(Path(pool.sharing.secret_file))
        except ConfigError as error:
            raise ConfigError(error.message, source=error.source, path="sharing.secret_file") from None
    Tracer.from_settings(pool.tracing).close()
    if pool.journal.path:
        _check_directory(Path(pool.journal.path))


def _check_directory(path: Path) -> None:
    """Whether files can be made in `path`, which may have to be made itself."""
    standing = next((each for each in (path, *path.absolute().parents) if each.exists()), Path("/"))
    if not standing.is_dir():
        raise ConfigError(f"{standing} is not a directory", path="journal.path")
    if not os.access(standing, os.W_OK | os.X_OK):
        raise ConfigError(f"{standing} cannot be written", path="journal.path")
