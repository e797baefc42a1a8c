"""Figures of runs are what their samples say."""

import math
from typing import Any

import pytest

from shoal.simulation.results import Sample, columns, summarise

NONE = math.nan


def sample(ttft_s: float = 0.1, tpot_s: float = 0.02, **changed: Any) -> Sample:
    plain = Sample(1.0, ttft_s, tpot_s, ttft_s + 1.0, 100, 40, 10, "e0", "", False)
    return plain._replace(**changed)


FAILED = sample(NONE, NONE, endpoint="", is_failed=True, output_tokens=0, cached_tokens=0)


def test_nothing_has_figures_too() -> None:
    result = summarise([], ["e0"], 0.0)
    assert (result.requests, result.failed, result.ttft_p95_s, result.slo_ratio) == (0, 0, 0.0, 1.0)
    assert result.tenants == {}


def test_parts_add_up_to_the_whole_and_failures_belong_to_no_endpoint() -> None:
    samples = [
        sample(tenant="a"),
        sample(0.3, tenant="b", endpoint="e1", prompt_tokens=500, cached_tokens=0),
        FAILED._replace(tenant="b"),
    ]
    result = summarise(samples, ["e0", "e1", "e2"], 2.0)
    assert (result.requests, result.failed) == (3, 1)
    assert result.served == {"e0": 1, "e1": 1, "e2": 0}
    assert {name: (part.requests, part.failed) for name, part in result.tenants.items()} == {"a": (1, 0), "b": (2, 1)}
    assert set(result.endpoints) == {"e0", "e1"}
    # Work: 100 - 40 + 10 of a, 500 + 10 of b.
    assert result.tenants["a"].token_share == pytest.approx(70 / 580)
    assert result.hit_ratio == pytest.approx(40 / 600)
    assert result.requests_per_s == 1.0
    assert result.imbalance == 1.5


def test_an_slo_is_met_by_those_who_asked_and_were_served_in_time() -> None:
    samples = [
        sample(0.1, slo_ttft_s=0.2),
        sample(0.3, slo_ttft_s=0.2),
        sample(0.1, 0.05, slo_ttft_s=0.2, slo_tpot_s=0.03),
        sample(0.1, NONE, slo_tpot_s=0.03),  # one token has no time per token
        FAILED._replace(slo_ttft_s=0.2),
        sample(9.0),
    ]
    result = summarise(samples, ["e0"], 1.0)
    assert (result.slo_requests, result.slo_ratio) == (5, 2 / 5)
    assert result.tenants[""].slo_ratio == 2 / 5


def test_columns_keep_rows_in_order_and_names_apart() -> None:
    table = columns([sample(session="b"), FAILED._replace(session="a"), sample(session="b")])
    assert [table.session.names[code] for code in table.session.codes] == ["b", "a", "b"]
    assert [table.endpoint.names[code] for code in table.endpoint.codes] == ["e0", "", "e0"]
    assert table.is_failed.tolist() == [False, True, False]
    assert len(columns([])) == 0
