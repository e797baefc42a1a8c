"""The directory where a running pool keeps its sockets and files, and how others find it.

One directory per public port, private to the user: `$XDG_RUNTIME_DIR/shoal/8080`, else `/tmp/shoal-<uid>/8080`.
Owns names, permissions and the lock that keeps two pools apart.
"""

import fcntl
import os
import socket
import stat
from pathlib import Path

from shoal.kernel import ConfigError

ADMIN_SOCKET = "admin.sock"
_LOCK = "lock"
# What data planes and workers read keys of engines and private keys from, what a writer that died left half written,
# and both where earlier versions had them.
_SECRETS = (
    "envoy/eds/*", "envoy/sds/*", "backends.json", ".backends.json.*",
    "direct/backends.json", "direct/.backends.json.*",
)  # fmt: skip
_LONGEST_SOCKET_PATH_BYTES = 107  # sun_path of Linux, less its final zero
_LONGEST_SOCKET_NAME_BYTES = 20


def root() -> Path:
    """Return the directory that holds the run directories of this user's pools."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and os.access(runtime, os.W_OK):
        return Path(runtime) / "shoal"
    return Path(f"/tmp/shoal-{os.getuid()}")


def default_for(port: int) -> Path:
    """Return the run directory of the pool on public port `port`."""
    return root() / str(port)


def running_pools() -> list[str]:
    """Return the names (ports) of run directories under `root()` whose pool is alive, in order."""
    try:
        names = sorted(path.name for path in root().iterdir() if (path / ADMIN_SOCKET).exists())
    except OSError:
        return []
    return [name for name in names if is_alive(root() / name)]


def is_alive(directory: Path) -> bool:
    """Whether somebody answers on the admin socket of the run directory."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(directory / ADMIN_SOCKET))
        except OSError:
            return False
    return True


def holder_pid(directory: Path) -> int:
    """Return the process that holds a run directory or held it last, 0 when none is known."""
    try:
        return int((directory / _LOCK).read_text()[:32])
    except (OSError, ValueError):
        return 0


class RunDir:
    """A run directory that this process owns, from `open` to `close`.

    path: absolute.  Raises ConfigError when another pool holds it, when others could write there, or when its
    path is too long for a unix socket.
    """

    __slots__ = ("_descriptor", "path")

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._descriptor = -1

    def open(self) -> None:
        """Make the directory (mode 0700), lock it, and clear what a dead owner left, as `close` does."""
        longest = len(os.fsencode(self.path)) + 1 + _LONGEST_SOCKET_NAME_BYTES
        if longest > _LONGEST_SOCKET_PATH_BYTES:
            raise ConfigError(
                f"run directory {self.path} is too long for the sockets in it "
                f"({longest} of at most {_LONGEST_SOCKET_PATH_BYTES} bytes); choose a shorter one with --run-dir"
            )
        try:
            if self.path.parent == root():
                _make_private(root())
            _make_private(self.path)
            self._lock()
            self._clear()
        except OSError as error:
            raise ConfigError(f"cannot use run directory {self.path}: {error.strerror}; see --run-dir") from error

    def close(self) -> None:
        """Remove sockets, secrets and bequests, let go of the lock.  Other files stay for who looks into a crash."""
        if self._descriptor < 0:
            return
        self._clear()
        os.close(self._descriptor)
        self._descriptor = -1

    def file(self, name: str) -> Path:
        """Return the path of `name` in the directory."""
        return self.path / name

    def _clear(self) -> None:
        for pattern in (*_SECRETS, "*.sock", "*.bequest"):
            for stale in self.path.glob(pattern):
                stale.unlink(missing_ok=True)

    def _lock(self) -> None:
        descriptor = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
            os.close(descriptor)
            raise ConfigError(
                f"run directory {self.path} is held by another pool (pid {holder or 'unknown'}); "
                "stop that one, or choose another --port or --run-dir"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        self._descriptor = descriptor


def _make_private(path: Path) -> None:
    """Make a directory that only this user can enter; refuse one that somebody else prepared."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"{path} is not a directory; remove it or choose another --run-dir")
    if found.st_uid != os.getuid():
        raise ConfigError(f"{path} belongs to another user; choose another --run-dir")
    if found.st_mode & 0o077:
        path.chmod(0o700)
