"""Embedded engines: `shoal engine` children that are a source of the fleet.

An engine picks a free port at its first start and keeps it, so that one that crashed returns by itself under the
same address.
"""

import asyncio
import json
import re
import sys
from collections.abc import Callable, Sequence

from shoal.hosts import logs
from shoal.hosts.fleet import Target
from shoal.hosts.supervisor.children import Child

_LISTENING = re.compile(r"listening on http://([0-9.]+):(\d+)")
_PER_ENGINE_ARGS = ("--host", "127.0.0.1")
_KV_EVENTS = {
    "enable_kv_cache_events": True,
    "endpoint": "tcp://127.0.0.1:0",
    "replay_endpoint": "tcp://127.0.0.1:0",
}


class EmbeddedEngines:
    """`count` engines with the same flags.  A `Source` of the fleet keeper.

    has_kv_events: whether they publish KV events, on free ports of the loopback interface that /kv_event_sources tells.
    """

    def __init__(self, count: int, model: str = "", extra: Sequence[str] = (), *, has_kv_events: bool = False) -> None:
        self._ports = [0] * count
        self._addresses: list[str] = [""] * count
        self._model = model
        self._extra = tuple(extra)
        self._has_kv_events = has_kv_events
        self._changed: Callable[[], None] = lambda: None
        self.children = [self._child(number) for number in range(count)]
        self._log = logs.get("supervisor")

    def start(self) -> None:
        """Start all; they announce themselves when they listen."""
        for child in self.children:
            child.start()

    async def stop(self) -> None:
        """End all."""
        await asyncio.gather(*(child.stop() for child in self.children))

    def targets(self) -> Sequence[Target]:
        """Those that have announced their port."""
        return tuple(
            Target(host=host, port=port, name=f"engine-{number}", engine="shoal")
            for number, (host, port) in enumerate(zip(self._addresses, self._ports, strict=True))
            if port
        )

    def unannounced(self) -> list[str]:
        """Return the names of those that have not said where they listen."""
        return [child.name for child, port in zip(self.children, self._ports, strict=True) if not port]

    async def watch(self, changed: Callable[[], None]) -> None:
        """Call `changed` from now on, and return."""
        self._changed = changed
        changed()

    def _child(self, number: int) -> Child:
        return Child(
            f"engine-{number}",
            lambda: self._command(number),
            on_line=lambda line: self._heard(number, line),
        )

    def _command(self, number: int) -> list[str]:
        command = [sys.executable, "-m", "shoal.cli", "engine", *_PER_ENGINE_ARGS]
        command += ["--port", str(self._ports[number]), "--seed", str(number)]
        if self._model:
            command += ["--model", self._model]
        if self._has_kv_events:
            command += ["--kv-events-config", json.dumps(_KV_EVENTS), "--hash-seed", str(number)]
        return [*command, *self._extra]

    def _heard(self, number: int, line: str) -> None:
        found = _LISTENING.search(line)
        if found is None:
            return
        host, port = found[1], int(found[2])
        if self._ports[number] != port or self._addresses[number] != host:
            self._ports[number], self._addresses[number] = port, host
            self._log.info("engine listens", engine=f"engine-{number}", address=f"{host}:{port}")
            self._changed()
