"""Metrics pages, with lines as real vLLM 0.32 and SGLang 0.5.23 write them."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.kernel import InvalidInput
from shoal.pool import Signals
from shoal.wire import read_signals
from shoal.wire.exposition import MAX_PAGE_BYTES

GOLDEN = Path(__file__).parent / "golden"

VLLM = b"""\
# HELP python_gc_objects_collected_total Objects collected during gc
# TYPE python_gc_objects_collected_total counter
python_gc_objects_collected_total{generation="0"} 17.0
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 3.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="tiny"} 5.0
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="deferred"} 1.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.25
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="tiny"} 4373.0
# TYPE vllm:prefix_cache_queries_created gauge
vllm:prefix_cache_queries_created{engine="0",model_name="tiny"} 1.796034006285744e+09
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{engine="0",model_name="tiny"} 192.0
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{_block_size_resolved="True",block_size="32",effective_attention_block_size="64",engine="0",\
hash_block_size="None",mamba_block_size="None",num_cpu_blocks="None",num_gpu_blocks="80",\
num_gpu_blocks_override="None",user_specified_block_size="True"} 1.0
# TYPE vllm:lora_requests_info gauge
vllm:lora_requests_info{max_lora="4",running_lora_adapters="old",waiting_lora_adapters=""} 1.7960340e+09
vllm:lora_requests_info{max_lora="4",running_lora_adapters="sql, chat",waiting_lora_adapters="law"} 1.7960341e+09
vllm:lora_requests_info{max_lora="4",running_lora_adapters="older",waiting_lora_adapters=""} 1.7960339e+09
"""

EXPECTED = Signals(
    waiting=5.0,
    running=3.0,
    kv_usage_ratio=0.25,
    block_size_tokens=32,
    num_blocks=80,
    prefix_hit_tokens=192.0,
    prefix_query_tokens=4373.0,
    running_adapters=("sql", "chat"),
    waiting_adapters=("law",),
    max_adapters=4,
)


@pytest.mark.parametrize("engine", ["vllm", "shoal", "auto", "who-knows"])
def test_a_vllm_page_is_read_by_its_real_names(engine: str) -> None:
    assert read_signals(engine, VLLM) == EXPECTED


def test_a_page_without_type_lines_reads_the_same() -> None:
    bare = b"\n".join(line for line in VLLM.split(b"\n") if not line.startswith(b"#"))
    for engine in ("vllm", "auto"):
        assert read_signals(engine, bare) == EXPECTED
        assert read_signals(engine, VLLM.replace(b"_total counter", b" counter")) == EXPECTED


def test_older_vllm_names_are_known() -> None:
    page = VLLM.replace(b"kv_cache_usage_perc", b"gpu_cache_usage_perc").replace(b":prefix_", b":gpu_prefix_")
    assert read_signals("vllm", page) == EXPECTED


def test_ranks_behind_one_address_add_up_and_the_fullest_cache_counts() -> None:
    page = (
        b"# TYPE vllm:num_requests_waiting gauge\n"
        b'vllm:num_requests_waiting{engine="0"} 2.0\nvllm:num_requests_waiting{engine="1"} 3.0\n'
        b"# TYPE vllm:kv_cache_usage_perc gauge\n"
        b'vllm:kv_cache_usage_perc{engine="0"} 0.1\nvllm:kv_cache_usage_perc{engine="1"} 0.9\n'
        b"# TYPE vllm:cache_config_info gauge\n"
        b'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1.0\n'
        b'vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="100"} 1.0\n'
    )
    signals = read_signals("vllm", page)
    assert (signals.waiting, signals.kv_usage_ratio, signals.num_blocks) == (5.0, 0.9, 200)


def test_what_is_missing_or_not_a_number_is_unknown_and_never_zero() -> None:
    assert read_signals("vllm", b"") == Signals()
    assert read_signals("auto", b"<html>not metrics</html>") == Signals()
    page = VLLM.replace(b"} 5.0", b"} NaN").replace(b"} 0.25", b"} NaN").replace(b'"80"', b'"None"')
    signals = read_signals("vllm", page)
    assert (signals.waiting, signals.kv_usage_ratio, signals.num_blocks) == (None, None, None)
    assert signals.running == 3.0
    half = b'vllm:num_requests_waiting{engine="0"} 2.0\nvllm:num_requests_waiting{engine="1"} NaN\n'
    assert read_signals("vllm", half).waiting is None
    assert read_signals("vllm", b"vllm:num_requests_waiting what\nvllm:num_requests_waiting\n").waiting is None


def test_a_time_stamp_behind_the_value_is_passed_over() -> None:
    assert read_signals("vllm", b"vllm:num_requests_waiting 7 1700000000000\n").waiting == 7.0


SGLANG = b"""\
# TYPE sglang:max_total_num_tokens gauge
sglang:max_total_num_tokens{engine_type="unified",model_name="tiny",tp_rank="0"} 4096.0
# TYPE sglang:page_size gauge
sglang:page_size{engine_type="unified",model_name="tiny",tp_rank="0"} 32.0
# TYPE sglang:num_pages gauge
sglang:num_pages{engine_type="unified",model_name="tiny",tp_rank="0"} 128.0
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine_type="unified",model_name="tiny",tp_rank="0"} 2.0
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{engine_type="unified",model_name="tiny",tp_rank="0"} 1.0
# TYPE sglang:token_usage gauge
sglang:token_usage{engine_type="unified",model_name="tiny",tp_rank="0"} 0.01
# TYPE sglang:prompt_tokens_histogram histogram
sglang:prompt_tokens_histogram_sum{model_name="tiny"} 184.0
# TYPE sglang:prompt_tokens_total counter
sglang:prompt_tokens_total{is_streaming="false",model_name="tiny"} 166.0
sglang:prompt_tokens_total{is_streaming="true",model_name="tiny"} 18.0
# TYPE sglang:cached_tokens_total counter
sglang:cached_tokens_total{cache_source="device",model_name="tiny"} 64.0
"""


@pytest.mark.parametrize("engine", ["sglang", "auto"])
def test_an_sglang_page_is_read_by_its_real_names(engine: str) -> None:
    assert read_signals(engine, SGLANG) == Signals(
        waiting=1.0,
        running=2.0,
        kv_usage_ratio=0.01,
        block_size_tokens=32,
        num_blocks=128,
        prefix_hit_tokens=64.0,
        prefix_query_tokens=184.0,
    )


def test_sglang_tensor_ranks_repeat_each_other_and_data_ranks_add_up() -> None:
    page = (
        b'sglang:num_queue_reqs{dp_rank="0",tp_rank="0"} 2\nsglang:num_queue_reqs{dp_rank="0",tp_rank="1"} 2\n'
        b'sglang:num_queue_reqs{dp_rank="1",tp_rank="0"} 3\n'
    )
    assert read_signals("sglang", page).waiting == 5.0
    assert read_signals("sglang", page.replace(b"} 3", b"} NaN")).waiting is None


def test_sglang_geometry_comes_from_gauges_or_the_info_series_or_the_token_budget() -> None:
    info = read_signals("sglang", b'sglang:cache_config_info{page_size="16",num_pages="9"} 1\n')
    assert (info.block_size_tokens, info.num_blocks) == (16, 9)
    budget = read_signals("sglang", b"sglang:page_size 16\nsglang:max_total_num_tokens 165\n")
    assert (budget.block_size_tokens, budget.num_blocks) == (16, 10)


@pytest.mark.parametrize("engine", ["trtllm-serve", "auto"])
def test_a_trtllm_page_is_read(engine: str) -> None:
    page = (
        b"trtllm_num_requests_waiting 1\ntrtllm_num_requests_running 2\ntrtllm_kv_cache_utilization 0.5\n"
        b"trtllm_kv_cache_tokens_per_block 32\ntrtllm_kv_cache_max_blocks 100\n"
    )
    assert read_signals(engine, page) == Signals(
        waiting=1.0, running=2.0, kv_usage_ratio=0.5, block_size_tokens=32, num_blocks=100
    )


@pytest.mark.parametrize("engine", ["triton-tensorrt-llm", "auto"])
def test_a_triton_page_is_read(engine: str) -> None:
    page = (
        b'nv_trt_llm_request_metrics{model="m",request_type="waiting",version="1"} 1\n'
        b'nv_trt_llm_request_metrics{model="m",request_type="scheduled",version="1"} 2\n'
        b'nv_trt_llm_request_metrics{model="m",request_type="max",version="1"} 512\n'
        b'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="m"} 0.5\n'
        b'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per",model="m"} 64\n'
        b'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="m"} 6239\n'
    )
    assert read_signals(engine, page) == Signals(
        waiting=1.0, running=2.0, kv_usage_ratio=0.5, block_size_tokens=64, num_blocks=6239
    )


def test_an_endless_page_is_refused() -> None:
    with pytest.raises(InvalidInput, match="larger than"):
        read_signals("vllm", b" " * (MAX_PAGE_BYTES + 1))


@given(st.lists(st.sampled_from(VLLM.split(b"\n")) | st.binary(max_size=30)).map(b"\n".join))
def test_no_page_raises_and_no_number_is_made_up(page: bytes) -> None:
    signals = read_signals("vllm", page)
    for value in (signals.waiting, signals.running, signals.kv_usage_ratio):
        assert value is None or math.isfinite(value)


@pytest.mark.parametrize(
    ("name", "block_size", "blocks", "hits", "queries"),
    [
        ("vllm-0.32-metrics", 32, 80, 192.0, 4373.0),
        ("vllm-0.32-two-ranks-metrics", 32, 320, 288.0, 500.0),
        ("sglang-0.5-metrics", 32, 128, 64.0, 184.0),
    ],
)
def test_captured_pages_are_read(name: str, block_size: int, blocks: int, hits: float, queries: float) -> None:
    page = (GOLDEN / f"{name}.txt").read_bytes()
    signals = read_signals("auto", page)
    assert signals == read_signals(name.partition("-")[0], page)
    assert (signals.waiting, signals.running) == (0.0, 0.0)
    assert (signals.block_size_tokens, signals.num_blocks) == (block_size, blocks)
    assert (signals.prefix_hit_tokens, signals.prefix_query_tokens) == (hits, queries)
