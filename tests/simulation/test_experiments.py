"""The experiments that the documentation names run as they stand."""

from pathlib import Path

import pytest

from shoal.cli import main
from shoal.routing.config import load
from shoal.simulation import read_experiment

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("path", sorted((EXAMPLES / "twin").glob("*.yaml")), ids=lambda path: path.name)
def test_every_example_reads(path: Path) -> None:
    assert read_experiment(path.read_text(), path.name).name == path.stem


@pytest.mark.parametrize("path", sorted((EXAMPLES / "policies").glob("*.yaml")), ids=lambda path: path.name)
def test_every_policy_loads(path: Path) -> None:
    assert load(path.read_text(), path.name).policy is not None


def test_policies_are_compared_on_the_same_arrivals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    experiment = tmp_path / "small.yaml"
    experiment.write_text("workload: {shape: agents, sessions: 6, turns: [2, 4]}\nseeds: [1, 2]\n")
    policy = str(EXAMPLES / "policies/round-robin.yaml")
    found = tmp_path / "found.json"
    assert (
        main(["twin", "compare", str(experiment), "--policy", "default", "--policy", policy, "--json", str(found)]) == 0
    )
    shown = capsys.readouterr().out
    assert "default" in shown
    assert "round-robin" in shown
    import json

    results = json.loads(found.read_text())["results"]
    assert [run["requests"] for run in results["default"]] == [run["requests"] for run in results[policy]]


def test_a_missing_file_is_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["twin", "run", "nowhere.yaml"]) == 2
    assert "nowhere.yaml: cannot be read" in capsys.readouterr().err
