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


def test_a_missing_file_is_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["twin", "run", "nowhere.yaml"]) == 2
    assert "nowhere.yaml: cannot be read" in capsys.readouterr().err
