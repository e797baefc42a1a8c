"""OpenTelemetry traces of routed requests, exported by OTLP when configured.

Owns the spans: `gateway.request` with `queue`, `decision` and `forward` below it.  Without an endpoint in the
configuration nothing is imported and nothing is spent.  Spans hold ids and counts, never prompt text.
"""

import time
from typing import Any, Protocol

from shoal.kernel import ConfigError
from shoal.routing import Account


class TracingSettings(Protocol):
    """What this module reads of the configuration."""

    @property
    def otlp_endpoint(self) -> str: ...
    @property
    def sample_ratio(self) -> float: ...


class Tracer:
    """Makes the spans of closed requests; `off` when no endpoint is configured."""

    def __init__(self, provider: Any = None) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("shoal") if provider is not None else None

    @classmethod
    def from_settings(cls, settings: TracingSettings) -> "Tracer":
        """Build the exporter.  Raises ConfigError when OpenTelemetry is not installed."""
        if not settings.otlp_endpoint:
            return cls()
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

            from shoal.hosts.otlp import OtlpJsonExporter
        except ImportError:
            raise ConfigError(
                "tracing needs OpenTelemetry: pip install 'shoal[otel]'", path="tracing.otlp_endpoint"
            ) from None
        provider = TracerProvider(
            resource=Resource.create({"service.name": "shoal"}),
            sampler=ParentBased(TraceIdRatioBased(settings.sample_ratio)),
        )
        provider.add_span_processor(BatchSpanProcessor(OtlpJsonExporter(settings.otlp_endpoint)))
        return cls(provider)

    def account(self, account: Account) -> None:
        """Emit the spans of one closed request, below the client's own span if it sent one."""
        if self._tracer is None or not account.is_recorded:
            return
        outcome = account.outcome
        end = time.time_ns()
        start = end - int(outcome.duration_s * 1e9)
        sent = start + int(account.queue_s * 1e9)
        span = self._tracer.start_span("gateway.request", context=_context(account.trace_parent), start_time=start)
        span.set_attributes(
            {
                "gen_ai.request.model": account.model,
                "gen_ai.request.id": account.client_id or account.request_id,
                "gen_ai.usage.input_tokens": outcome.prompt_tokens or account.prompt_tokens,
                "gen_ai.usage.output_tokens": outcome.completion_tokens or 0,
                "llm_d.epp.endpoint": account.endpoint_id,
                "llm_d.epp.predicted_cached_tokens": account.predicted_cached_tokens,
                "http.response.status_code": outcome.status,
                "shoal.attempts": outcome.attempts,
            }
        )
        from opentelemetry.trace import set_span_in_context

        below = set_span_in_context(span)
        for name, begin, finish in (("queue", start, sent), ("decision", sent, sent), ("forward", sent, end)):
            child = self._tracer.start_span(name, context=below, start_time=begin)
            if name == "forward" and outcome.ttft_s is not None:
                child.add_event("first_byte", timestamp=start + int(outcome.ttft_s * 1e9))
            child.end(finish)
        span.end(end)

    def close(self) -> None:
        """Send what is waiting."""
        if self._provider is not None:
            self._provider.shutdown()


def _context(parent: str) -> Any:
    if not parent:
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({"traceparent": parent})
