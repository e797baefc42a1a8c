"""`shoal replay`: what it says of files that it cannot replay."""

from pathlib import Path

import pytest

from shoal.cli import main, replay
from shoal.pool import Api, Endpoint, EndpointState, Request, ServedModel
from shoal.routing import Arrived, Ticked
from shoal.routing.events import EndpointChanged, EndpointJoined, ModelsSeen
from shoal.routing.journal import MAGIC, Opening, Step, encode


def test_a_file_that_cannot_be_replayed_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other"
    other.write_text("not a journal")
    for path, reason in (
        (tmp_path / "nope", "cannot be read: No such file or directory"),
        (tmp_path, "cannot be read: Is a directory"),
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


def write(path: Path, *steps: Step, part: int = 0) -> Path:
    path.write_bytes(MAGIC + b"".join([encode(Opening(1, "", False, part, "run")), *map(encode, steps)]))
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
