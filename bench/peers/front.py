"""A router at work in front of backends: started, asked until it answers, and taken down."""

import asyncio
import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from bench.peers.catalog import Peer, Place
from bench.peers.install import NotInstalled, program_of, version_of
from bench.processes import descendants
from bench.prompts import Prompts
from bench.sender import send
from shoal.hosts.supervisor.leash import leash
from shoal.hosts.supervisor.ports import free_port

READY_WITHIN_S = 45.0
_TRIES_IN_A_ROW = 8


class Failed(Exception):
    """A router did not start, or did not answer; says why."""


class Front(NamedTuple):
    """A router that answers.  parts: its processes, by what they are called in the table; their sum is all of it."""

    name: str
    version: str
    flags: str
    url: str
    parts: dict[str, Callable[[], list[int]]]

    def pids(self) -> list[int]:
        """Every process of it."""
        return [pid for pids in self.parts.values() for pid in pids()]


@asynccontextmanager
async def running(peer: Peer, addresses: Sequence[str], wait_s: float = READY_WITHIN_S) -> AsyncIterator[Front]:
    """Run a peer in front of `addresses`; yields it when it has answered several requests.

    Raises Failed when it does not within `wait_s`, or cannot be had at all.
    """
    try:
        program = await asyncio.to_thread(program_of, peer)
    except NotInstalled as error:
        raise Failed(str(error)) from error
    with tempfile.TemporaryDirectory(prefix="shoal-peer-", ignore_cleanup_errors=True) as directory:
        place = Place(free_port(), free_port(), Path(directory))
        log = Path(directory) / "log"
        with log.open("wb") as out:
            child = subprocess.Popen(
                peer.words(program, place, addresses),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=directory,
                # They look for tokenizers on the network; none is needed for what is measured.
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
                start_new_session=True,
                preexec_fn=leash(),
            )
        url = f"http://127.0.0.1:{place.port}"
        try:
            await _answers(url, child, log, wait_s)
            parts = {"all": lambda: [child.pid, *descendants(child.pid)]}
            yield Front(peer.name, version_of(peer, program), " ".join(peer.flags), url, parts)
        finally:
            await asyncio.to_thread(_end, child)


async def _answers(url: str, child: "subprocess.Popen[bytes]", log: Path, wait_s: float) -> None:
    """Return when it has answered every endpoint's share of a few requests.  Raises Failed."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + wait_s
    errors: dict[str, int] = {}
    while loop.time() < deadline:
        if child.poll() is not None:
            raise Failed(f"ended with status {child.returncode}: {_tail(log)}")
        sent = await send(url, Prompts("peer.test", 200), connections=1, requests=_TRIES_IN_A_ROW)
        if sent.ok == _TRIES_IN_A_ROW:
            return
        errors = sent.errors
        await asyncio.sleep(0.3)
    raise Failed(f"did not answer within {wait_s:.0f} s ({errors}): {_tail(log)}")


def _tail(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][-200:] if lines else "it said nothing"


def _end(child: "subprocess.Popen[bytes]") -> None:
    """Take down the process, and what it started with it."""
    child.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(5)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # its session is its own
    child.wait(10)
