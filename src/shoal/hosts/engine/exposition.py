"""The metrics page of the embedded engine: vLLM's family names, types, labels and buckets.

The vLLM families are written as text from prepared pieces, because prometheus_client needs 9 ms for a page of this
size and a router scrapes often; the process families are its own.  The usage gauge counts blocks held by running
requests over all blocks, as vLLM does; reusable cached blocks are free.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest

from shoal.engine import Engine
from shoal.hosts.engine.catalog import Catalog
from shoal.hosts.engine.control import Control
from shoal.hosts.engine.families import (
    CACHE_INFO,
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    HTTP_REQUESTS,
    LOOP_LAG,
    LORA,
    Extra,
    cache_labels,
)
from shoal.hosts.engine.lag import LoopLag
from shoal.hosts.engine.meter import HttpCounts
from shoal.hosts.engine.ranks import Rank, Ranks

_REASONS = ("stop", "length", "abort", "error", "repetition")


class _Family(NamedTuple):
    """Prepared text of a counter or gauge: head, (rank, key, line up to the value), tail with the `_created` twin."""

    name: str
    head: str
    series: tuple[tuple[int, str, str], ...]
    tail: str


class Exposition:
    """Renders the page.  started_at: unix seconds, the value of every `_created` twin."""

    def __init__(
        self,
        ranks: Ranks,
        requests: HttpCounts,
        catalog: Catalog,
        lag: LoopLag,
        control: Control,
        started_at: float,
    ) -> None:
        self._ranks = ranks.all
        self._requests = requests
        self._catalog = catalog
        self._lag = lag
        self._control = control
        self._created = f"{started_at}"
        labels = [rank.labels for rank in self._ranks]
        self._gauges = [_family(name, *GAUGES[name], labels, "") for name in GAUGES]
        self._counters = [_family(name, *COUNTERS[name], labels, self._created) for name in COUNTERS]
        self._histograms = [
            (name, _head(f"vllm:{name}", help_text, "histogram"), self._twin(f"vllm:{name}", help_text, labels))
            for name, (help_text, _) in HISTOGRAMS.items()
        ]
        self._cache = _head("vllm:cache_config_info", CACHE_INFO, "gauge")
        for number, rank in enumerate(self._ranks):
            cache = cache_labels(rank.engine.num_blocks, rank.engine.block_size, number)
            info = ",".join(f'{name}="{value}"' for name, value in cache.items())
            self._cache += f"vllm:cache_config_info{{{info}}} 1.0\n"
        self._registry = CollectorRegistry()
        GCCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        ProcessCollector(registry=self._registry)

    def page(self, now_s: float) -> bytes:
        """Return the page in Prometheus text format.  now_s: unix seconds."""
        return generate_latest(self._registry) + "".join(self._pieces(now_s)).encode()

    def _pieces(self, now_s: float) -> Iterator[str]:
        gauges = [self._gauge_values(rank.engine) for rank in self._ranks]
        counters = [_counter_values(rank) for rank in self._ranks]
        for families, values in ((self._gauges, gauges), (self._counters, counters)):
            for family in families:
                yield family.head
                for rank, key, prefix in family.series:
                    yield f"{prefix}{float(values[rank].get((family.name, key), 0))}\n"
                yield family.tail
        for name, head, twin in self._histograms:
            yield head
            for each in self._ranks:
                yield each.meter.histograms[name].lines()
            yield twin
        yield self._cache
        yield from self._own(now_s)

    def _gauge_values(self, engine: Engine) -> dict[tuple[str, str], float]:
        return {
            ("num_requests_running", ""): engine.num_running,
            ("num_requests_waiting", ""): engine.num_waiting,
            ("num_requests_waiting_by_reason", "capacity"): engine.num_waiting - engine.num_deferred,
            ("num_requests_waiting_by_reason", "deferred"): engine.num_deferred,
            ("engine_sleep_state", self._control.sleep_state): 1,
            ("kv_cache_usage_perc", ""): engine.pool.usage_ratio,
        }

    def _own(self, now_s: float) -> Iterator[str]:
        if self._catalog.adapters:
            named = [rank.engine.adapters() for rank in self._ranks]
            running, waiting = (",".join(sorted(set().union(*each))) for each in zip(*named, strict=True))
            yield _head("vllm:lora_requests_info", LORA, "gauge")
            labels = f'max_lora="{self._ranks[0].engine.max_loras}",running_lora_adapters="{running}"'
            yield f'vllm:lora_requests_info{{{labels},waiting_lora_adapters="{waiting}"}} {now_s}\n'
        yield _head("http_requests_total", HTTP_REQUESTS, "counter")
        for (handler, method, hundreds), count in self._requests.items():
            labels = f'handler="{handler}",method="{method}",status="{hundreds}xx"'
            yield f"http_requests_total{{{labels}}} {float(count)}\n"
        yield _head("shoal_engine_loop_lag_seconds", LOOP_LAG, "gauge")
        for quantile in (0.5, 0.99):
            yield f'shoal_engine_loop_lag_seconds{{quantile="{quantile}"}} {self._lag.quantile_s(quantile)}\n'

    def _twin(self, name: str, help_text: str, labels: Sequence[str]) -> str:
        lines = [f"{name}_created{{{each}}} {self._created}\n" for each in labels]
        return _head(f"{name}_created", help_text, "gauge") + "".join(lines)


def _counter_values(rank: Rank) -> dict[tuple[str, str], float]:
    counters = rank.engine.counters
    return {
        ("prefix_cache_queries", ""): counters.prefix_queries,
        ("prefix_cache_hits", ""): counters.prefix_hits,
        ("external_prefix_cache_queries", ""): counters.external_queries,
        ("external_prefix_cache_hits", ""): counters.external_hits,
        ("num_preemptions", ""): counters.preemptions,
        ("prompt_tokens", ""): counters.prompt,
        ("prompt_tokens_by_source", "local_compute"): counters.prompt - counters.cached,
        ("prompt_tokens_by_source", "local_cache_hit"): counters.cached - counters.loaded,
        ("prompt_tokens_by_source", "external_kv_transfer"): counters.loaded,
        ("prompt_tokens_cached", ""): counters.cached,
        ("prompt_tokens_cached_by_source", "device"): counters.prefix_hits,
        ("prompt_tokens_cached_by_source", "host"): counters.external_hits,
        ("generation_tokens", ""): counters.generation,
        **{("request_success", reason): rank.meter.finished[reason] for reason in _REASONS},
    }


def _family(name: str, extra: Extra | None, help_text: str, labels: Sequence[str], created: str) -> _Family:
    """Prepare one family.  labels: of each rank.  created: makes it a counter."""
    full = f"vllm:{name}"
    if name == "admission_rejections":  # the one family without the engine label
        labels = [labels[0].split(",", 1)[1]]
    keys = [
        (rank, key, f'{each},{extra[0]}="{key}"' if extra else each)
        for rank, each in enumerate(labels)
        for key in (extra[1] if extra else ("",))
    ]
    shown = f"{full}_total" if created else full
    tail = ""
    if created:
        tail = _head(f"{full}_created", help_text, "gauge")
        tail += "".join([f"{full}_created{{{each}}} {created}\n" for _, _, each in keys])
    return _Family(
        name,
        _head(shown, help_text, "counter" if created else "gauge"),
        tuple((rank, key, f"{shown}{{{each}}} ") for rank, key, each in keys),
        tail,
    )


def _head(name: str, help_text: str, kind: str) -> str:
    return f"# HELP {name} {help_text}\n# TYPE {name} {kind}\n"
