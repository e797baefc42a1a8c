"""Flag values that several verbs share: refused in one line before anything runs."""

import argparse
from pathlib import Path

import pytest

from shoal.cli import flags, main
from shoal.hosts.supervisor.options import MAX_ENGINES, MAX_WORKERS, Options
from shoal.kernel import ConfigError

EXPERIMENT = "workload: {shape: multi-turn, sessions: 2}\nseeds: [1]\n"


@pytest.mark.parametrize(
    "words",
    [
        ["up", "--engines", "1"],
        ["engine"],
        ["picker"],
        ["demo"],
        ["twin", "run", "x.yaml"],
        ["twin", "compare", "x.yaml"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("wrong", ["-1", str(2**63), "x"])
def test_a_seed_that_is_none_is_refused_by_each_verb(
    words: list[str], wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*words, f"--seed={wrong}"])
    assert ended.value.code == 2
    assert f"argument --seed: must be a whole number of 0 to 2**63 - 1, not '{wrong}'" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["up", "picker"])
@pytest.mark.parametrize("wrong", ["-1", "nan", "inf", "soon"])
def test_a_drain_time_that_is_none_is_refused(verb: str, wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([verb, f"--drain-timeout={wrong}"])
    assert ended.value.code == 2
    meant = "must be 0 or more and finite, not 'X'" if wrong != "soon" else "'X' is no duration; write 30s, 500ms or 2m"
    assert f"argument --drain-timeout: {meant.replace('X', wrong)}" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "seconds"), [("30", 30.0), ("30s", 30.0), ("500ms", 0.5), ("2m", 120.0), ("0", 0.0)])
def test_durations_have_units(text: str, seconds: float) -> None:
    assert flags.seconds(text) == seconds


def test_a_seed_reaches_as_far_as_it_says() -> None:
    assert flags.seed("0") == 0
    assert flags.seed(str(2**63 - 1)) == 2**63 - 1
    with pytest.raises(argparse.ArgumentTypeError):
        flags.seed("1.5")


def test_a_slip_of_the_finger_does_not_fill_the_machine_with_processes() -> None:
    Options(engines=MAX_ENGINES, workers=MAX_WORKERS).check()
    with pytest.raises(ConfigError, match=f"--workers: must be 1 to {MAX_WORKERS}"):
        Options(engines=1, workers=MAX_WORKERS + 1).check()
    with pytest.raises(ConfigError, match=f"--engines: must be at most {MAX_ENGINES}"):
        Options(engines=MAX_ENGINES + 1).check()


@pytest.mark.parametrize("words", [["demo"], ["twin", "run", "experiment.yaml"]], ids=" ".join)
def test_a_report_that_cannot_be_written_is_said_before_the_run(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "experiment.yaml").write_text(EXPERIMENT)
    nowhere = tmp_path / "nowhere"
    assert main([*words, "--json", str(nowhere / "report.json")]) == 2
    said = capsys.readouterr()
    assert said.err == f"shoal: {nowhere / 'report.json'}: cannot be written: there is no directory {nowhere}\n"
    assert said.out == ""
    assert main([*words, "--json", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"shoal: {tmp_path}: is a directory; name a file\n"


def test_a_report_that_fails_at_the_end_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written: "):
        flags.write_report(tmp_path, b"{}")


def test_a_seed_in_an_experiment_is_held_to_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "experiment.yaml"
    file.write_text(EXPERIMENT.replace("[1]", "[-1]"))
    assert main(["twin", "run", str(file)]) == 2
    assert "Expected `int` >= 0 - at `$.seeds[0]`" in capsys.readouterr().err
