"""Which metric means what, engine by engine, and how several series become one number.

Owns the names (present and older ones) that vLLM, SGLang, TensorRT-LLM and Triton use.  A family that is missing, or
whose value is NaN, gives None: an engine that did not say is never read as idle.

Series of data-parallel ranks behind one address: requests and blocks add up, the fullest cache counts.
"""

from collections.abc import Callable

from shoal.pool import Signals
from shoal.wire.exposition import Page, Sample, finite, label


def read_signals(engine: str, text: bytes) -> Signals:
    """Return what an engine's metrics page says.

    engine: `vllm`, `shoal`, `sglang`, `trtllm-serve`, `triton-tensorrt-llm`, or anything else (`auto`) to tell by
    the names on the page.  Raises InvalidInput for a page beyond any reasonable size.
    """
    page = Page(text)
    reader = _READERS.get(engine)
    if reader is None:
        reader = next((reader for prefix, reader in _BY_PREFIX if page.has_prefix(prefix)), _nothing)
    return reader(page)


def _vllm(page: Page) -> Signals:
    config = page.samples(b"vllm:cache_config_info")
    lora = page.samples(b"vllm:lora_requests_info")
    # Every change of the set of adapters leaves a series behind; the value is the time of the change.
    newest = max(lora, key=lambda sample: sample.value, default=None)
    return Signals(
        waiting=_sum(page.samples(b"vllm:num_requests_waiting")),
        running=_sum(page.samples(b"vllm:num_requests_running")),
        kv_usage_ratio=_max(page.samples(b"vllm:kv_cache_usage_perc") or page.samples(b"vllm:gpu_cache_usage_perc")),
        block_size_tokens=_whole(label(config[0], b"block_size")) if config else None,
        num_blocks=_sum_labels(config, b"num_gpu_blocks"),
        prefix_hit_tokens=_sum(
            page.samples(b"vllm:prefix_cache_hits_total") or page.samples(b"vllm:gpu_prefix_cache_hits_total")
        ),
        prefix_query_tokens=_sum(
            page.samples(b"vllm:prefix_cache_queries_total") or page.samples(b"vllm:gpu_prefix_cache_queries_total")
        ),
        running_adapters=_names(newest, b"running_lora_adapters"),
        waiting_adapters=_names(newest, b"waiting_lora_adapters"),
        max_adapters=None if newest is None else _whole(label(newest, b"max_lora")),
    )


def _sglang(page: Page) -> Signals:
    config = page.samples(b"sglang:cache_config_info")
    page_size = _max(page.samples(b"sglang:page_size"))
    num_pages = _sum_ranks(page.samples(b"sglang:num_pages"))
    if page_size is None and config:
        page_size, num_pages = _number(label(config[0], b"page_size")), _number(label(config[0], b"num_pages"))
    if num_pages is None and page_size:
        tokens = _sum_ranks(page.samples(b"sglang:max_total_num_tokens"))
        num_pages = None if tokens is None else tokens // page_size
    return Signals(
        waiting=_sum_ranks(page.samples(b"sglang:num_queue_reqs")),
        running=_sum_ranks(page.samples(b"sglang:num_running_reqs")),
        kv_usage_ratio=_max(page.samples(b"sglang:token_usage")),
        block_size_tokens=None if page_size is None else int(page_size),
        num_blocks=None if num_pages is None else int(num_pages),
        prefix_hit_tokens=_sum(page.samples(b"sglang:cached_tokens_total")),
        prefix_query_tokens=_sum(page.samples(b"sglang:prompt_tokens_total")),
    )


def _trtllm(page: Page) -> Signals:
    block_size = _max(page.samples(b"trtllm_kv_cache_tokens_per_block"))
    num_blocks = _sum(page.samples(b"trtllm_kv_cache_max_blocks"))
    return Signals(
        waiting=_sum(page.samples(b"trtllm_num_requests_waiting")),
        running=_sum(page.samples(b"trtllm_num_requests_running")),
        kv_usage_ratio=_max(page.samples(b"trtllm_kv_cache_utilization")),
        block_size_tokens=None if block_size is None else int(block_size),
        num_blocks=None if num_blocks is None else int(num_blocks),
    )


def _triton(page: Page) -> Signals:
    requests = page.samples(b"nv_trt_llm_request_metrics")
    blocks = page.samples(b"nv_trt_llm_kv_cache_block_metrics")
    block_size = _max(_where(blocks, b"kv_cache_block_type", "tokens_per"))
    num_blocks = _sum(_where(blocks, b"kv_cache_block_type", "max"))
    return Signals(
        waiting=_sum(_where(requests, b"request_type", "waiting")),
        running=_sum(_where(requests, b"request_type", "scheduled")),
        kv_usage_ratio=_max(_where(blocks, b"kv_cache_block_type", "fraction")),
        block_size_tokens=None if block_size is None else int(block_size),
        num_blocks=None if num_blocks is None else int(num_blocks),
    )


def _nothing(page: Page) -> Signals:
    return Signals()


def _where(samples: list[Sample], name: bytes, value: str) -> list[Sample]:
    return [sample for sample in samples if label(sample, name) == value]


def _sum(samples: list[Sample]) -> float | None:
    """Return the sum; None when there is no sample or one of them says nothing."""
    return finite(sum(sample.value for sample in samples)) if samples else None


def _max(samples: list[Sample]) -> float | None:
    """Return the largest; None when there is no sample or one of them says nothing."""
    if not samples or any(finite(sample.value) is None for sample in samples):
        return None
    return max(sample.value for sample in samples)


def _sum_ranks(samples: list[Sample]) -> float | None:
    """Return the sum over data-parallel ranks; series of one rank (tensor ranks, priorities) repeat each other."""
    if len(samples) < 2:
        return _sum(samples)
    ranks: dict[str, list[Sample]] = {}
    for sample in samples:
        ranks.setdefault(label(sample, b"dp_rank") or "", []).append(sample)
    largest = [_max(series) for series in ranks.values()]
    return sum(value for value in largest if value is not None) if None not in largest else None


def _sum_labels(samples: list[Sample], name: bytes) -> int | None:
    values = [_whole(label(sample, name)) for sample in samples]
    return sum(value for value in values if value is not None) if values and None not in values else None


def _number(text: str | None) -> float | None:
    try:
        return finite(float(text)) if text is not None else None
    except ValueError:
        return None


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() and len(text) < 16 else None


def _names(sample: Sample | None, name: bytes) -> tuple[str, ...]:
    text = None if sample is None else label(sample, name)
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip())) if text else ()


_READERS: dict[str, Callable[[Page], Signals]] = {
    "vllm": _vllm,
    "shoal": _vllm,
    "sglang": _sglang,
    "trtllm-serve": _trtllm,
    "triton-tensorrt-llm": _triton,
}
_BY_PREFIX = (
    (b"vllm:", _vllm),
    (b"sglang:", _sglang),
    (b"trtllm_", _trtllm),
    (b"nv_trt_llm_", _triton),
)
