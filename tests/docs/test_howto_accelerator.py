"""The page on accelerators, tried as written: its files are read and its commands end well."""

import re
import shlex
from pathlib import Path

import pytest

from bench.bars.twin_fit import journal_of
from shoal.cli import main
from shoal.engine import find_profile
from shoal.engine.profilefile import parse_profile
from shoal.routing.config import load
from tests.simulation.scrapes import scrapes

PAGE = (Path(__file__).parents[2] / "docs/howto-add-an-accelerator.md").read_text()
BLOCKS = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.M | re.S)


def test_its_files_and_commands_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, profile, experiment = BLOCKS
    assert load(journal, "page").pool.journal.path == "/var/lib/shoal/journal"
    assert parse_profile(profile, "page").name == "ours"
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal/picker-0.journal").write_bytes(journal_of(find_profile("a100-8b"), 3, 100)[0])
    monkeypatch.chdir(tmp_path)
    (command, scraped, saved) = re.findall(r"^shoal (twin fit .*)$", PAGE, re.M)
    assert main(shlex.split(command.replace("/var/lib/shoal/", ""))) == 0
    assert Path("ours.yaml").exists()
    (tmp_path / "scrapes").mkdir()
    for place, (_, page) in enumerate(scrapes(find_profile("a100-8b"), 1, count=4)):
        (tmp_path / f"scrapes/{place}.txt").write_bytes(page)
    names = " ".join(f"scrapes/{place}.txt" for place in range(4))
    assert main(shlex.split(saved.replace("scrapes/*.txt", names))) == 0
    # Nobody is at that address.
    assert main(shlex.split(scraped.replace("gpu-1:8000", "127.0.0.1:1"))) == 2
    Path("x.yaml").write_text(experiment)
    assert main(["twin", "run", "x.yaml", "--seed", "1"]) == 0
