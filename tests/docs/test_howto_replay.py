"""The page on incidents, tried as written."""

import json
import re
import shlex
from pathlib import Path

import pytest

from bench.bars.twin_fit import journal_of
from shoal.cli import main
from shoal.engine import find_profile
from shoal.routing.config import load

PAGE = (Path(__file__).parents[2] / "docs/howto-replay-an-incident.md").read_text()
ROUND_ROBIN = Path(__file__).parents[2] / "examples/policies/round-robin.yaml"


def test_its_commands_end_well_and_say_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (journal,) = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.M | re.S)
    assert load(journal, "page").pool.journal.path == "/var/lib/shoal/journal"
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal/picker-0.journal").write_bytes(journal_of(find_profile("a100-8b"), 3, 100)[0])
    (tmp_path / "new.yaml").write_text(ROUND_ROBIN.read_text())
    monkeypatch.chdir(tmp_path)
    first, second = re.findall(r"^shoal (twin replay .*)$", PAGE, re.M)
    assert main(shlex.split(first.replace("/var/lib/shoal/", "") + " --profile a100-8b")) == 0
    assert "The twin is off from what was recorded by" in capsys.readouterr().out
    assert main(shlex.split(second.replace("/var/lib/shoal/", ""))) == 0
    assert "would have gone elsewhere" in capsys.readouterr().out
    found = json.loads(Path("found.json").read_text())
    assert list(found["runs"]) == ["recorded", "twin, as recorded", "default", "new.yaml"]
    assert found["moves"]["default"]["elsewhere"] == 0 < found["moves"]["new.yaml"]["elsewhere"]
