"""`shoal abort`."""

import pytest

from shoal.cli import main
from shoal.routing.events import SessionAborted
from tests.cli.fake_pool import FakePool


def test_a_session_is_aborted_everywhere_or_for_one_tenant(pool: FakePool, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["abort", "--session", "s-1", *pool.flags]) == 0
    assert main(["abort", "--session", "s-1", "--tenant", "team-a", *pool.flags]) == 0
    assert pool.answers.aborted == [SessionAborted("s-1"), SessionAborted("s-1", "team-a")]
    assert capsys.readouterr().out == "ended 3 requests of session s-1\nended 1 request of session s-1\n"


def test_a_picker_that_does_not_answer_is_named(pool: FakePool, capsys: pytest.CaptureFixture[str]) -> None:
    pool.answers.silent = ["1"]
    assert main(["abort", "--session", "s-1", *pool.flags]) == 1
    assert "picker 1 did not answer" in capsys.readouterr().err


def test_a_session_without_a_name_is_refused(pool: FakePool, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["abort", "--session", "", *pool.flags]) == 2
    assert capsys.readouterr().err == "shoal: name the session\n"
