"""What the embedded engine counts per request and per step, in vLLM's histograms."""

from collections import Counter

from shoal.engine import Finish
from shoal.hosts.engine.families import HISTOGRAMS
from shoal.hosts.engine.histogram import Histogram

HttpCounts = Counter[tuple[str, str, int]]
"""Requests of a server by (handler, method, status class)."""


class Meter:
    """Totals of one rank since the start.

    labels: of every vLLM series, in text format.  finished: requests by reason.
    """

    __slots__ = ("finished", "histograms")

    def __init__(self, labels: str) -> None:
        self.histograms = {name: Histogram(f"vllm:{name}", labels, bounds) for name, (_, bounds) in HISTOGRAMS.items()}
        self.finished: Counter[str] = Counter()

    def observe_step(self, tokens: int) -> None:
        """Count one engine step."""
        self.histograms["iteration_tokens_total"].observe(tokens)

    def observe_params(self, samples: int, limit: int) -> None:
        """Count what a request asked for: `n` and its token limit."""
        self.histograms["request_params_n"].observe(samples)
        self.histograms["request_params_max_tokens"].observe(limit)

    def observe_finish(self, finish: Finish, limit: int) -> None:
        """Count a finished request; an aborted one counts nowhere, as in vLLM.

        Inter-token latency is the request's mean, counted once per token after the first.
        """
        if finish.reason == "abort" or finish.admitted_at is None:
            return
        self.finished[finish.reason] += 1
        observed = self.histograms
        first = finish.first_token_at if finish.first_token_at is not None else finish.finished_at
        decode_s = finish.finished_at - first
        observed["request_prompt_tokens"].observe(finish.prompt_tokens)
        observed["request_generation_tokens"].observe(finish.output_tokens)
        observed["request_max_num_generation_tokens"].observe(max(limit, finish.output_tokens))
        observed["request_prefill_kv_computed_tokens"].observe(finish.prompt_tokens - finish.cached_tokens)
        observed["request_num_preemptions"].observe(finish.preemptions)
        observed["time_to_first_token_seconds"].observe(first - finish.arrived_at)
        observed["e2e_request_latency_seconds"].observe(finish.finished_at - finish.arrived_at)
        observed["request_queue_time_seconds"].observe(finish.admitted_at - finish.arrived_at)
        observed["request_inference_time_seconds"].observe(finish.finished_at - finish.admitted_at)
        observed["request_prefill_time_seconds"].observe(first - finish.admitted_at)
        observed["request_decode_time_seconds"].observe(decode_s)
        if finish.output_tokens > 1:
            mean_s = decode_s / (finish.output_tokens - 1)
            observed["request_time_per_output_token_seconds"].observe(mean_s)
            observed["inter_token_latency_seconds"].observe(mean_s, finish.output_tokens - 1)
