"""Sends spans to an OpenTelemetry collector as OTLP over HTTP, in its JSON form.

Owns the wire form (OTLP 1.x, `ExportTraceServiceRequest` in protobuf's JSON mapping, with ids in hex) and the POST.
The protobuf exporter is not used: its generated modules share file names with those that Envoy's API package brings.
"""

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

TIMEOUT_S = 10.0


class OtlpJsonExporter(SpanExporter):
    """Posts batches to `endpoint` (`http://host:4318/v1/traces`); what the collector refuses is dropped."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send one batch; called from the SDK's own thread."""
        body = json.dumps(_request(spans)).encode()
        request = urllib.request.Request(self._endpoint, body, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S):
                return SpanExportResult.SUCCESS
        except (OSError, urllib.error.URLError):
            return SpanExportResult.FAILURE


def _request(spans: Sequence[ReadableSpan]) -> dict[str, Any]:
    resource = spans[0].resource.attributes if spans else {}
    return {
        "resourceSpans": [
            {
                "resource": {"attributes": _attributes(resource)},
                "scopeSpans": [{"scope": {"name": "shoal"}, "spans": [_span(span) for span in spans]}],
            }
        ]
    }


def _span(span: ReadableSpan) -> dict[str, Any]:
    context = span.get_span_context()
    assert context is not None
    return {
        "traceId": f"{context.trace_id:032x}",
        "spanId": f"{context.span_id:016x}",
        "parentSpanId": f"{span.parent.span_id:016x}" if span.parent is not None else "",
        "name": span.name,
        "kind": 2 if span.parent is None or span.parent.is_remote else 1,
        "startTimeUnixNano": str(span.start_time or 0),
        "endTimeUnixNano": str(span.end_time or 0),
        "attributes": _attributes(span.attributes or {}),
        "events": [{"name": event.name, "timeUnixNano": str(event.timestamp)} for event in span.events],
        "status": {"code": span.status.status_code.value},
    }


def _attributes(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in values.items()]


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    return {"doubleValue": value} if isinstance(value, float) else {"stringValue": str(value)}
