"""`shoal replay`: what it says of files that it cannot replay."""

from pathlib import Path

import pytest

from shoal.cli import main, replay
from shoal.pool import Api, Endpoint, EndpointState, Request, ServedModel
from shoal.routing import Arrived, Ticked
from shoal.routing.commands import Hold
from shoal.routing.events import EndpointChanged, EndpointJoined, ModelsSeen
from shoal.routing.journal import MAGIC, Opening, Step, encode


def test_a_file_that_cannot_be_replayed_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other"
    other.write_text("not a journal")
    for path, reason in (
        (tmp_path / "nope", "cannot be read: No such file or directory"),
        (tmp_path, "has no file that ends in .journal"),
        (other, "not a Shoal journal: the file does not begin with its magic line"),
    ):
        assert main(["replay", str(path)]) == 2
        assert capsys.readouterr().err == f"shoal: {path}: {reason}\n"


def test_the_help_is_for_users(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["replay", "--help"])
    page = capsys.readouterr().out
    assert "Owns" not in page
    assert "examples:" in page


def write(path: Path, *steps: Step, part: int = 0, run: str = "run") -> Path:
    path.write_bytes(MAGIC + b"".join([encode(Opening(1, "", False, part, run)), *map(encode, steps)]))
    return path


def test_all_parts_together_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = [str(write(tmp_path / f"{n}.journal", Step(float(n), Ticked(), []), part=n)) for n in range(2)]
    size = (tmp_path / "0.journal").stat().st_size
    monkeypatch.setattr(replay, "MAX_JOURNAL_BYTES", 2 * size)
    assert main(["replay", *parts]) == 0
    monkeypatch.setattr(replay, "MAX_JOURNAL_BYTES", 2 * size - 1)
    assert main(["replay", *parts]) == 2
    assert "1.journal: is larger than" in (said := capsys.readouterr().err)
    assert "together with the files before it" in said


@pytest.mark.parametrize(
    ("step", "says"),
    [
        (Step(float("nan"), Ticked(), []), "step 1 of the journal has no time"),
        (Step(float("inf"), Ticked(), []), "step 1 of the journal has no time"),
        (Step(1.0, Arrived(Request(id="r", api=Api.CHAT, model="m"), b"cut"), []), "step 4: no router can take it"),
    ],
)
def test_a_step_that_no_router_can_take_is_one_line(
    step: Step, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (
        EndpointJoined(Endpoint(id="e", address="10.0.0.1:80")),
        ModelsSeen("e", (ServedModel(id="m"),)),
        EndpointChanged("e", EndpointState.READY),
    )
    steps = [Step(0.0, event, []) for event in before if isinstance(step.event, Arrived)]
    assert main(["replay", str(write(tmp_path / "a.journal", *steps, step))]) == 2
    assert says in capsys.readouterr().err


def test_a_folder_is_replayed_run_by_run_whatever_the_order_of_its_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for part in range(12):
        suffix = f".{part}" if part else ""
        write(tmp_path / f"picker-0-aa{suffix}.journal", Step(float(part), Ticked(), []), part=part, run="aa")
    joined = EndpointJoined(Endpoint(id="e", address="10.0.0.1:80"))
    write(tmp_path / "picker-1-bb.journal", Step(0.0, joined, []), run="bb")
    assert main(["replay", str(tmp_path)]) == 0
    said = capsys.readouterr().out.replace("\n", "")
    assert "picker-0-aa.journal: 12 steps, every command the same" in said
    assert "picker-1-bb.journal: 1 steps, every command the same" in said
    write(tmp_path / "picker-2-cc.journal", Step(0.0, Ticked(), [Hold("r", 0, 0)]), run="cc")
    assert main(["replay", str(tmp_path)]) == 1
    assert "picker-2-cc.journal: step 1 at 0.000000 s differs" in capsys.readouterr().out.replace("\n", "")
    (tmp_path / "picker-0-aa.3.journal").unlink()
    assert main(["replay", str(tmp_path)]) == 2
    assert "part 4 of its run, and part 3 is not among the files" in capsys.readouterr().err
