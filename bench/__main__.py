"""`make bench`: what Shoal adds to a request, against direct and against a plain Envoy, in one run on this machine."""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import uvloop
from rich.console import Console
from rich.table import Table

from bench.bars.decide import arrivals, decision_times, router_of
from bench.envoy_alone import envoy_alone
from bench.ground import MODEL, backends, pool_of
from bench.processes import total_cpu_s
from shoal.hosts.load import LAG_LIMIT_S, LoadReport, engine_lag_of, run_load
from shoal.workload import unique


class Case(NamedTuple):
    """One kind of request.  chunks: of a streamed answer, 0 for a plain one."""

    name: str
    prompt_chars: int
    chunks: int
    requests: int
    concurrency: int


CASES = (
    Case("1 KB, plain answer", 1_000, 0, 3_000, 4),
    Case("400 KB, plain answer", 400_000, 0, 400, 2),
    Case("1 KB, SSE of 10 chunks", 1_000, 10, 1_500, 4),
    Case("1 KB, SSE of 1,000 chunks", 1_000, 1_000, 150, 2),
)
_ENDPOINTS = 10
_ROUNDS = 3
# Below this share of the load one round is enough: such a run is a look whether all is measured.
_WHOLE_SCALE = 0.1
_FEWEST = 8
_WIDTH = 130


class Cell(NamedTuple):
    """A case through one path: latencies in ms, CPU in microseconds per request.

    lag_ms, engine_lag_ms: loop lag p99 of the generator and of the engines.
    """

    p50_ms: float
    p99_ms: float
    envoy_us: float
    picker_us: float
    lag_ms: float
    engine_lag_ms: float
    failed: int


async def measure(
    case: Case, url: str, engine: str, envoy: Callable[[], list[int]], picker: Callable[[], list[int]]
) -> Cell:
    """Send a case along one path.  engine: address of one of the engines, which are one process."""
    headers = {"x-bench-chunks": str(case.chunks)} if case.chunks else None
    plan = unique(
        np.random.default_rng(time.time_ns()),
        requests=case.requests,
        prompt_chars=case.prompt_chars,
        concurrency=case.concurrency,
    )
    before = total_cpu_s(envoy()), total_cpu_s(picker())
    report: LoadReport = await run_load(plan, url, model=MODEL, stream=bool(case.chunks), headers=headers)
    engine_lag_s = await engine_lag_of(engine)
    await asyncio.sleep(0.2)
    after = total_cpu_s(envoy()), total_cpu_s(picker())
    envoy_us, picker_us = ((b - a) / case.requests * 1e6 for a, b in zip(before, after, strict=True))
    return Cell(
        report.e2e_p50_s * 1e3,
        report.e2e_p99_s * 1e3,
        envoy_us,
        picker_us,
        report.lag_p99_s * 1e3,
        engine_lag_s * 1e3,
        report.failed,
    )


async def paths(scale: float) -> dict[str, dict[str, Cell]]:
    """Every case along every path, rounds in turn so that a drift of the machine hits all; medians of the rounds."""
    rows: dict[str, dict[str, list[Cell]]] = {case.name: {} for case in CASES}
    with backends(_ENDPOINTS) as addresses:
        async with envoy_alone(addresses) as (plain_url, plain_pid), pool_of(addresses) as pool:
            ways = (
                ("direct", f"http://{addresses[0]}", list, list),
                ("envoy", plain_url, lambda: [plain_pid], list),
                ("shoal", pool.url, lambda: pool.envoys, lambda: pool.pickers),
            )
            for turn in range((_ROUNDS if scale >= _WHOLE_SCALE else 1) + 1):
                for case in CASES:
                    share = scale / (10 if turn == 0 else 1)
                    sized = case._replace(requests=max(_FEWEST, int(case.requests * share)))
                    for name, url, envoy, picker in ways:
                        cell = await measure(sized, url, addresses[0], envoy, picker)
                        if turn:
                            rows[case.name].setdefault(name, []).append(cell)
    return {case: {way: _median(cells) for way, cells in ways.items()} for case, ways in rows.items()}


def _median(cells: list[Cell]) -> Cell:
    p50, p99, envoy, picker = (float(np.median([cell[i] for cell in cells])) for i in range(4))
    lag_ms, engine_lag_ms = max(cell.lag_ms for cell in cells), max(cell.engine_lag_ms for cell in cells)
    return Cell(p50, p99, envoy, picker, lag_ms, engine_lag_ms, sum(cell.failed for cell in cells))


