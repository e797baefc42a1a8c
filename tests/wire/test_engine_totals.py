"""Totals out of the metrics pages of vLLM and SGLang: sums and buckets of histograms, of all ranks together."""

import math
from pathlib import Path

import pytest

from shoal.kernel import InvalidInput
from shoal.wire.engine_totals import read_totals

GOLDEN = Path(__file__).parent / "golden"
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


SGLANG = b"""\
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{tp_rank="0"} 2.0
# TYPE sglang:time_to_first_token_seconds histogram
sglang:time_to_first_token_seconds_sum{is_streaming="false"} 0.5
sglang:time_to_first_token_seconds_count{is_streaming="false"} 2.0
sglang:time_to_first_token_seconds_sum{is_streaming="true"} 0.25
sglang:time_to_first_token_seconds_count{is_streaming="true"} 1.0
# TYPE sglang:e2e_request_latency_seconds histogram
sglang:e2e_request_latency_seconds_sum{is_streaming="false"} 3.0
sglang:e2e_request_latency_seconds_count{is_streaming="false"} 2.0
sglang:e2e_request_latency_seconds_sum{is_streaming="true"} 1.0
sglang:e2e_request_latency_seconds_count{is_streaming="true"} 1.0
# TYPE sglang:prompt_tokens_total counter
sglang:prompt_tokens_total{is_streaming="false"} 166.0
sglang:prompt_tokens_total{is_streaming="true"} 18.0
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{is_streaming="true"} 15.0
# TYPE sglang:cached_tokens_total counter
sglang:cached_tokens_total{cache_source="device"} 64.0
# TYPE sglang:cuda_graph_passes_total counter
sglang:cuda_graph_passes_total{mode="prefill_none",tp_rank="0"} 3.0
sglang:cuda_graph_passes_total{mode="decode_full",tp_rank="0"} 12.0
# TYPE sglang:queue_time_seconds histogram
sglang:queue_time_seconds_sum{tp_rank="0"} 0.125
sglang:queue_time_seconds_count{tp_rank="0"} 3.0
# TYPE sglang:per_stage_req_latency_seconds histogram
sglang:per_stage_req_latency_seconds_sum{stage="request_process",tp_rank="0"} 9.0
sglang:per_stage_req_latency_seconds_sum{stage="prefill_forward",tp_rank="0"} 0.5
sglang:per_stage_req_latency_seconds_sum{stage="chunked_prefill",tp_rank="0"} 0.0625
"""


def test_sglang_counts_the_same_under_other_names() -> None:
    totals = read_totals(SGLANG)
    assert (totals.requests, totals.running) == (3.0, 2.0)
    assert (totals.first_s, totals.queue_s, totals.prefill_s, totals.decode_s) == (0.75, 0.125, 0.5625, 3.25)
    assert (totals.prompt_tokens, totals.computed_tokens, totals.output_tokens) == (184.0, 120.0, 15.0)
    assert (totals.steps, totals.prefills, totals.is_mixed) == (15.0, 3.0, False)
    later = SGLANG.replace(b'"prefill_none",tp_rank="0"} 3.0', b'"prefill_none",tp_rank="0"} 8.0')
    since = read_totals(later).since(totals)
    assert (since.steps, since.prefills, since.requests, since.is_mixed) == (5.0, 5.0, 0.0, False)


@pytest.mark.parametrize("family", ["cuda_graph_passes_total", "queue_time_seconds", "per_stage_req_latency_seconds"])
def test_what_a_page_of_sglang_lacks_is_named(family: str) -> None:
    with pytest.raises(InvalidInput, match=f"no sglang:{family}.*, which SGLang's has"):
        read_totals(SGLANG.replace(family.encode(), b"other"))


def test_a_page_of_a_real_sglang_is_read() -> None:
    totals = read_totals((GOLDEN / "sglang-0.5-metrics.txt").read_bytes())
    assert (totals.requests, totals.prompt_tokens, totals.computed_tokens) == (3.0, 184.0, 120.0)
    assert (totals.prefills, totals.steps) == (3.0, 15.0)
    assert totals.prompts[100.0] == 3.0
    assert 0 < totals.prefill_s < totals.first_s
    assert totals.decode_s > 0
