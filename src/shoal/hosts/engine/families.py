"""Names, help texts, labels and buckets of vLLM's metric families, as vLLM 0.32 shows them.

Data only; the values come from `exposition`.
"""

Extra = tuple[str, tuple[str, ...]]
"""A family's own label beside `engine` and `model_name`, and its values."""

_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
_LATENCY = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_REQUEST = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)

GAUGES: dict[str, tuple[Extra | None, str]] = {
    "num_requests_running": (None, "Number of requests in model execution batches."),
    "num_requests_waiting": (None, "Number of requests waiting to be processed."),
    "num_requests_waiting_by_reason": (
        ("reason", ("capacity", "deferred")),
        "Number of waiting requests by reason. 'capacity' or 'deferred' (LoRA budget).",
    ),
    "engine_sleep_state": (
        ("sleep_state", ("awake", "weights_offloaded", "discard_all")),
        "Engine sleep state; awake = 1 means engine is awake.",
    ),
    "kv_cache_usage_perc": (None, "KV-cache usage. 1 means 100 percent usage."),
}
"""Name to (extra label, help)."""

COUNTERS: dict[str, tuple[Extra | None, str]] = {
    "estimated_flops_per_gpu": (
        None,
        "Estimated number of floating point operations per GPU (for Model Flops Utilization calculations).",
    ),
    "estimated_read_bytes_per_gpu": (
        None,
        "Estimated number of bytes read from memory per GPU (for Model Flops Utilization calculations).",
    ),
    "estimated_write_bytes_per_gpu": (
        None,
        "Estimated number of bytes written to memory per GPU (for Model Flops Utilization calculations).",
    ),
    "prefix_cache_queries": (None, "Prefix cache queries, in terms of number of queried tokens."),
    "prefix_cache_hits": (None, "Prefix cache hits, in terms of number of cached tokens."),
    "external_prefix_cache_queries": (
        None,
        "External prefix cache queries from KV connector, in terms of number of queried tokens.",
    ),
    "external_prefix_cache_hits": (
        None,
        "External prefix cache hits from KV connector, in terms of number of cached tokens.",
    ),
    "mm_cache_queries": (None, "Multi-modal cache queries, in terms of number of queried items."),
    "mm_cache_hits": (None, "Multi-modal cache hits, in terms of number of cached items."),
    "num_preemptions": (None, "Cumulative number of preemption from the engine."),
    "prompt_tokens": (None, "Number of prefill tokens processed."),
    "prompt_tokens_by_source": (
        ("source", ("local_compute", "local_cache_hit", "external_kv_transfer")),
        "Number of prompt tokens by source.",
    ),
    "prompt_tokens_cached": (None, "Number of cached prompt tokens (local + external)."),
    "prompt_tokens_cached_by_source": (
        ("source", ("device", "host", "p2p", "disk", "external_unspecified")),
        "Prefix-cache hit tokens by the cache tier that supplied them, counted at admission.",
    ),
    "generation_tokens": (None, "Number of generation tokens processed."),
    "request_success": (
        ("finished_reason", ("stop", "length", "abort", "error", "repetition")),
        "Count of successfully processed requests.",
    ),
    "admission_rejections": (
        ("reason", ("max_num_queued_reqs", "max_num_queued_tokens")),
        "Number of admission attempts rejected by a queue limit, by reason.",
    ),
}
"""Name to (extra label, help)."""

HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "request_prompt_tokens": ("Number of prefill tokens processed.", _TOKENS),
    "request_generation_tokens": ("Number of generation tokens processed.", _TOKENS),
    "iteration_tokens_total": (
        "Histogram of number of tokens per engine_step.",
        (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
    ),
    "request_max_num_generation_tokens": ("Histogram of maximum number of requested generation tokens.", _TOKENS),
    "request_params_n": ("Histogram of the n request parameter.", (1, 2, 5, 10, 20)),
    "request_params_max_tokens": ("Histogram of the max_tokens request parameter.", _TOKENS),
    "time_to_first_token_seconds": (
        "Histogram of time to first token in seconds.",
        (
            0.001,
            0.005,
            0.01,
            0.02,
            0.04,
            0.06,
            0.08,
            0.1,
            0.25,
            0.5,
            0.75,
            1,
            2.5,
            5,
            7.5,
            10,
            20,
            40,
            80,
            160,
            640,
            2560,
        ),
    ),
    "inter_token_latency_seconds": ("Histogram of inter-token latency in seconds.", _LATENCY),
    "request_time_per_output_token_seconds": ("Histogram of time_per_output_token_seconds per request.", _LATENCY),
    "e2e_request_latency_seconds": ("Histogram of e2e request latency in seconds.", _REQUEST),
    "request_queue_time_seconds": ("Histogram of time spent in WAITING phase for request.", _REQUEST),
    "request_inference_time_seconds": ("Histogram of time spent in RUNNING phase for request.", _REQUEST),
    "request_prefill_time_seconds": ("Histogram of time spent in PREFILL phase for request.", _REQUEST),
    "request_decode_time_seconds": ("Histogram of time spent in DECODE phase for request.", _REQUEST),
    "request_num_preemptions": ("Histogram of the number of times a request was preempted.", (1, 2, 3, 4, 5, 10, 20)),
    "request_prefill_kv_computed_tokens": (
        "Histogram of new KV tokens computed during prefill (excluding cached tokens).",
        _TOKENS,
    ),
}
"""Name to (help, upper bounds)."""

CACHE_INFO = "Information of the LLMEngine CacheConfig"
LORA = "Running stats on lora requests."
HTTP_REQUESTS = "Total number of requests by method, status and handler."
LOOP_LAG = "Lateness of the server's event loop over the last 10 seconds."


def cache_labels(num_blocks: int, block_size: int, rank: int) -> dict[str, str]:
    """Return the labels of `vllm:cache_config_info`; what this engine has no notion of has vLLM's default."""
    return {
        "_block_size_resolved": "True",
        "block_size": str(block_size),
        "cache_dtype": "auto",
        "cache_hit_alignment_tokens": "None",
        "effective_attention_block_size": str(block_size),
        "enable_mamba_shared_prefix_checkpoint": "False",
        "enable_prefix_caching": "True",
        "engine": str(rank),
        "gpu_memory_utilization": "0.92",
        "hash_block_size": "None",
        "is_attention_free": "False",
        "kv_cache_dtype_skip_layers": "[]",
        "kv_cache_layout": "None",
        "kv_cache_max_concurrency": "None",
        "kv_cache_memory_bytes": "None",
        "kv_cache_size_tokens": str(num_blocks * block_size),
        "kv_offloading_backend": "native",
        "kv_offloading_size": "None",
        "kv_sharing_fast_prefill": "False",
        "mamba_block_size": "None",
        "mamba_cache_dtype": "auto",
        "mamba_cache_mode": "none",
        "mamba_page_size_padded": "None",
        "mamba_ssm_cache_dtype": "float32",
        "num_cpu_blocks": "None",
        "num_gpu_blocks": str(num_blocks),
        "num_gpu_blocks_override": "None",
        "prefix_cache_retention_interval": "0",
        "prefix_caching_hash_algo": "sha256",
        "prefix_match_unit": "None",
        "replayssm_buffer_len": "16",
        "skip_page_size_padded": "None",
        "sliding_window": "None",
        "swa_bounded_replay": "True",
        "use_kda_recoverssm": "False",
        "use_replayssm": "False",
        "user_specified_block_size": "True",
    }
