"""What an engine has counted since its start, out of its Prometheus page: of requests, and of steps.

Owns the names that vLLM and SGLang have for it.  How busy an engine is right now is `engine_metrics`', the text format
is `exposition`'s.
"""

import contextlib
import math
import re

import msgspec

from shoal.kernel import InvalidInput
from shoal.wire.exposition import Page, label

_BOUND = re.compile(rb'(?:^|,)\s*le\s*=\s*"([^"]*)"')
_SUMS = {
    "first_s": b"vllm:time_to_first_token_seconds",
    "queue_s": b"vllm:request_queue_time_seconds",
    "prefill_s": b"vllm:request_prefill_time_seconds",
    "decode_s": b"vllm:request_decode_time_seconds",
    "prompt_tokens": b"vllm:request_prompt_tokens",
    "computed_tokens": b"vllm:request_prefill_kv_computed_tokens",
    "output_tokens": b"vllm:request_generation_tokens",
    "step_tokens": b"vllm:iteration_tokens_total",
}


_STAGES = ("prefill_forward", "chunked_prefill")
"""SGLang's names for the time between the queue and the first token."""


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Sums since the start of an engine; of several ranks together.

    requests: that are finished, and of them in seconds and tokens: first_s (arrival to first token), queue_s, prefill_s
    (out of the queue to the first token), decode_s (from there to the last), prompt_tokens, computed_tokens (those that
    no cache had), output_tokens.  steps, step_tokens: steps, and tokens computed in them.  sizes: upper bounds of
    tokens of a step, and steps up to each; prompts: of computed tokens of a request.  running: requests right now.
    prefills: steps with prefill in them, NaN where the engine does not count them.  is_mixed: whether requests that
    decode take part in these.
    """

    requests: float
    first_s: float
    queue_s: float
    prefill_s: float
    decode_s: float
    prompt_tokens: float
    computed_tokens: float
    output_tokens: float
    steps: float
    step_tokens: float
    sizes: dict[float, float]
    prompts: dict[float, float]
    running: float
    prefills: float
    is_mixed: bool

    def since(self, before: "Totals") -> "Totals":
        """Return what came after `before`, with `running` as it is now."""
        differences = {name: getattr(self, name) - getattr(before, name) for name in _COUNTED}
        return msgspec.structs.replace(
            self,
            sizes={bound: count - before.sizes.get(bound, 0.0) for bound, count in self.sizes.items()},
            prompts={bound: count - before.prompts.get(bound, 0.0) for bound, count in self.prompts.items()},
            **differences,
        )


_COUNTED = (*_SUMS, "requests", "steps", "prefills")


def read_totals(text: bytes) -> Totals:
    """Return what a metrics page of vLLM, of SGLang, or of an engine with the names of one of them, has counted.

    Raises InvalidInput for a page without a family that is needed, and names it.
    """
    page = Page(text)
    return _sglang(page) if page.has_prefix(b"sglang:") and not page.has_prefix(b"vllm:") else _vllm(page)


def _vllm(page: Page) -> Totals:
    sums = {name: _total(page, family, b"_sum") for name, family in _SUMS.items()}
    return Totals(
        requests=_total(page, _SUMS["prompt_tokens"], b"_count"),
        steps=_total(page, _SUMS["step_tokens"], b"_count"),
        sizes=_buckets(page, _SUMS["step_tokens"]),
        prompts=_buckets(page, _SUMS["computed_tokens"]),
        running=_total(page, b"vllm:num_requests_running", b""),
        prefills=math.nan,
        is_mixed=True,
        **sums,
    )


def _sglang(page: Page) -> Totals:
    """A prompt that is not cached is computed in steps of its own, and all that decode wait for it."""
    prompt = _total(page, b"sglang:prompt_tokens_total", b"")
    output = _total(page, b"sglang:generation_tokens_total", b"")
    first_s = _total(page, b"sglang:time_to_first_token_seconds", b"_sum")
    cached = page.samples(b"sglang:cached_tokens_total")
    passes = _by_label(page, b"sglang:cuda_graph_passes_total", b"", b"mode")
    prefills = sum(count for mode, count in passes.items() if mode.startswith(("prefill", "extend")))
    stages = _by_label(page, b"sglang:per_stage_req_latency_seconds", b"_sum", b"stage")
    computed = prompt - sum(sample.value for sample in cached if math.isfinite(sample.value))
    return Totals(
        requests=_total(page, b"sglang:e2e_request_latency_seconds", b"_count"),
        first_s=first_s,
        queue_s=_total(page, b"sglang:queue_time_seconds", b"_sum"),
        prefill_s=sum(stages.get(stage, 0.0) for stage in _STAGES),
        decode_s=_total(page, b"sglang:e2e_request_latency_seconds", b"_sum") - first_s,
        prompt_tokens=prompt,
        computed_tokens=computed,
        output_tokens=output,
        steps=sum(passes.values()),
        step_tokens=computed + output,
        sizes={},
        prompts=_buckets(page, b"sglang:uncached_prompt_tokens_histogram"),
        running=_total(page, b"sglang:num_running_reqs", b""),
        prefills=prefills,
        is_mixed=False,
    )


def _by_label(page: Page, family: bytes, suffix: bytes, name: bytes) -> dict[str, float]:
    """Return the sums by the values of a label."""
    _total(page, family, suffix)
    sums: dict[str, float] = {}
    for sample in page.samples(family + suffix, family):
        value = label(sample, name) or ""
        sums[value] = sums.get(value, 0.0) + (sample.value if math.isfinite(sample.value) else 0.0)
    return sums


def _total(page: Page, family: bytes, suffix: bytes) -> float:
    samples = page.samples(family + suffix, family)
    if not samples:
        engine = "SGLang's" if family.startswith(b"sglang:") else "vLLM's"
        raise InvalidInput(f"the metrics page has no {(family + suffix).decode()}, which {engine} has")
    return sum(sample.value for sample in samples if math.isfinite(sample.value))


def _buckets(page: Page, family: bytes) -> dict[float, float]:
    """Return how many were up to each bound, the infinite one included; a bound that is no number is passed over."""
    counts: dict[float, float] = {}
    for sample in page.samples(family + b"_bucket", family):
        bound = _BOUND.search(sample.labels)
        if bound is None or not math.isfinite(sample.value):
            continue
        with contextlib.suppress(ValueError):
            most = float(bound[1])
            if not math.isnan(most):
                counts[most] = counts.get(most, 0.0) + sample.value
    return counts
