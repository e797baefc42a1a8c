"""A bar is met, short or void, and the register knows every one that is promised."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.bars.__main__ import main
from bench.bars.books import GAUGES, in_flight
from bench.bars.registry import BARS, Bar, Figure, bar
from bench.ground import backends_file, sum_of
from bench.processes import command_of, cpu_s, descendants, rss_bytes

PROMISED = (
    "router.cpu-small",
    "router.cpu-400k",
    "router.cpu-stream",
    "router.journal-small",
    "router.journal-400k",
    "router.journal-replay",
    "router.decide-1000",
    "router.decide-100",
    "router.streams-5000",
    "demo.ttft",
    "demo.throughput",
    "demo.seconds",
    "shapes.ttft-p50",
    "shapes.ttft-p95",
    "shapes.hot-imbalance",
    "shapes.multi-turn-time",
    "shapes.zipf-time",
    "index.million",
    "books.cancel",
    "kill.engine",
    "kill.picker",
    "router.disconnect",
    "restart.imbalance",
)
PROMISED_OF_THE_DIRECT_PLANE = (
    "direct.cpu-small",
    "direct.cpu-vs-nginx",
    "direct.cpu-16k",
    "direct.cpu-400k",
    "direct.cpu-chunk",
    "direct.gap-p99",
    "direct.latency-1",
    "direct.kill-prefill",
    "direct.long-stream",
    "direct.disconnect",
    "direct.idle-10k",
    "direct.half-bodies",
    "direct.same-decisions",
    "direct.peers",
)


def made(value: float, *, void: str = "", floor: bool = False) -> Bar:
    return Bar(
        id="x", part=1, text="", unit="", limit=10.0, is_floor=floor, measure=lambda _: Figure(value=value, void=void)
    )


@pytest.mark.parametrize(
    ("value", "floor", "is_met"),
    [(9.0, False, True), (10.0, False, True), (10.1, False, False), (10.0, True, True), (9.9, True, False)],
)
def test_a_limit_is_a_ceiling_or_a_floor(value: float, floor: bool, is_met: bool) -> None:
    each = made(value, floor=floor)
    assert each.is_met(each.measure(1.0)) is is_met


def test_a_void_figure_or_no_number_meets_nothing() -> None:
    assert not made(1.0).is_met(Figure(value=1.0, void="late"))
    assert not made(1.0).is_met(Figure(value=float("nan")))


def test_a_bar_needs_exactly_one_limit() -> None:
    with pytest.raises(ValueError, match="either"):
        bar("both", "", at_most=1.0, at_least=1.0)
    with pytest.raises(ValueError, match="either"):
        bar("none", "")


@pytest.mark.parametrize(("part", "promised"), [(1, PROMISED), (2, PROMISED_OF_THE_DIRECT_PLANE)])
def test_every_promise_has_a_bar(part: int, promised: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--part", str(part)]) == 0
    assert sorted(each.id for each in BARS.values() if each.part == part) == sorted(promised)
    assert capsys.readouterr().out.count("\n") == len(promised)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[float]]:
    """Replace two real bars by ones that return given figures; the list tells the scales they were asked with."""
    main(["--list"])
    asked: list[float] = []

    def put(**figures: Figure) -> list[float]:
        for id, figure in figures.items():

            def measure(scale: float, figure: Figure = figure) -> Figure:
                asked.append(scale)
                return figure

            fake = Bar(id=id, part=77, text="fake", unit="us", limit=10.0, is_floor=False, measure=measure)
            monkeypatch.setitem(BARS, id, fake)
        return asked

    return put


def test_a_met_bar_exits_zero_and_writes_its_figure(
    fakes: Callable[..., list[float]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = fakes(good=Figure(value=3.0, details={"n": 1}))
    path = tmp_path / "deep" / "bars.json"
    assert main(["PART=77", "--wait-idle", "0", "--scale", "0.5", "--json", str(path)]) == 0
    assert asked == [0.5]
    assert " ok " in capsys.readouterr().out
    written = json.loads(path.read_text())["good"]
    assert (written["value"], written["is_met"], written["scale"]) == (3.0, True, 0.5)


def test_one_short_bar_fails_the_run(
    fakes: Callable[..., list[float]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fakes(good=Figure(value=3.0), bad=Figure(value=30.0))
    assert main(["--part", "77", "--wait-idle", "0", "--json", str(tmp_path / "b.json")]) == 1
    out = capsys.readouterr().out
    assert "bad" in out
    assert "short" in out


def test_a_void_run_is_measured_again_and_then_counts_as_not_met(
    fakes: Callable[..., list[float]], tmp_path: Path
) -> None:
    asked = fakes(late=Figure(value=3.0, void="loop lag"))
    assert main(["--part", "77", "--wait-idle", "0", "--json", str(tmp_path / "b.json")]) == 1
    assert len(asked) == 2


def test_a_measurement_that_raises_is_a_failure_and_the_others_still_run(
    fakes: Callable[..., list[float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes(good=Figure(value=3.0))

    def burst(scale: float) -> Figure:
        raise RuntimeError("no envoy")

    monkeypatch.setitem(
        BARS, "burst", Bar(id="burst", part=77, text="", unit="", limit=1.0, is_floor=False, measure=burst)
    )
    path = tmp_path / "b.json"
    assert main(["--part", "77", "--wait-idle", "0", "--json", str(path)]) == 1
    written = json.loads(path.read_text())
    assert written["good"]["is_met"]
    assert "no envoy" in written["burst"]["void"]


def test_a_run_of_one_bar_keeps_the_figures_of_the_others(fakes: Callable[..., list[float]], tmp_path: Path) -> None:
    fakes(one=Figure(value=1.0), two=Figure(value=2.0))
    path = tmp_path / "b.json"
    main(["--part", "77", "--wait-idle", "0", "--id", "one", "--json", str(path)])
    main(["--part", "77", "--wait-idle", "0", "--id", "tw*", "--json", str(path)])
    assert {"one", "two"} <= set(json.loads(path.read_text()))


def test_a_run_that_is_cut_short_keeps_what_it_has_measured(
    fakes: Callable[..., list[float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes(good=Figure(value=3.0))

    def cut(scale: float) -> Figure:
        raise KeyboardInterrupt

    last = Bar(id="last", part=77, text="", unit="", limit=1.0, is_floor=False, measure=cut)
    monkeypatch.setitem(BARS, "last", last)
    path = tmp_path / "b.json"
    with pytest.raises(KeyboardInterrupt):
        main(["--part", "77", "--wait-idle", "0", "--json", str(path)])
    assert json.loads(path.read_text())["good"]["is_met"]


def test_an_unknown_id_is_told(tmp_path: Path) -> None:
    assert main(["--id", "nothing.such", "--json", str(tmp_path / "b.json")]) == 2


def test_samples_of_a_metrics_page_are_summed_by_name() -> None:
    text = (
        "# TYPE llm_d_epp_inflight_requests gauge\n"
        'llm_d_epp_inflight_requests{endpoint_name="a"} 2.0\n'
        'llm_d_epp_inflight_requests{endpoint_name="b"} 3.0\n'
        "llm_d_epp_request_running 1\n"
        "llm_d_epp_request_running_total 99\n"
    )
    assert sum_of(text, "llm_d_epp_inflight_requests") == 5.0
    assert in_flight(text)["llm_d_epp_request_running"] == 1.0
    assert tuple(in_flight(text)) == GAUGES


def test_a_backends_file_names_every_address() -> None:
    assert backends_file(["127.0.0.1:1", "127.0.0.1:2"]) == ("- url: http://127.0.0.1:1\n- url: http://127.0.0.1:2\n")


def test_cpu_and_memory_of_this_process_are_read_from_proc() -> None:
    before, began = cpu_s(os.getpid()), time.process_time()
    while time.process_time() - began < 0.1:
        pass
    spent = cpu_s(os.getpid()) - before
    assert 0.07 < spent < 0.5
    assert rss_bytes(os.getpid()) > 1_000_000


def test_a_process_that_is_gone_costs_nothing() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert (cpu_s(child.pid), rss_bytes(child.pid), command_of(child.pid)) == (0.0, 0, [])


def test_children_are_found_by_their_command_line() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()", "marked"], stdin=subprocess.PIPE)
    try:
        mine = [pid for pid in descendants(os.getpid()) if "marked" in command_of(pid)]
        assert mine == [child.pid]
    finally:
        child.communicate()
