"""Whether a port can be had, said in one clear line when not.

Owns the check that comes before any child is started.  The real bind is done later by Envoy or the admin server.
"""

import contextlib
import errno
import socket
from pathlib import Path

from shoal.kernel import ConfigError


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port of `host` that nobody listens on right now."""
    with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def check_port(host: str, port: int, flag: str) -> None:
    """Raise ConfigError when `host:port` cannot be bound.  flag: which flag chooses another, for the message."""
    with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
        # As Envoy and aiohttp bind: a port whose old connections are in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            raise ConfigError(_reason(error, host, port, flag)) from error


def _reason(error: OSError, host: str, port: int, flag: str) -> str:
    if error.errno == errno.EADDRINUSE:
        holder = holder_of(port)
        by = f" by {holder}" if holder else ""
        return f"port {port} on {host} is already taken{by}; stop that process or choose another port with {flag}"
    if error.errno == errno.EACCES:
        return f"port {port} on {host} needs privileges that this user has not; choose one above 1023 with {flag}"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{host} is no address of this machine; choose another with --host"
    return f"cannot listen on {host}:{port}: {error.strerror}; choose another with {flag}"


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def holder_of(port: int) -> str:
    """Name the process that listens on `port`, as `envoy (pid 12)`; "" when this user may not see it."""
    inodes = _listening_inodes(port)
    if not inodes:
        return ""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if str(descriptor.readlink()) in inodes:
                        return f"{(process / 'comm').read_text().strip()} (pid {process.name})"
    return ""


def _listening_inodes(port: int) -> set[str]:
    found: set[str] = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    found.add(f"socket:[{fields[9]}]")
    return found
