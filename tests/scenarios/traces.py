"""A receiver of OpenTelemetry traces: a tiny HTTP server in a thread that keeps what it got."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Receiver:
    """url: where to send traces.  bodies: every request, as it came."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver.bodies.append(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1/traces"

    def spans(self) -> list[tuple[str, dict[str, str]]]:
        """Name and attributes of every span so far."""
        found = []
        for body in self.bodies:
            message = ExportTraceServiceRequest()
            message.ParseFromString(body)
            for resource in message.resource_spans:
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        found.append((span.name, {each.key: str(each.value) for each in span.attributes}))
        return found

    def trace_ids(self) -> set[str]:
        """The traces that spans belong to."""
        found = set()
        for body in self.bodies:
            message = ExportTraceServiceRequest()
            message.ParseFromString(body)
            for resource in message.resource_spans:
                for scope in resource.scope_spans:
                    found |= {span.trace_id.hex() for span in scope.spans}
        return found


@contextmanager
def receiver() -> Iterator[Receiver]:
    """A running receiver."""
    running = Receiver()
    thread = threading.Thread(target=running.server.serve_forever, daemon=True)
    thread.start()
    try:
        yield running
    finally:
        running.server.shutdown()
        running.server.server_close()
        thread.join()
