"""Totals out of vLLM's metrics page: sums and buckets of histograms, of all ranks together."""

import math

import pytest

from shoal.kernel import InvalidInput
from shoal.wire.engine_totals import read_totals

_FAMILIES = (
    "time_to_first_token_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_prompt_tokens",
    "request_prefill_kv_computed_tokens",
    "request_generation_tokens",
    "iteration_tokens_total",
)


def page(*engines: tuple[str, float], without: str = "", has_types: bool = True) -> bytes:
    """A page with each histogram at `count` and the sum of ten times that, for each engine."""
    lines = []
    for family in _FAMILIES:
        if family == without:
            continue
        if has_types:
            lines += [f"# HELP vllm:{family} Of {family}.", f"# TYPE vllm:{family} histogram"]
        for engine, count in engines:
            label = f'engine="{engine}",model_name="m"'
            lines += [
                f'vllm:{family}_bucket{{engine="{engine}",le="8.0",model_name="m"}} {count / 2}',
                f'vllm:{family}_bucket{{engine="{engine}",le="+Inf",model_name="m"}} {count}',
                f"vllm:{family}_count{{{label}}} {count}",
                f"vllm:{family}_sum{{{label}}} {count * 10}",
            ]
    if has_types:
        lines.append("# TYPE vllm:num_requests_running gauge")
    lines += [f'vllm:num_requests_running{{engine="{engine}"}} 3.0' for engine, _ in engines]
    return "\n".join([*lines, ""]).encode()


@pytest.mark.parametrize("has_types", [True, False])
def test_sums_counts_and_buckets_are_read_and_ranks_add_up(has_types: bool) -> None:
    totals = read_totals(page(("0", 40.0), ("1", 2.0), has_types=has_types))
    assert (totals.requests, totals.steps, totals.step_tokens, totals.running) == (42.0, 42.0, 420.0, 6.0)
    assert totals.sizes == {8.0: 21.0, math.inf: 42.0}
    assert totals.prompts == totals.sizes


def test_what_came_between_two_pages_is_the_difference_but_of_what_runs() -> None:
    since = read_totals(page(("0", 40.0))).since(read_totals(page(("0", 10.0))))
    assert (since.requests, since.first_s, since.running) == (30.0, 300.0, 3.0)
    assert since.sizes == {8.0: 15.0, math.inf: 30.0}


def test_a_family_that_is_missing_is_named() -> None:
    with pytest.raises(InvalidInput, match="no vllm:iteration_tokens_total_sum"):
        read_totals(page(("0", 1.0), without="iteration_tokens_total"))


@pytest.mark.parametrize("bound", ["x", "", "nan"])
def test_a_bucket_whose_bound_is_no_number_is_passed_over(bound: str) -> None:
    text = page(("0", 40.0))
    assert read_totals(text.replace(b'le="8.0"', f'le="{bound}"'.encode())).sizes == {math.inf: 40.0}
