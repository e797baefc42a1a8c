"""`shoal twin fit`: from a journal to a profile that the twin and the embedded engine take."""

import json
from pathlib import Path

import pytest

from bench.bars.twin_fit import journal_of
from shoal.cli import main
from shoal.cli.profiles import profile_named
from shoal.engine import find_profile


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("journal")
    (folder / "picker-0.journal").write_bytes(journal_of(find_profile("a100-8b"), 3, 120)[0])
    return folder


def test_a_journal_becomes_a_profile_that_experiments_take(
    journal: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, figures = tmp_path / "ours.yaml", tmp_path / "fit.json"
    words = ["twin", "fit", str(journal), "--name", "ours", "--out", str(ours), "--json", str(figures)]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "reading the weights" in shown
    assert "held out" in shown
    assert profile_named(str(ours), "--profile").name == "ours"
    assert json.loads(figures.read_text())["e2e"]["median"] < 0.05
    experiment = tmp_path / "x.yaml"
    experiment.write_text(
        "workload: {shape: agents, sessions: 4, turns: [2, 3]}\nfleet: [{count: 2, profile: ours.yaml}]\nseeds: [1]\n"
    )
    report = tmp_path / "x.html"
    assert main(["twin", "run", str(experiment), "--report", str(report)]) == 0
    assert "2 × ours" in report.read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--endpoint", "gpu-9"], "no endpoint 'gpu-9'; there are e0, e1"),
        (["--base", "h999"], "unknown profile 'h999'"),
        (["--base", "nowhere.yaml"], "cannot be read"),
        (["--max-num-seqs", "-1"], "--base: max_num_seqs must be above 0, up to 1e+24, got -1"),
        (["--out", "/nowhere/x.yaml"], "no directory /nowhere"),
    ],
)
def test_flags_that_cannot_be_are_refused(
    journal: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["twin", "fit", str(journal), *words]) == 2
    assert said in capsys.readouterr().err
