"""Work of our own family is not foreign, and a figure that falls short beside foreign work is void."""

import json
import sysconfig
import time
from pathlib import Path

import msgspec
import pytest

from bench import machine
from bench.bars.__main__ import _once, main
from bench.bars.registry import BARS, Bar, Figure
from bench.machine import Neighbours, wait_until_idle


def readings(monkeypatch: pytest.MonkeyPatch, *, foreign_cores: float, own_cores: float) -> None:
    """A machine on which others and we use so many cores at any time."""
    monkeypatch.setattr(machine, "_busy_s", lambda: time.monotonic() * (foreign_cores + own_cores))
    monkeypatch.setattr(machine, "_own_s", lambda: time.monotonic() * own_cores)


def bar_of(value: float) -> Bar:
    def measure(scale: float) -> Figure:
        time.sleep(0.02)
        return Figure(value=value)

    return Bar(id="x", part=1, text="", unit="", limit=10.0, is_floor=False, measure=measure)


def test_our_own_work_is_not_foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    readings(monkeypatch, foreign_cores=0.5, own_cores=1.5)
    watch = Neighbours()
    time.sleep(0.02)
    assert watch.cores() == pytest.approx(0.5, abs=0.1)


def test_a_short_figure_on_a_busy_machine_is_void(monkeypatch: pytest.MonkeyPatch) -> None:
    readings(monkeypatch, foreign_cores=1.5, own_cores=0.5)
    assert "other processes used 1." in _once(bar_of(11.0), 1.0).void


def test_a_short_figure_on_an_idle_machine_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    readings(monkeypatch, foreign_cores=0.0, own_cores=2.0)
    figure = _once(bar_of(11.0), 1.0)
    assert (figure.void, figure.details["foreign_cores"]) == ("", 0.0)


def test_a_figure_that_is_met_beside_other_work_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    readings(monkeypatch, foreign_cores=1.5, own_cores=0.5)
    assert _once(bar_of(9.0), 1.0).void == ""


def test_waiting_for_an_idle_machine_ends_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    readings(monkeypatch, foreign_cores=2.0, own_cores=0.0)
    began = time.monotonic()
    wait_until_idle(0.1)
    assert 0.1 <= time.monotonic() - began < 30


@pytest.mark.parametrize(
    ("arguments", "is_flawed"),
    [("'--with-lto' '--enable-optimizations'", False), ("--enable-shared", True), (None, True)],
)
def test_a_python_that_was_built_without_a_profile_is_told_apart_once(
    arguments: str | None,
    is_flawed: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sysconfig, "get_config_var", {"CONFIG_ARGS": arguments}.get)
    for name in ("one", "two"):
        monkeypatch.setitem(BARS, name, msgspec.structs.replace(bar_of(9.0), id=name, part=77))
    path = tmp_path / "bars.json"
    assert main(["--part", "77", "--wait-idle", "0", "--json", str(path)]) == 0
    assert capsys.readouterr().err.count("without profile-guided optimization") == is_flawed
    written = json.loads(path.read_text())
    assert [bool(written[name]["build_flaw"]) for name in ("one", "two")] == [is_flawed] * 2
