"""The metrics page of the embedded engine: vLLM's family names, types, labels and buckets.

Owns what is counted per request (`Meter`) and how the engine's own counters are shown (`Exposition`).  The usage
gauge counts blocks held by running requests over all blocks, as vLLM does; reusable cached blocks are free.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric, Sample
from prometheus_client.registry import Collector

from shoal.engine import Engine, Finish
from shoal.hosts.engine.catalog import Catalog
from shoal.hosts.engine.families import (
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    HTTP_REQUESTS,
    LABELS,
    LOOP_LAG,
    LORA,
    Gauge,
    cache_labels,
)
from shoal.hosts.engine.histogram import Histogram
from shoal.hosts.engine.lag import LoopLag

_REASONS = ("stop", "length", "abort", "error", "repetition")


class Meter:
    """What is counted per request and per step."""

    __slots__ = ("finished", "histograms", "http")

    def __init__(self) -> None:
        self.histograms = {name: Histogram(bounds) for name, (_, bounds) in HISTOGRAMS.items()}
        self.finished: Counter[str] = Counter()
        self.http: Counter[tuple[str, str, int]] = Counter()

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


class Exposition(Collector):
    """Renders the page.  started_at, now_s: unix seconds."""

    def __init__(self, engine: Engine, meter: Meter, catalog: Catalog, lag: LoopLag, started_at: float) -> None:
        self._engine = engine
        self._meter = meter
        self._catalog = catalog
        self._lag = lag
        self._started_at = started_at
        self._labels = ("0", catalog.base)
        self._cache_labels = cache_labels(engine.num_blocks, engine.block_size)
        self._registry = CollectorRegistry()
        GCCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        ProcessCollector(registry=self._registry)
        self._registry.register(self)
        self.now_s = started_at

    def describe(self) -> Iterable[Metric]:
        """Name no family up front: registering must not render a page."""
        return []

    def page(self, now_s: float) -> bytes:
        """Return the page in Prometheus text format."""
        self.now_s = now_s
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield every family in vLLM's order."""
        yield from self._gauges()
        yield from self._counters()
        yield from self._histograms()
        yield from self._own()

    def _gauges(self) -> Iterator[Metric]:
        engine = self._engine
        values: dict[str, Gauge] = {
            "num_requests_running": engine.num_running,
            "num_requests_waiting": engine.num_waiting,
            "num_requests_waiting_by_reason": {
                "capacity": engine.num_waiting - engine.num_deferred,
                "deferred": engine.num_deferred,
            },
            "engine_sleep_state": {"awake": 1, "weights_offloaded": 0, "discard_all": 0},
            "kv_cache_usage_perc": engine.pool.usage_ratio,
        }
        for name, (label, documentation) in GAUGES.items():
            family = GaugeMetricFamily(f"vllm:{name}", documentation, labels=(*LABELS, *label))
            value = values[name]
            for key, each in value.items() if isinstance(value, dict) else [("", value)]:
                family.add_metric((*self._labels, key) if label else self._labels, each)
            yield family

    def _counters(self) -> Iterator[Metric]:
        counters = self._engine.counters
        computed = counters.prompt - counters.cached
        values: dict[str, Gauge] = {
            "prefix_cache_queries": counters.prefix_queries,
            "prefix_cache_hits": counters.prefix_hits,
            "num_preemptions": counters.preemptions,
            "prompt_tokens": counters.prompt,
            "prompt_tokens_by_source": {
                "local_compute": computed,
                "local_cache_hit": counters.cached,
                "external_kv_transfer": 0,
            },
            "prompt_tokens_cached": counters.cached,
            "prompt_tokens_cached_by_source": {
                "device": counters.prefix_hits,
                **dict.fromkeys(("host", "p2p", "disk", "external_unspecified"), 0),
            },
            "generation_tokens": counters.generation,
            "request_success": {reason: self._meter.finished[reason] for reason in _REASONS},
            "admission_rejections": {"max_num_queued_reqs": 0, "max_num_queued_tokens": 0},
        }
        for name, (label, documentation) in COUNTERS.items():
            own = self._labels if name != "admission_rejections" else self._labels[1:]
            names = LABELS if name != "admission_rejections" else LABELS[1:]
            family = CounterMetricFamily(f"vllm:{name}", documentation, labels=(*names, *label))
            value = values.get(name, 0)
            for key, each in value.items() if isinstance(value, dict) else [("", value)]:
                family.add_metric((*own, key) if label else own, each, created=self._started_at)
            yield family

    def _histograms(self) -> Iterator[Metric]:
        labels = dict(zip(LABELS, self._labels, strict=True))
        for name, (documentation, _) in HISTOGRAMS.items():
            histogram = self._meter.histograms[name]
            family = HistogramMetricFamily(f"vllm:{name}", documentation, labels=LABELS)
            family.add_metric(self._labels, histogram.buckets(), histogram.total)
            family.samples.append(Sample(f"vllm:{name}_created", labels, self._started_at))
            yield family

    def _own(self) -> Iterator[Metric]:
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "Information of the LLMEngine CacheConfig", labels=tuple(self._cache_labels)
        )
        info.add_metric(tuple(self._cache_labels.values()), 1)
        yield info
        if self._catalog.adapters:
            running, waiting = self._engine.adapters()
            lora = GaugeMetricFamily(
                "vllm:lora_requests_info", LORA, labels=("max_lora", "waiting_lora_adapters", "running_lora_adapters")
            )
            lora.add_metric((str(self._engine.max_loras), ",".join(waiting), ",".join(running)), self.now_s)
            yield lora
        http = CounterMetricFamily("http_requests", HTTP_REQUESTS, labels=("handler", "method", "status"))
        for (handler, method, hundreds), count in self._meter.http.items():
            http.add_metric((handler, method, f"{hundreds}xx"), count, created=self._started_at)
        yield http
        lag = GaugeMetricFamily("shoal_engine_loop_lag_seconds", LOOP_LAG, labels=("quantile",))
        for quantile in (0.5, 0.99):
            lag.add_metric((str(quantile),), self._lag.quantile_s(quantile))
        yield lag
