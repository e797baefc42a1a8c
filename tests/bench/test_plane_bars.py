"""The bars of the direct plane in short forms: behaviours must hold on any machine, however busy.

How fast anything is does not matter here, only that each figure is made of what it is said to be made of.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

import pytest

from bench.bars import plane_cpu, plane_faults, plane_gaps, plane_memory, plane_peers, plane_same
from bench.bars.plane_same import differing, stayed
from bench.bars.registry import BARS, Figure
from bench.peers import Failed, Peer, Row

ENVOY: Sequence[str] = ()
Test = TypeVar("Test", bound=Callable[..., None])


def live(test: Test) -> Test:
    """Mark a test that runs real processes."""
    marked: Test = pytest.mark.e2e(pytest.mark.timeout(300)(test))
    return marked


@live
def test_cpu_is_counted_per_request_that_was_answered() -> None:
    figure = plane_cpu.small(0.05)
    assert figure.void == ""
    assert 20 < figure.value < 1e6
    assert len(figure.details["rounds_us"]) == 3
    assert min(figure.details["requests_per_s"]) > 0


@live
def test_a_chunk_costs_less_than_a_request() -> None:
    figure = plane_cpu.chunk(0.01, rounds=1)
    assert figure.void == ""
    assert figure.value < 5_000
    # One read for many chunks is cheaper than one for each.
    assert figure.details["us"]["worker, unpaced"] < figure.value


def test_without_nginx_the_ratio_is_short_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(peer: Peer, addresses: Sequence[str]) -> AbstractAsyncContextManager[None]:
        raise Failed(f"{peer.name} is not on the PATH")

    monkeypatch.setattr(plane_cpu, "running", absent)
    figure = plane_cpu.against_nginx(0.01)
    assert not BARS["direct.cpu-vs-nginx"].is_met(figure)
    assert (figure.void, figure.why) == ("", "nginx is not on the PATH")


@live
def test_latency_is_what_the_router_adds() -> None:
    figure = plane_gaps.single(0.1)
    assert figure.void == ""
    assert all(routed > bare for bare, routed in figure.details["p50_ms"])


@live
def test_an_engine_that_dies_in_prefill_costs_the_direct_plane_nothing() -> None:
    figure = plane_faults.kill_prefill(0.16)
    assert figure.void == "", figure.details
    assert figure.details["in_prefill"][figure.details["killed"]] >= 8
    assert figure.value == 0.0, figure.details


@live
def test_the_bar_sees_what_envoy_loses_with_such_an_engine() -> None:
    figure = plane_faults.kill_prefill(0.16, ENVOY)
    assert figure.void == "", figure.details
    assert set(figure.details["failures"]) == {"cut, head and no body"}, figure.details


@live
def test_a_stream_that_lasts_is_read_to_its_end() -> None:
    figure = plane_faults.long_stream(0.0)
    assert (figure.value, figure.why) == (0.0, ""), figure.details
    assert min(figure.details["lasted_s"]) > 5.5


@live
def test_idle_connections_stay_open_while_they_are_counted() -> None:
    figure = plane_memory.idle(0.05)
    assert (figure.void, figure.why) == ("", "")
    assert figure.value < 1e3


@live
def test_half_sent_bodies_stay_within_their_budget_and_small_requests_pass() -> None:
    figure = plane_memory.half_bodies(0.1)
    assert (figure.void, figure.why) == ("", "")
    assert figure.value <= 1.0, figure.details
    assert sum(figure.details["statuses"].values()) == 100
    assert figure.details["statuses"]["429"] > 50


@live
def test_both_planes_tell_and_decide_the_same() -> None:
    figure = plane_same.same(0.25)
    assert (figure.value, figure.void) == (0.0, ""), figure.details
    assert figure.details["other_seed"] > 0


def test_sequences_differ_where_one_has_what_the_other_has_not() -> None:
    assert differing("abc", "abc") == 0
    assert differing("abc", "axc") == 1
    assert differing("abc", "a") == 2
    assert stayed(["a", "a", "a", "b", "c", "c", "c", "c"]) == pytest.approx(5 / 6)


def peers_that_cost(monkeypatch: pytest.MonkeyPatch, *rows: Row) -> Figure:
    async def survey(scale: float, **_: Any) -> list[Row]:
        return list(rows)

    monkeypatch.setattr(plane_peers, "survey", survey)
    return plane_peers.peers(1.0)


def row(name: str, us: float) -> Row:
    return Row(name, large_us={"worker": us / 2, "rest": us / 2})


def test_the_cheapest_peer_is_the_one_to_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    figure = peers_that_cost(monkeypatch, row("shoal, direct", 90.0), row("a", 100.0), row("b", 60.0))
    assert figure.value == pytest.approx(1.5)
    assert not BARS["direct.peers"].is_met(figure)


def test_a_peer_that_failed_is_not_beaten_but_said(monkeypatch: pytest.MonkeyPatch) -> None:
    figure = peers_that_cost(monkeypatch, row("shoal, direct", 90.0), row("a", 100.0), Row("b", failed="no worker"))
    assert figure.value == pytest.approx(0.9)
    assert figure.why == "b failed: no worker"


def test_ahead_of_nobody_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    figure = peers_that_cost(monkeypatch, row("shoal, direct", 90.0), Row("a", failed="no index"))
    assert not BARS["direct.peers"].is_met(figure)
    assert figure.void == ""
    assert "no index" in figure.why


def test_a_plane_that_does_not_start_makes_the_comparison_void(monkeypatch: pytest.MonkeyPatch) -> None:
    figure = peers_that_cost(monkeypatch, Row("shoal, direct", failed="unknown flag"), row("a", 100.0))
    assert "unknown flag" in figure.void
