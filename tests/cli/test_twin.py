"""`shoal twin run` and `compare`: what they print and write, alone and in several processes, whole and interrupted."""

import io
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from pyarrow import parquet as pq

from shoal.cli import main
from shoal.cli.twin_jobs import Job, Progress, Search, Work, run_jobs
from shoal.simulation import Run
from shoal.simulation.regret import REFERENCE, with_regret

ROUND_ROBIN = str(Path(__file__).parents[2] / "examples/policies/round-robin.yaml")
SMALL = "workload: {shape: agents, sessions: 6, turns: [2, 4]}\nseeds: [1, 2]\n"


@pytest.fixture
def small(tmp_path: Path) -> str:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return str(path)


def ended(words: list[str]) -> object:
    """The status with which the words end, also where the parser exits."""
    try:
        return main(words)
    except SystemExit as exit_:
        return exit_.code


def test_policies_are_compared_on_the_same_arrivals(
    small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = tmp_path / "found.json"
    words = ["twin", "compare", small, "--policy", "default", "--policy", ROUND_ROBIN, "--json", str(found)]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "Against default, %" in shown
    assert "round-robin" in shown
    runs = json.loads(found.read_text())["runs"]
    assert [(run["policy"], run["seed"]) for run in runs] == [
        (policy, seed) for policy in ("default", ROUND_ROBIN) for seed in (1, 2)
    ]
    assert [run["requests"] for run in runs[:2]] == [run["requests"] for run in runs[2:]]


def test_several_processes_find_what_one_does(small: str, tmp_path: Path) -> None:
    files = [tmp_path / "one.json", tmp_path / "two.json"]
    for jobs, path in zip("12", files, strict=True):
        assert main(["twin", "run", small, "--load", "2,6", "--jobs", jobs, "--json", str(path)]) == 0
    one, two = (json.loads(path.read_text()) for path in files)
    assert one["runs"] == two["runs"]
    assert [(run["load"], run["seed"]) for run in one["runs"]] == [(2.0, 1), (2.0, 2), (6.0, 1), (6.0, 2)]
    assert one["load_unit"] == "clients"


def test_one_run_shows_tenants_and_endpoints_and_writes_tables(
    small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "tables"
    assert main(["twin", "run", small, "--seed", "1", "--parquet", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "ENDPOINT" in shown
    assert "requests waiting" in shown
    assert pq.read_table(folder / "requests.parquet").num_rows >= 12


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--load", "0"], "above 0"),
        (["--load", "1.5"], "clients"),
        (["--load", "x"], "numbers"),
        (["--jobs", "0"], "--jobs: must be at least 1"),
        (["--json", "/nowhere/x.json"], "no directory /nowhere"),
        (["--report", "/"], "directory"),
        (["--parquet", ROUND_ROBIN], "is a file"),
    ],
)
def test_what_cannot_be_is_said_before_the_first_run(
    small: str, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(["twin", "run", small, *words]) == 2
    assert said in capsys.readouterr().err


def test_the_error_of_aggregate_engines_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "large.yaml"
    path.write_text(SMALL + "fleet: [{count: 3, mode: aggregate}, {count: 1}]\n")
    found = tmp_path / "found.json"
    assert main(["twin", "run", str(path), "--every-step", "--json", str(found)]) == 0
    out = capsys.readouterr().out
    assert "Against default, every step, %" in out
    runs = json.loads(found.read_text())["runs"]
    ttft = {run["policy"]: run["ttft_mean_s"] for run in runs}
    assert ttft["default"] == pytest.approx(ttft["default, every step"], rel=0.01)
    path.write_text(SMALL)
    assert ended(["twin", "run", str(path), "--every-step"]) != 0
    assert "mode: aggregate" in capsys.readouterr().err


def test_without_pyarrow_tables_are_refused_with_what_to_install(
    small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert main(["twin", "run", small, "--parquet", str(tmp_path / "t")]) == 2
    assert "pip install 'shoal[twin]'" in capsys.readouterr().err


def test_the_reference_has_a_row_and_each_policy_its_regret(
    small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / "one.json", tmp_path / "two.json"]
    page = tmp_path / "page.html"
    words = ["twin", "compare", small, "--load", "2,6", "--policy", "default", "--policy", ROUND_ROBIN]
    for jobs, path in zip("12", files, strict=True):
        searched = ["--reference", "--trials", "8", "--jobs", jobs, "--json", str(path), "--report", str(page)]
        assert main([*words, *searched]) == 0
    shown = capsys.readouterr().out
    assert "regret %" in shown
    assert "is no policy" in shown
    assert "nobody can deploy it" in page.read_text()
    one, two = (json.loads(path.read_text()) for path in files)
    assert one["runs"] == two["runs"]
    assert one["trials"] == 8
    assert not one["is_partial"]
    rows = [(row["policy"], row["load"]) for row in one["comparison"]]
    policies = ("default", ROUND_ROBIN, REFERENCE)
    assert rows == [(policy, load) for load in (2.0, 6.0) for policy in policies]
    assert REFERENCE not in one["policies"]
    regrets = {row["policy"]: row["figures"]["regret"]["mean"] for row in one["comparison"] if row["load"] == 6.0}
    assert regrets[REFERENCE] == 0.0 <= regrets["default"]
    assert regrets[ROUND_ROBIN] > 0.0


def test_without_a_reference_nobody_speaks_of_regret(small: str, tmp_path: Path) -> None:
    page, found = tmp_path / "page.html", tmp_path / "found.json"
    words = ["--seed", "1", "--report", str(page), "--json", str(found), "--policy", "default"]
    assert main(["twin", "compare", small, *words]) == 0
    assert "egret" not in page.read_text()
    assert json.loads(found.read_text())["runs"][0]["regret_ratio"] is None


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--trials", "0"], "above 0"), (["--trials", "x"], "whole number"), (["--every-step"], "leave --every-step out")],
)
def test_a_search_that_cannot_be_is_refused(
    small: str, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(["twin", "compare", small, "--policy", "default", "--reference", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.fixture
def hears_interrupts() -> Iterator[None]:
    """A shell starts what it runs in the background deaf to SIGINT, and Python then leaves it so."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("hears_interrupts")
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_ctrl_c_leaves_what_there_is_and_says_so(
    tmp_path: Path, jobs: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(all_jobs: Sequence[Job], at_once: int, progress: Progress) -> tuple[list[Run], bool]:
        def told(runs: float, requests: int) -> None:
            progress(runs, requests)
            if requests > 200:
                signal.raise_signal(signal.SIGINT)

        return run_jobs(all_jobs, at_once, told)

    monkeypatch.setattr("shoal.cli.twin_jobs.run_jobs", interrupted)
    long = tmp_path / "long.yaml"
    long.write_text("workload: {shape: multi-turn, sessions: 2000}\nseeds: [1, 2, 3, 4]\n")
    found = tmp_path / "found.json"
    assert main(["twin", "run", str(long), "--jobs", jobs, "--json", str(found)]) == 130
    shown = capsys.readouterr()
    assert f"interrupted: 0 of 4 runs were done, {jobs} in part" in shown.err
    assert "TTFT" in shown.out
    data = json.loads(found.read_text())
    assert data["is_partial"]
    assert [run["is_partial"] for run in data["runs"]] == [True] * int(jobs)
    assert all(0 < run["requests"] < 8000 for run in data["runs"])


@pytest.mark.usefixtures("hears_interrupts")
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_ctrl_c_in_the_search_leaves_the_policies_whole(
    small: str, tmp_path: Path, jobs: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(work: Sequence[Work], at_once: int, progress: Progress) -> tuple[list[Run], bool]:
        def told(runs: float, requests: int) -> None:
            progress(runs, requests)
            if isinstance(work[0], Search) and requests > 200:
                signal.raise_signal(signal.SIGINT)

        return run_jobs(work, at_once, told)

    monkeypatch.setattr("shoal.cli.twin_jobs.run_jobs", interrupted)
    found = tmp_path / "found.json"
    words = ["--policy", "default", "--reference", "--trials", "100000", "--jobs", jobs, "--json", str(found)]
    assert main(["twin", "compare", small, *words]) == 130
    shown = capsys.readouterr()
    assert f"interrupted: 2 of 4 runs were done, {jobs} in part" in shown.err
    assert "regret" not in shown.out
    data = json.loads(found.read_text())
    assert [run["is_partial"] for run in data["runs"]] == [False, False, *[True] * int(jobs)]
    assert [run["requests"] for run in data["runs"][2:]] == [run["requests"] for run in data["runs"][: int(jobs)]]


def test_a_narrow_terminal_gets_whole_numbers_of_fewer_figures() -> None:
    from rich.console import Console

    from shoal.cli.twin_tables import show
    from tests.report.runs import made

    runs = [made(policy, seed, slower=slower) for policy, slower in (("a", 1.0), ("b", 2.0)) for seed in (1, 2)]
    shown = {}
    for width in (80, 160):
        console = Console(width=width, record=True, file=io.StringIO())
        show(console, runs, "clients")
        shown[width] = console.export_text()
        assert "…" not in shown[width]
        assert all(len(line) <= width for line in shown[width].splitlines())
    assert "TTFT p99 ms" in shown[160]
    assert "±" in shown[160].split("Against")[0]
    assert "TTFT p99 ms" not in shown[80]
    assert "TTFT p95 ms" in shown[80]


def test_a_narrow_terminal_has_slos_and_regret_in_the_place_of_what_matters_less() -> None:
    from rich.console import Console

    from shoal.cli.twin_tables import show
    from tests.report.runs import made

    runs = [made(policy, slower=slower, slo_s=0.1) for policy, slower in (("a", 1.0), ("b", 2.0), (REFERENCE, 0.9))]
    console = Console(width=80, record=True, file=io.StringIO())
    show(console, with_regret(runs), "clients")
    head, *rows = console.export_text().splitlines()[:5]
    assert " ".join(head.split()) == "POLICY requests TTFT p50 ms TTFT p95 ms hit % SLO met % regret % failed"
    assert rows[0].startswith("a ")
    assert "11.1" in rows[0]


def test_the_reference_places_no_prefills(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "split.yaml"
    path.write_text("workload: {shape: hot, requests: 4}\nfleet: [{role: prefill}, {role: decode}]\n")
    assert ended(["twin", "compare", str(path), "--policy", "default", "--reference"]) == 2
    assert "leave it out for engines with roles" in capsys.readouterr().err
