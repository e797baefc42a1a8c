"""`shoal endpoint`."""

import pytest

from shoal.cli import main
from shoal.hosts.supervisor.orders import EndpointOrder
from tests.cli.fake_pool import FakePool


def test_add_and_remove_reach_the_pool(pool: FakePool, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["endpoint", "add", "http://10.0.0.9:8000", *pool.flags]) == 0
    assert main(["endpoint", "remove", "b", *pool.flags]) == 0
    assert pool.operations.asked == ["add http://10.0.0.9:8000", "remove b"]
    assert "added 10.0.0.9:8000" in capsys.readouterr().out


def test_adding_the_same_again_says_which_id_it_has(pool: FakePool, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert main(["endpoint", "add", "http://10.0.0.9:8000", *pool.flags]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[1:] == ["http://10.0.0.9:8000 is in the pool already, as 10.0.0.9:8000"]


def test_the_pool_may_be_named_before_the_operation(pool: FakePool) -> None:
    assert main(["endpoint", *pool.flags, "add", "http://10.0.0.9:8000"]) == 0
    assert pool.operations.asked == ["add http://10.0.0.9:8000"]


def test_drain_waits_until_the_endpoint_has_left(pool: FakePool, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["endpoint", "drain", "a", *pool.flags]) == 0
    assert pool.answers.readings >= 4
    assert "drained a: its requests have ended" in capsys.readouterr().out


def test_drain_without_waiting_returns_at_once(pool: FakePool, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["endpoint", "drain", "a", "--no-wait", *pool.flags]) == 0
    assert pool.answers.readings == 0
    assert "draining a" in capsys.readouterr().out


def test_a_drain_that_takes_too_long_says_how_many_are_left(pool: FakePool, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["endpoint", "drain", "a", "--timeout", "0", *pool.flags]) == 1
    assert "still has 2 request(s) in flight" in capsys.readouterr().err


def test_an_unknown_endpoint_is_one_line_with_the_known_ones(
    pool: FakePool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["endpoint", "drain", "nobody", *pool.flags]) == 2
    assert capsys.readouterr().err == "shoal: no endpoint 'nobody'; known: a, b\n"


def test_orders_to_engines_reach_the_pool_with_their_flags(pool: FakePool, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["endpoint", "pause", "a", "--mode", "wait", "--timeout", "7", *pool.flags]) == 0
    assert main(["endpoint", "resume", "--all", *pool.flags]) == 0
    assert main(["endpoint", "reset", "--label", "role=decode", "--label", "rack=1", "--running", *pool.flags]) == 0
    assert pool.operations.orders == [
        EndpointOrder(op="pause", id="a", mode="wait", timeout_s=7.0),
        EndpointOrder(op="resume", all=True),
        EndpointOrder(op="reset", labels={"role": "decode", "rack": "1"}, running=True),
    ]
    assert capsys.readouterr().out.splitlines() == [
        "paused a: no new requests go there",
        "resumed a: requests go there again",
        "resumed b: requests go there again",
        "reset a: its prefix cache is empty",
        "reset b: its prefix cache is empty",
    ]


def test_an_order_that_one_engine_did_not_carry_out_ends_with_1_and_its_reason(
    pool: FakePool, capsys: pytest.CaptureFixture[str]
) -> None:
    pool.operations.problems = {"b": "/reset_prefix_cache answered HTTP 404"}
    assert main(["endpoint", "reset", "--all", *pool.flags]) == 1
    said = capsys.readouterr()
    assert said.out == "reset a: its prefix cache is empty\n"
    assert said.err == "shoal: b: /reset_prefix_cache answered HTTP 404\n"


@pytest.mark.parametrize("words", [["pause"], ["pause", "a", "--all"], ["reset", "--label", "x"]])
def test_an_order_to_nobody_or_to_too_many_says_how_to_name_them(
    words: list[str], pool: FakePool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["endpoint", *words, *pool.flags]) == 2
    assert "--label" in capsys.readouterr().err
    assert pool.operations.orders == []
