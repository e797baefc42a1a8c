"""The page on choosing a policy works as it is written."""

import json
import re
import shlex
from pathlib import Path

import pytest

from shoal.cli import main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/howto-choose-a-policy.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.M | re.S)


@pytest.mark.timeout(400)
def test_every_command_of_the_page_does_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for text in blocks("yaml"):
        name = text.split("\n", 1)[0].removeprefix("# ")
        (tmp_path / name).write_text(text)
    commands = [line for block in blocks("sh") for line in block.splitlines()]
    assert len(commands) == 5
    for command in commands:
        program, *words = shlex.split(command)
        assert program == "shoal"
        assert main(words) == 0, command
        assert capsys.readouterr().out
    for page in ("load.html", "policies.html", "mine.html"):
        assert "Load of each endpoint" in (tmp_path / page).read_text()
    rows = json.loads((tmp_path / "policies.json").read_text())["comparison"]
    spread = {row["policy"]: row["figures"] for row in rows if row["load"] == 8.0}["examples/policies/round-robin.yaml"]
    # Shared beginnings of 6,000 tokens: who spreads evenly pays for each of them again.
    assert spread["hit"]["change"] < -spread["hit"]["change_half"]
    assert spread["ttft_p50"]["change"] > spread["ttft_p50"]["change_half"]
