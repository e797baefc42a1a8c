"""`shoal explain`."""

import json

import pytest
from rich.console import Console

from shoal.cli import main
from shoal.cli.explain import candidates_table, ending, head
from tests.cli.fake_pool import EXPLANATION, FakePool


def test_the_explanation_shows_each_scorers_value_weight_and_the_choice(
    pool: FakePool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "mine-1", *pool.flags]) == 0
    page = capsys.readouterr().out
    lines = page.splitlines()
    chosen = next(line for line in lines if line.startswith("=>"))
    assert chosen.split() == ["=>", "b", "4,096", "1.000", "=", "2.000", "0.500", "=", "0.500", "2.500"]
    assert next(line for line in lines if line.startswith("2.")).split()[1] == "a"
    assert "value x 2" in page
    assert "label-selector-filter dropped 1" in page
    assert "chosen b, after 1.5 ms in the queue; fallbacks a" in page
    assert "ttft 58.0 ms" in page
    assert "cached tokens: 4,096 expected, 4,080 reported" in page


def test_an_unknown_request_is_said_to_be_unknown_with_the_picker_that_was_silent(
    pool: FakePool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "other", *pool.flags]) == 1
    err = capsys.readouterr().err
    assert "no picker remembers request 'other'" in err
    assert "refused before it was placed" in err
    assert err.count("\n") == 2
    assert "picker 1 did not answer" in err


def test_json_holds_what_the_picker_said(pool: FakePool, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "ab12-7", "--json", *pool.flags]) == 0
    assert json.loads(capsys.readouterr().out)["found"][0]["chosen"] == ["b", "a"]


def test_among_equal_totals_the_chosen_one_stands_first() -> None:
    alike: list[dict[str, object]] = [
        {"id": name, "total": 1.5, "matched_tokens": 0, "scores": {}} for name in ("a", "b", "c")
    ]
    console = Console(width=160)
    with console.capture() as captured:
        console.print(candidates_table({"weights": {}, "candidates": alike, "chosen": ["c", "b"]}))
    rows = captured.get().splitlines()[-3:]
    assert [row.split()[:2] for row in rows] == [["=>", "c"], ["2.", "b"], ["a", "0"]]


def test_a_server_that_gave_no_answer_did_not_serve() -> None:
    assert "served by b: status 404" in ending({**EXPLANATION, "status": 404})
    assert "failed on b: status 503" in ending({**EXPLANATION, "status": 503})


def test_exact_tokens_are_not_called_an_estimate() -> None:
    assert "prompt tokens (by its exact tokens)" in head({**EXPLANATION, "is_exact": True})
    assert "prompt tokens (estimated before dispatch)" in head({**EXPLANATION, "is_exact": False})