def decisions(scale: float) -> dict[str, dict[str, float]]:
    """Decision time of the default profile by fleet size, in microseconds."""
    made = {}
    for endpoints in (4, 100, 1_000):
        times = decision_times(router_of(endpoints), max(300, int(3_000 * scale))).handled * 1e6
        made[str(endpoints)] = {"p50_us": float(np.median(times)), "p99_us": float(np.quantile(times, 0.99))}
    return made


def index_bytes_per_entry(scale: float) -> float:
    """Bytes that the index says it holds per (endpoint, block)."""
    router = router_of(4)
    for i, arrived in enumerate(arrivals(max(2_000, int(20_000 * scale)), shared=0)):
        router.handle(arrived, 1.0 + i * 0.001)
    status = router.status()
    return status.index_bytes / max(1, status.index_entries)


def tables(cells: dict[str, dict[str, Cell]], made: dict[str, dict[str, float]], entry_bytes: float) -> Iterable[Table]:
    """What was measured, for people."""
    overhead = Table(title="What Shoal adds to a request: against direct, and over a plain Envoy with round-robin")
    for name in ("", "added p50", "added p99", "Envoy CPU", "picker CPU", "over Envoy: p50", "p99", "CPU"):
        overhead.add_column(name, justify="left" if not name else "right")
    for case, ways in cells.items():
        ours, direct, plain = ways["shoal"], ways["direct"], ways["envoy"]
        overhead.add_row(
            case,
            f"{ours.p50_ms - direct.p50_ms:.2f} ms",
            f"{ours.p99_ms - direct.p99_ms:.2f} ms",
            f"{ours.envoy_us:,.0f} us",
            f"{ours.picker_us:,.0f} us",
            f"{ours.p50_ms - plain.p50_ms:+.2f} ms",
            f"{ours.p99_ms - plain.p99_ms:+.2f} ms",
            f"{ours.envoy_us + ours.picker_us - plain.envoy_us:+,.0f} us",
        )
    yield overhead
    decided = Table(title="One decision, default profile")
    for name in ("endpoints", "p50", "p99"):
        decided.add_column(name, justify="right")
    for endpoints, times in made.items():
        decided.add_row(endpoints, f"{times['p50_us']:,.0f} us", f"{times['p99_us']:,.0f} us")
    decided.caption = f"index: {entry_bytes:.1f} bytes per (endpoint, block)"
    yield decided


def void_of(lag_ms: float, engine_lag_ms: float) -> str:
    """Why the figures mean nothing, "" when they do: loop lag p99 of the generator and of the engines, in ms."""
    late = {"the load generator": lag_ms, "the engines": engine_lag_ms}
    named = [f"{who} ran late (loop lag p99 {ms:.1f} ms)" for who, ms in late.items() if ms > LAG_LIMIT_S * 1e3]
    return " and ".join(named)


def main(argv: list[str] | None = None) -> int:
    """Measure, print and write; 1 when requests failed."""
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the full load (1.0)")
    parser.add_argument("--json", type=Path, default=Path(".bench/bench.json"), help="where the figures go")
    arguments = parser.parse_args(argv)
    cells = uvloop.run(paths(arguments.scale))
    made, entry_bytes = decisions(arguments.scale), index_bytes_per_entry(arguments.scale)
    console = Console(width=max(_WIDTH, Console().width))  # cells do not wrap, in a pipe either
    for table in tables(cells, made, entry_bytes):
        console.print(table)
    every = [cell for ways in cells.values() for cell in ways.values()]
    lag_ms, engine_lag_ms = max(cell.lag_ms for cell in every), max(cell.engine_lag_ms for cell in every)
    failed = sum(cell.failed for cell in every)
    if why := void_of(lag_ms, engine_lag_ms):
        console.print(f"[yellow]void: {why}; use an idle machine")
    if failed:
        console.print(f"[red]{failed} requests failed")
    written: dict[str, Any] = {
        "cases": {case: {way: cell._asdict() for way, cell in ways.items()} for case, ways in cells.items()},
        "decisions": made,
        "index_bytes_per_entry": entry_bytes,
        "lag_p99_ms": lag_ms,
        "engine_lag_p99_ms": engine_lag_ms,
        "is_void": bool(void_of(lag_ms, engine_lag_ms)),
        "failed": failed,
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(written, indent=1) + "\n")
    console.print(f"written to {arguments.json}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
