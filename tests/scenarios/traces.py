"""A receiver of OpenTelemetry traces: a tiny HTTP server in a thread that keeps what it got."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


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
        return [
            (span["name"], {each["key"]: str(each["value"]) for each in span["attributes"]}) for span in self._all()
        ]

    def trace_ids(self) -> set[str]:
        """The traces that spans belong to."""
        return {span["traceId"] for span in self._all()}

    def _all(self) -> Iterator[dict[str, Any]]:
        for body in self.bodies:
            for resource in json.loads(body)["resourceSpans"]:
                for scope in resource["scopeSpans"]:
                    yield from scope["spans"]


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
