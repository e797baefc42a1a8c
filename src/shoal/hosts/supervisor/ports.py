"""Whether a port can be had, said in one clear line when not.

Owns the check that comes before any child is started, and who has a port that is taken.  The real bind is done later,
by the data plane or the admin server.
"""

import contextlib
import errno
import socket
from pathlib import Path
from typing import NamedTuple

from shoal.hosts.admin.rundir import default_for, holder_pid, is_alive, root, running_pools
from shoal.kernel import ConfigError


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port of `host` that nobody listens on right now."""
    with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def hold_port(host: str, port: int) -> socket.socket | None:
    """Bind a port for those of this user's processes that share it, so that no other program can take it.

    The socket never listens, so no connection comes to it.  Returns None when old connections of a program that did
    not share the port still linger.
    """
    holder = socket.socket(_family(host), socket.SOCK_STREAM)
    # Without SO_REUSEADDR: with it on both sides, somebody else could bind and listen all the same.
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        holder.bind((host, port))
    except OSError:
        holder.close()
        return None
    return holder


def shared_sockets(host: str, port: int, count: int) -> list[socket.socket]:
    """Return sockets bound to one port, among which the kernel spreads connections once they listen.

    Raises ConfigError.
    """
    made: list[socket.socket] = []
    try:
        for _ in range(count):
            made.append(socket.socket(_family(host), socket.SOCK_STREAM))
            made[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            made[-1].bind((host, port))
    except OSError as error:
        for each in made:
            each.close()
        raise ConfigError(_reason(error, host, port, "--port")) from error
    return made


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
        taken = f"port {port} on {host} is already taken"
        holder = holder_of(port)
        pool = pool_of(holder) if holder else (default_for(port) if is_alive(default_for(port)) else None)
        if pool is not None:
            pid = holder_pid(pool)
            stop = f"stop it with `kill {pid}`" if pid else "stop it"
            return f"{taken} by the Shoal pool in {pool}; {stop}, or choose another port with {flag}"
        by = f" by {holder.name} (pid {holder.pid})" if holder else ""
        return f"{taken}{by}; stop that process or choose another port with {flag}"
    if error.errno == errno.EACCES:
        return f"port {port} on {host} needs privileges that this user has not; choose one above 1023 with {flag}"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{host} is no address of this machine; choose another with --host"
    return f"cannot listen on {host}:{port}: {error.strerror}; choose another with {flag}"


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


class Holder(NamedTuple):
    """A process that listens on a port."""

    name: str
    pid: int


def holder_of(port: int) -> Holder | None:
    """Return the process that listens on `port`, None when there is none or this user may not see it."""
    inodes = _listening_inodes(port)
    if not inodes:
        return None
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if str(descriptor.readlink()) in inodes:
                        return Holder((process / "comm").read_text().strip(), int(process.name))
    return None


def pool_of(holder: Holder) -> Path | None:
    """Return the run directory of the running pool that a process belongs to, None when it belongs to none."""
    owners = {holder_pid(directory): directory for directory in map(root().joinpath, running_pools())}
    pid = holder.pid
    with contextlib.suppress(OSError, ValueError, IndexError):
        while pid > 1:
            if pid in owners:
                return owners[pid]
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            if "--run-dir" in words and is_alive(directory := Path(words[words.index("--run-dir") + 1])):
                return directory
            # After the name, which may hold anything: state, parent.
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return None


def _listening_inodes(port: int) -> set[str]:
    found: set[str] = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    found.add(f"socket:[{fields[9]}]")
    return found
