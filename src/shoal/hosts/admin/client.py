"""The operator's side of the admin API: finds a running pool and asks it, without an event loop.

Used by the verbs of the command line, so it imports little and every failure is one clear line.
"""

import http.client
import socket
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from shoal.hosts.admin import rundir
from shoal.hosts.admin.snapshots import PoolPicture
from shoal.kernel import UNREADABLE, ConfigError, ShoalError


class NoPool(ConfigError):
    """No pool runs where the operator looked."""


class Refused(ShoalError):
    """The pool would not do what it was asked; says why."""


class PoolClient:
    """Asks the pool whose run directory is `run_dir`.  Raises NoPool when it is gone, Refused when it says no."""

    def __init__(self, run_dir: Path, timeout_s: float = 10.0) -> None:
        self.run_dir = run_dir
        self._timeout_s = timeout_s

    def picture(self) -> PoolPicture:
        """Return the pool as one picture."""
        return msgspec.json.decode(self._good("GET", "/snapshot"), type=PoolPicture)

    def snapshot_json(self) -> bytes:
        """Return the picture as the JSON that the pool sent."""
        return self._good("GET", "/snapshot")

    def metrics(self) -> str:
        """Return the Prometheus page of the whole pool."""
        return self._good("GET", "/metrics").decode()

    def explain(self, request_id: str) -> dict[str, Any]:
        """Return what the workers know of a request: `found` (a list, maybe empty), `silent` and `renewed` pickers."""
        _, body = self._ask("GET", f"/explain/{quote(request_id, safe='', errors='replace')}")
        explained: dict[str, Any] = msgspec.json.decode(body, type=dict[str, Any])
        return explained

    def endpoint(self, op: str, name: str) -> tuple[list[str], bool]:
        """Add, drain or remove an endpoint; returns the ids, and whether one to add was known before."""
        body = msgspec.json.encode({"op": op, ("url" if op == "add" else "id"): name})
        answer = msgspec.json.decode(self._good("POST", "/endpoints", body), type=dict[str, Any])
        return [str(endpoint_id) for endpoint_id in answer["endpoints"]], bool(answer["is_known"])

    def control(
        self,
        op: str,
        *,
        name: str = "",
        labels: dict[str, str] | None = None,
        is_all: bool = False,
        timeout_s: float = 30.0,
        **more: object,
    ) -> tuple[list[str], dict[str, str]]:
        """Pause, resume or reset the engines of one endpoint, of those with labels, or of all.

        timeout_s: how long each may take.  more: `mode`, `running`, `external` of the order.  Returns the ids, and what
        was not done by id.
        """
        order = {"op": op, "id": name, "labels": labels or {}, "all": is_all, "timeout_s": timeout_s, **more}
        answer = self._good("POST", "/endpoints", msgspec.json.encode(order), timeout_s=2 * timeout_s + self._timeout_s)
        carried = msgspec.json.decode(answer, type=dict[str, Any])
        return [str(endpoint_id) for endpoint_id in carried["endpoints"]], dict(carried["problems"])

    def abort(self, session: str, tenant: str | None = None) -> tuple[int, list[str]]:
        """End the requests of a session; returns how many there were, and the pickers that did not answer."""
        body = msgspec.json.encode({"session": session, "tenant": tenant})
        answer = msgspec.json.decode(self._good("POST", "/abort", body), type=dict[str, Any])
        return int(answer["requests"]), [str(picker) for picker in answer["silent"]]

    def upgrade(self, timeout_s: float = 600.0) -> str:
        """Replace the workers one by one; returns what was done, when it is done."""
        return self._done("/upgrade", timeout_s)

    def reload(self) -> str:
        """Read the configuration again; returns what was done."""
        return self._done("/reload", self._timeout_s)

    def _done(self, target: str, timeout_s: float) -> str:
        answer = msgspec.json.decode(self._good("POST", target, timeout_s=timeout_s), type=dict[str, Any])
        return str(answer["done"])

    def _good(self, method: str, target: str, body: bytes = b"", timeout_s: float | None = None) -> bytes:
        status, answer = self._ask(method, target, body, timeout_s)
        if status != 200:
            raise Refused(_reason(status, answer))
        return answer

    def _ask(self, method: str, target: str, body: bytes = b"", timeout_s: float | None = None) -> tuple[int, bytes]:
        connection = _UnixConnection(self.run_dir / rundir.ADMIN_SOCKET, timeout_s or self._timeout_s)
        try:
            connection.request(method, target, body=body or None)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except TimeoutError as error:
            raise Refused(f"the pool in {self.run_dir} did not answer in time; see its log") from error
        except (OSError, http.client.HTTPException) as error:
            raise NoPool(f"the pool in {self.run_dir} is gone ({error})") from error
        finally:
            connection.close()


def find_pool(run_dir: str | None, port: int) -> PoolClient:
    """Return the client of the pool in `run_dir`, or of the one on public port `port`.  Raises NoPool."""
    directory = Path(run_dir) if run_dir else rundir.default_for(port)
    if rundir.is_alive(directory):
        return PoolClient(directory)
    place = f"in {directory}" if run_dir else f"on port {port} (looked in {directory})"
    others = [name for name in rundir.running_pools() if rundir.root() / name != directory]
    hint = (
        f"running pools of this user: {', '.join(f'--port {name}' for name in others)}"
        if others
        else "start one with `shoal up`, or say where it is with --port or --run-dir"
    )
    raise NoPool(f"no pool is running {place}; {hint}")


def _reason(status: int, body: bytes) -> str:
    try:
        return str(msgspec.json.decode(body, type=dict[str, Any])["error"])
    except (*UNREADABLE, KeyError):
        return f"the pool answered {status}: {body[:200].decode('utf-8', 'replace')}"


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("pool", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))
