"""What an engine has counted since its start, out of its Prometheus page: vLLM's histograms of requests and of steps.

Owns the names.  How busy an engine is right now is `engine_metrics`', the text format is `exposition`'s.
"""

import contextlib
import math
import re

import msgspec

from shoal.kernel import InvalidInput
from shoal.wire.exposition import Page

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


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Sums since the start of an engine; of several ranks together.

    requests: that are finished, and of them in seconds and tokens: first_s (arrival to first token), queue_s, prefill_s
    (out of the queue to the first token), decode_s (from there to the last), prompt_tokens, computed_tokens (those that
    no cache had), output_tokens.  steps, step_tokens: steps, and tokens computed in them.  sizes: upper bounds of
    tokens of a step, and steps up to each; prompts: of computed tokens of a request.  running: requests right now.
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

    def since(self, before: "Totals") -> "Totals":
        """Return what came after `before`, with `running` as it is now."""
        differences = {name: getattr(self, name) - getattr(before, name) for name in (*_SUMS, "requests", "steps")}
        return msgspec.structs.replace(
            self,
            sizes={bound: count - before.sizes.get(bound, 0.0) for bound, count in self.sizes.items()},
            prompts={bound: count - before.prompts.get(bound, 0.0) for bound, count in self.prompts.items()},
            **differences,
        )


def read_totals(text: bytes) -> Totals:
    """Return what a metrics page of vLLM, or of an engine with its names, has counted.

    Raises InvalidInput for a page without a family that is needed, and names it.
    """
    page = Page(text)
    sums = {name: _total(page, family, b"_sum") for name, family in _SUMS.items()}
    return Totals(
        requests=_total(page, _SUMS["prompt_tokens"], b"_count"),
        steps=_total(page, _SUMS["step_tokens"], b"_count"),
        sizes=_buckets(page, _SUMS["step_tokens"]),
        prompts=_buckets(page, _SUMS["computed_tokens"]),
        running=_total(page, b"vllm:num_requests_running", b""),
        **sums,
    )


def _total(page: Page, family: bytes, suffix: bytes) -> float:
    samples = page.samples(family + suffix, family)
    if not samples:
        raise InvalidInput(f"the metrics page has no {(family + suffix).decode()}, which vLLM's has")
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
