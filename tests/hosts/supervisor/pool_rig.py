"""A real `shoal up` as a child process, for end-to-end tests."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import httpx
import psutil

from shoal.hosts.admin import PoolClient

T = TypeVar("T")


class Pool:
    """One running pool.  url: its public endpoint."""

    def __init__(self, directory: Path, flags: Sequence[str]) -> None:
        self.run_dir = directory / "run"
        self.log = directory / "up.log"
        command = [sys.executable, "-m", "shoal.cli", "up", "--port", "0", "--metrics-port", "0"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--run-dir", str(self.run_dir), *flags], stdout=log, stderr=log, start_new_session=True
            )
        self.url = ""
        self.client = PoolClient(self.run_dir)

    def wait_ready(self, timeout_s: float = 90.0) -> None:
        """Return when the ready line was printed."""
        found = until(lambda: re.search(r"^shoal is ready: (\S+)", self.said(), re.MULTILINE), timeout_s, self.said)
        assert found is not None
        self.url = found[1]

    def said(self) -> str:
        """Everything it printed."""
        return self.log.read_text(errors="replace")

    def family(self) -> list[psutil.Process]:
        """The supervisor and all below it."""
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self.process.pid)
            return [parent, *parent.children(recursive=True)]
        return []

    def envoy_pid(self) -> int:
        """The process id of its Envoy."""
        return next(each.pid for each in self.family() if each.name().startswith("envoy"))

    def chat(self, text: str = "hello", tokens: int = 4, request_id: str = "") -> httpx.Response:
        """One plain chat request."""
        headers = {"x-request-id": request_id} if request_id else {}
        return httpx.post(f"{self.url}/v1/chat/completions", json=body(text, tokens), headers=headers, timeout=60.0)

    def carrier_pids(self) -> set[int]:
        """The processes through which the bytes of clients go."""
        named = {each.pid for each in self.family() if each.name().startswith("envoy")}
        return named or {each.pid for each in self.client.picture().workers if each.pid is not None}

    def end(self) -> None:
        """Take it down, whatever state it is in."""
        family = self.family()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20.0)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(20.0)
        for each in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()


def body(text: str, tokens: int = 4, stream: bool = False) -> dict[str, object]:
    """The body of a chat request to the embedded engines' model."""
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": stream,
    }


def until(condition: Callable[[], T], timeout_s: float = 60.0, why: Callable[[], str] = lambda: "") -> T:
    """Return the first true value of `condition`."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {why()}"
        time.sleep(0.02)
    return value


def is_gone(pid: int) -> bool:
    """Whether a process has ended (a zombie has)."""
    try:
        os.kill(pid, 0)
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except (OSError, psutil.NoSuchProcess):
        return True
