"""`make bench`: a small run measures all that it names, and says when it means nothing."""

import asyncio
import json
import time
from pathlib import Path

import pytest

from bench.__main__ import CASES, Cell, main, tables, void_of
from bench.backend import serve
from shoal.hosts.load import engine_lag_of


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_a_small_run_has_every_case_along_every_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "deep" / "bench.json"
    assert main(["--scale", "0.01", "--json", str(path)]) == 0
    said = capsys.readouterr().out
    written = json.loads(path.read_text())
    assert list(written["cases"]) == [case.name for case in CASES]
    for case in CASES:
        assert case.name in said
        direct, envoy, shoal = (written["cases"][case.name][way] for way in ("direct", "envoy", "shoal"))
        assert all(0.0 < each["p50_ms"] <= each["p99_ms"] < 60_000 for each in (direct, envoy, shoal))
        assert direct["envoy_us"] == direct["picker_us"] == envoy["picker_us"] == 0.0
        # CPU is counted in ticks of 10 ms: of eight requests not every case uses one.
        assert 0.0 <= envoy["envoy_us"] < 1e6
        assert 0.0 <= shoal["picker_us"] < 1e6
    assert sum(ways["shoal"]["picker_us"] for ways in written["cases"].values()) > 0.0
    assert sum(ways["shoal"]["envoy_us"] for ways in written["cases"].values()) > 0.0
    assert list(written["decisions"]) == ["4", "100", "1000"]
    assert all(1.0 < each["p50_us"] <= each["p99_us"] < 1e6 for each in written["decisions"].values())
    assert 1.0 < written["index_bytes_per_entry"] < 1_000.0
    assert f"{written['index_bytes_per_entry']:.1f} bytes per" in said
    assert written["failed"] == 0
    lags = written["lag_p99_ms"], written["engine_lag_p99_ms"]
    assert min(lags) >= 0.0
    assert written["is_void"] == (max(lags) > 5.0) == ("void: " in said)


@pytest.mark.parametrize(
    ("lag_ms", "engine_lag_ms", "named"),
    [
        (5.0, 5.0, []),
        (5.1, 0.0, ["load generator"]),
        (0.0, 5.1, ["engines"]),
        (9.0, 8.0, ["load generator", "engines"]),
    ],
)
def test_a_run_is_void_when_the_generator_or_the_engines_ran_late(
    lag_ms: float, engine_lag_ms: float, named: list[str]
) -> None:
    said = void_of(lag_ms, engine_lag_ms)
    assert bool(said) == bool(named)
    assert all(f"{name} ran late" in said for name in named)


def test_the_table_is_of_differences() -> None:
    ways = {
        "direct": Cell(1.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0),
        "envoy": Cell(1.5, 3.0, 100.0, 0.0, 0.0, 0.0, 0),
        "shoal": Cell(2.0, 5.0, 150.0, 200.0, 0.0, 0.0, 0),
    }
    first, _ = tables({"small": ways}, {}, 1.0)
    cells = [next(iter(column.cells)) for column in first.columns]
    assert cells == [
        "small", "1.00 ms", "3.00 ms", "150 us", "200 us", "+0.50 ms", "+2.00 ms", "+250 us",
    ]  # fmt: skip


@pytest.mark.parametrize("busy_s", [0.0, 0.05])
def test_cheap_engines_say_how_late_they_run(busy_s: float) -> None:
    async def lag_s() -> float:
        async with serve(1, "m") as (site,):
            for _ in range(20):
                await asyncio.sleep(0.02)
                time.sleep(busy_s)
            return await engine_lag_of(site.address)

    found = asyncio.run(lag_s())
    assert found >= (0.03 if busy_s else 0.0)
