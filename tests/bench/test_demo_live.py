"""The demo on real processes: it shows what it promises and leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.processes import command_of, descendants

pytestmark = pytest.mark.e2e

DEMO = [sys.executable, "-m", "shoal.cli", "demo", "--chats", "12", "--turns", "2", "--engines", "2"]


def family_of(child: "subprocess.Popen[bytes]", at_least: int, wait_s: float = 60.0) -> list[int]:
    """The processes below the demo once there are so many."""
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        found = list(descendants(child.pid))
        if len(found) >= at_least:
            return found
        assert child.poll() is None, "the demo ended too early"
        time.sleep(0.05)
    raise AssertionError("the pool did not start")


def left_over(pids: list[int], wait_s: float = 15.0) -> list[list[str]]:
    """Command lines of those that still live after a while."""
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline and any(command_of(pid) for pid in pids):
        time.sleep(0.05)
    return [command_of(pid) for pid in pids if command_of(pid)]


def test_both_halves_run_without_errors_and_the_cache_is_used_more(tmp_path: Path) -> None:
    path = tmp_path / "demo.json"
    done = subprocess.run([*DEMO, "--json", str(path)], capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for word in ("TTFT p50", "prefix hit ratio", "imbalance", "shoal up --engines", "curl"):
        assert word in done.stdout
    written = json.loads(path.read_text())
    before, after = written["round-robin"], written["cache-aware"]
    assert (before["errors"], after["errors"]) == ({}, {})
    assert (before["requests"], after["requests"]) == (24, 24)
    assert after["hit_ratio"] > before["hit_ratio"]


def hear_interrupts() -> None:
    """A shell starts what it runs in the background deaf to SIGINT, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_demo_leaves_no_process_behind(number: signal.Signals) -> None:
    child = subprocess.Popen(DEMO, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=hear_interrupts)
    try:
        # supervisor, Envoy, a worker, two engines
        family = family_of(child, 5)
        os.kill(child.pid, number)
        status = child.wait(20)
        assert status == (130 if number != signal.SIGKILL else -signal.SIGKILL)
        assert left_over(family) == []
    finally:
        child.kill()
        child.wait()
