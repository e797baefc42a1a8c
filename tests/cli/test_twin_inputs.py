"""`shoal twin` with names and files that go wrong: a line that says so, or the name as it is, and no traceback."""

import io
import tarfile
from pathlib import Path

import pytest

from bench.bars.twin_fit import journal_of
from shoal.cli import main
from shoal.engine import find_profile

ODD = "a[/x]b"


@pytest.fixture
def policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a file with a closing tag of rich in it."""
    monkeypatch.chdir(tmp_path)
    name = "odd[/]x.yaml"
    Path("odd[").mkdir()
    Path("odd[", "]x.yaml").write_text("apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n")
    return name


def test_names_with_markup_are_shown_as_they_are(
    tmp_path: Path, policy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(
        "workload: {shape: agents, sessions: 8, turns: [2, 3]}\nseeds: [1]\n"
        f"tenants: {{'{ODD}': {{}}, other: {{}}}}\n"
    )
    assert main(["twin", "run", str(path)]) == 0
    assert ODD in capsys.readouterr().out
    path.write_text("workload: {shape: agents, sessions: 4, turns: [2, 3]}\nseeds: [1]\n")
    Path("[red]x.yaml").write_text(Path(policy).read_text())
    assert main(["twin", "compare", str(path), "--policy", "[red]x.yaml", "--policy", "default"]) == 0
    shown = capsys.readouterr().out
    assert "Against [red]x" in shown
    assert "\n[red]x " in shown
    path.write_text(
        "workload: {shape: agents, sessions: 4, turns: [2, 3]}\n"
        "arrivals: {kind: poisson, rate_per_s: 4}\nseeds: [1]\nfleet: [{profile: h100-8b}]\n"
    )
    assert main(["twin", "size", str(path), "--slo", "e2e_p95=30m", "--policy", policy]) == 0
    assert policy in capsys.readouterr().out


def test_a_replay_shows_odd_names_and_keeps_its_own_rows(
    tmp_path: Path, policy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = tmp_path / "picker-0.journal"
    journal.write_bytes(journal_of(find_profile("h100-8b"), 3, 20)[0])
    words = ["twin", "replay", str(journal), "--profile", "h100-8b"]
    assert main([*words, "--config", policy]) == 0
    assert policy in capsys.readouterr().out
    (tmp_path / "recorded").write_text("")
    assert main([*words, "--config", "recorded"]) == 2
    assert "write ./recorded" in capsys.readouterr().err
    assert main([*words, "--config", "./recorded"]) == 0
    assert "./recorded" in capsys.readouterr().out


@pytest.mark.parametrize("mode", ["w:gz", "w:xz", "w"])
def test_an_archive_that_is_not_whole_is_one_line(
    tmp_path: Path, mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode=mode) as archive:  # type: ignore[call-overload]
        for number in range(40):
            member = tarfile.TarInfo(f"{number}.json")
            member.size = 4096
            archive.addfile(member, io.BytesIO(bytes((number * n * n) % 251 for n in range(4096))))
    traces = tmp_path / "traces.tar"
    traces.write_bytes(packed.getvalue()[: len(packed.getvalue()) // 2 + 100])
    path = tmp_path / "x.yaml"
    path.write_text(f"workload: {{shape: trace, format: claude-code, path: {traces}}}\nseeds: [1]\n")
    assert main(["twin", "run", str(path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"shoal: {traces}: the archive is damaged or not whole")


def test_a_date_that_is_none_is_an_error_of_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, profile = tmp_path / "x.yaml", tmp_path / "p.yaml"
    path.write_text("name: 2020-13-45\n")
    assert main(["twin", "run", str(path)]) == 2
    assert str(path) in capsys.readouterr().err
    profile.write_text("kind: EngineProfile\nname: 2020-13-45\n")
    path.write_text(f"workload: {{shape: hot}}\nfleet: [{{profile: {profile}}}]\n")
    assert main(["twin", "run", str(path)]) == 2
    assert f"{profile}:2: cannot be read: month" in capsys.readouterr().err


def test_a_file_that_is_no_journal_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "picker-0.journal").write_bytes(journal_of(find_profile("h100-8b"), 3, 20)[0])
    (tmp_path / "zzz.journal").write_text("no journal")
    for verb in ("replay", "fit"):
        assert main(["twin", verb, str(tmp_path)]) == 2
        assert f"{tmp_path}/zzz.journal: not a Shoal journal" in capsys.readouterr().err
