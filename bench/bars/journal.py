"""What the journal costs, and that it replays."""

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import uvloop

from bench.bars.cpu import large, small
from bench.bars.registry import Figure, bar
from bench.ground import pool_of_engines
from shoal.hosts.load import run_load
from shoal.workload import multi_turn

_JOURNALED = """\
apiVersion: shoal.dev/v1alpha1
kind: Pool
journal:
  path: {directory}
"""


@contextmanager
def _journaling() -> Iterator[tuple[Path, list[str]]]:
    """A directory for journals, and the flags of `shoal up` that fill it."""
    with tempfile.TemporaryDirectory(prefix="shoal-journal-") as root:
        directory, config = Path(root) / "journal", Path(root) / "config.yaml"
        directory.mkdir()
        config.write_text(_JOURNALED.format(directory=directory))
        yield directory, ["--config", str(config)]


def _added(measure: Callable[[float, Sequence[str]], Figure], scale: float) -> Figure:
    """Median of three pairs of runs, off and on in turn."""
    rows: list[tuple[float, float]] = []
    for _ in range(3):
        with _journaling() as (directory, flags):
            off = measure(scale / 2, ())
            on = measure(scale / 2, flags)
            if off.void or on.void:
                return Figure(value=float("nan"), void=off.void or on.void)
            if not any(path.stat().st_size for path in directory.rglob("*") if path.is_file()):
                return Figure(value=float("nan"), void="no journal was written")
            rows.append((off.value, on.value))
    return Figure(value=float(np.median([on - off for off, on in rows])), details={"off_on_us": rows})


@bar("router.journal-small", "what the journal adds to a small request", unit="us", at_most=40)
def _small(scale: float) -> Figure:
    return _added(small, scale)


@bar("router.journal-400k", "what the journal adds to a 400 KB request", unit="us", at_most=300)
def _large(scale: float) -> Figure:
    return _added(large, scale)


@bar("router.journal-replay", "journals of a live run that `shoal replay` does not reproduce", at_most=0)
def _replay(scale: float) -> Figure:
    async def record(flags: list[str]) -> int:
        plan = multi_turn(
            np.random.default_rng(3), chats=max(8, int(64 * scale)), turns=4, system_chars=4_000, concurrency=16
        )
        async with pool_of_engines(2, flags) as pool:
            report = await run_load(plan, pool.url, model=await pool.stage.model())
            await asyncio.sleep(0.5)
            await pool.stage.stop()
        return report.failed

    with _journaling() as (directory, flags):
        failed = uvloop.run(record(flags))
        journals = sorted(path for path in directory.rglob("*") if path.is_file())
        outputs = [
            subprocess.run(
                [sys.executable, "-m", "shoal.cli", "replay", str(path)], capture_output=True, text=True, check=False
            )
            for path in journals
        ]
        differing = sum(output.returncode != 0 for output in outputs)
        void = "" if journals and not failed else f"{len(journals)} journals, {failed} requests failed"
        tails = [(output.stdout + output.stderr)[-200:] for output in outputs]
        return Figure(value=float(differing), void=void, details={"journals": len(journals), "said": tails})
