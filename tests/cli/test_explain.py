"""`shoal explain`."""

import json

import pytest
from rich.console import Console

from shoal.cli import main
from shoal.cli.explain import candidates_table, ending, head, refusal, wait
from tests.cli.fake_pool import EXPLANATION, REFUSED, WAITING, FakePool


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
    assert "refused before it reached the router" in err
    assert err.count("\n") == 3
    assert "picker 1 did not answer" in err
    assert "picker 0 died and was started anew: what it knew before is gone" in err


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


CROWD = "15 ahead: 3 of a in band 10, 11 of batch in band 0, 1 of others"


def test_one_that_waits_is_shown_with_its_place_and_who_is_ahead(
    pool: FakePool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "waits-1", *pool.flags]) == 0
    page = capsys.readouterr().out
    assert "tenant me, 640 prompt tokens" in page
    assert f"waits in the queue for 2.50 s, in band 0, place 16: {CROWD}" in page
    assert "CANDIDATE" not in page


def test_one_that_was_refused_is_shown_with_the_reason_its_wait_and_who_was_ahead(
    pool: FakePool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "refused-1", *pool.flags]) == 0
    page = capsys.readouterr().out
    assert "refused: rejected-ttl-expired: The request waited 31.0 s [in the queue]." in page
    assert f"waited 31.00 s in band 0; when it came {CROWD}" in page
    assert "told to come back in 4.00 s" in page
    assert "CANDIDATE" not in page


def test_a_refusal_at_once_is_called_one() -> None:
    at_once = {**REFUSED, "queue_s": 0.0, "ahead": 0, "ahead_by": [], "retry_after_s": None}
    assert refusal(at_once).splitlines()[1:] == ["refused at once"]
    assert "place 1: nobody ahead" in wait({**WAITING, "ahead": 0, "ahead_by": []})


def test_who_was_ahead_of_one_that_was_sent_is_shown_by_tenant_and_band() -> None:
    queued = {**EXPLANATION, **{name: WAITING[name] for name in ("queue_s", "ahead", "ahead_by", "priority")}}
    assert f"after 2.50 s in the queue in band 0, {CROWD} when it came" in ending(queued)
    assert "ahead" not in ending(EXPLANATION)


def test_what_a_replaced_picker_left_is_said_to_be_its() -> None:
    assert "picker 0 (replaced since)" in head({**EXPLANATION, "is_replaced": True})
    assert "replaced" not in head(EXPLANATION)


def test_what_clients_name_cannot_write_on_the_terminal() -> None:
    page = head({**EXPLANATION, "tenant": "t\x1b[2J", "model": "m\x1b]0;x\x07", "client_id": "c\x9b"})
    assert not any(letter in page for letter in "\x1b\x07\x9b")
