"""One request's conversation with Envoy: assembles head and body, asks the picker once, answers.

Owns the phases of ext_proc (BUFFERED from our own Envoy, FULL_DUPLEX_STREAMED from others) and nothing else of a
request: the checks at the door and the question to the router are `hosts.picker`'s.  Where the router answers later,
so does the exchange.
"""

import time
from collections.abc import Callable
from typing import Any

from shoal.hosts.extproc import replies
from shoal.hosts.picker import Answered, Picker, Placed
from shoal.hosts.waiting import Waiting
from shoal.pool import Outcome
from shoal.routing import Ended, Forward
from shoal.routing.commands import Cut, Evict
from shoal.wire.headers import joined

FULL_DUPLEX_STREAMED = 4
BODY_MODE_NONE = 0
SUBSET_NAMESPACE = "envoy.lb.subset_hint"
SUBSET_KEY = "x-gateway-destination-endpoint-subset"
SERVED_KEY = "x-gateway-destination-endpoint-served"


Send = Callable[[list[bytes] | Exception], None]
"""Takes replies that come late, or the fault because of which there are none."""


class _Late:
    """What is kept of a request while the router has not answered.  has_trailers: they wait for a reply as well."""

    __slots__ = ("body", "has_trailers", "is_body_phase", "send", "waiting")

    def __init__(self, waiting: Waiting, body: bytes, is_body_phase: bool) -> None:
        self.waiting = waiting
        self.body = body
        self.is_body_phase = is_body_phase
        self.has_trailers = False
        self.send: Send | None = None


class Exchange:
    """The state of one ext_proc stream."""

    __slots__ = (
        "_body",
        "_charged_bytes",
        "_ends_itself",
        "_first_byte_at",
        "_forward",
        "_headers",
        "_is_answered",
        "_is_duplex",
        "_key_name",
        "_late",
        "_method",
        "_path",
        "_picker",
        "_response_bytes",
        "_served",
        "_started_at",
        "_status",
        "_subset",
        "request_id",
    )

    def __init__(self, picker: Picker) -> None:
        self._picker = picker
        self.request_id = ""
        self._body: bytes | bytearray = b""
        self._charged_bytes = 0
        self._forward: Forward | None = None
        self._headers: dict[str, str] = {}
        # A gateway that streams learns only later that the pool has answered, and goes on with what it reads.
        self._is_answered = False
        self._is_duplex = False
        self._key_name = ""
        self._late: _Late | None = None
        self._method = self._path = ""
        self._subset: tuple[str, ...] | None = None
        # A gateway that is not ours shows us the response; then we make the record ourselves.
        self._ends_itself = False
        self._started_at = 0.0
        self._first_byte_at: float | None = None
        self._status = 0
        self._served = ""
        self._response_bytes = 0

    # ------------------------------------------------------------------ messages in

    def receive(self, message: Any) -> list[bytes]:
        """Take one ProcessingRequest and return the replies to send, in order; with none, see `send_late`."""
        phase = message.WhichOneof("request")
        if self._is_answered:
            return []
        if phase == "request_headers":
            return self._on_headers(message)
        if phase == "request_body":
            return self.receive_body(message.request_body.body, message.request_body.end_of_stream)
        if phase == "request_trailers":
            return self._on_trailers()
        return self._on_response(message, phase)

    def _on_headers(self, message: Any) -> list[bytes]:
        fields = message.request_headers.headers.headers
        headers = {each.key: (each.raw_value or each.value.encode()).decode("latin-1") for each in fields}
        if len(headers) < len(fields):
            headers = joined((each.key, (each.raw_value or each.value.encode()).decode("latin-1")) for each in fields)
        self._headers = headers
        self._method, self._path = headers.get(":method", ""), headers.get(":path", "")
        mode = message.protocol_config.request_body_mode if message.HasField("protocol_config") else None
        self._is_duplex = mode == FULL_DUPLEX_STREAMED
        if message.HasField("metadata_context"):
            self._subset = _subset(message.metadata_context)
        refusal = self._at_the_door(not message.request_headers.end_of_stream)
        if refusal is not None:
            return [refusal]
        answered = self._picker.models(self._method, self._path, headers)
        if answered is not None:
            return [self._answered(answered)]
        if message.request_headers.end_of_stream or mode == BODY_MODE_NONE or "upgrade" in headers:
            return self._decide(is_body_phase=False)
        return [] if self._is_duplex else [replies.CONTINUE_HEADERS]

    def _at_the_door(self, has_body: bool) -> bytes | None:
        """Refuse on the head alone what needs no body: no key, too long, too much buffered already."""
        picker, headers = self._picker, self._headers
        name = picker.let_in(self._path, headers)
        if isinstance(name, Answered):
            return self._answered(name)
        self._key_name = name
        if not has_body:
            return None
        declared = headers.get("content-length", "")
        is_declared = declared.isdecimal() and len(declared) < 16
        charged = picker.charge(self._path, headers, int(declared) if is_declared else None)
        if isinstance(charged, Answered):
            return self._answered(charged)
        self._charged_bytes = charged
        return None

    def receive_body(self, body: bytes, is_end: bool) -> list[bytes]:
        """Take a body, or in FULL_DUPLEX_STREAMED a part of one, and return the replies."""
        if self._is_answered:
            return []
        if not self._is_duplex:
            self._body = body
            return self._decide()
        if self._forward is not None or self._late is not None:
            return []
        refusal = self._grow(body)
        if refusal is not None:
            return [refusal]
        return self._decide() if is_end else []

    def _grow(self, part: bytes) -> bytes | None:
        """Take a part of a body, charged for what it has become; returns the refusal of one that grew too large."""
        if not self._body:
            self._body = bytearray()
        self._body += part
        size = len(self._body)
        if size <= self._charged_bytes:
            return None
        self._uncharge()
        charged = self._picker.charge(self._path, self._headers, size)
        if isinstance(charged, Answered):
            return self._answered(charged)
        self._charged_bytes = charged
        return None

    def _on_trailers(self) -> list[bytes]:
        decided = self._decide() if self._is_duplex else []
        if self._late is not None:
            self._late.has_trailers = True
            return decided
        return [*decided, replies.CONTINUE_TRAILERS]

    def send_late(self, send: Send) -> None:
        """Have `send` called from the loop when the router has answered, if it is still to do so."""
        if self._late is not None:
            self._late.send = send

    def _on_response(self, message: Any, phase: str) -> list[bytes]:
        self._ends_itself = True
        if phase == "response_headers":
            for header in message.response_headers.headers.headers:
                if header.key == ":status":
                    status = (header.raw_value or header.value.encode()).decode("latin-1")
                    self._status = int(status) if status.isdecimal() else 0
            if message.HasField("metadata_context"):
                self._served = _metadata_text(message.metadata_context, replies.LB_NAMESPACE, SERVED_KEY)
            return [self._response_headers()]
        if phase == "response_body":
            if self._first_byte_at is None:
                self._first_byte_at = time.monotonic()
            body = message.response_body
            self._response_bytes += len(body.body)
            if not self._is_duplex:
                return [replies.CONTINUE_RESPONSE_BODY]
            return replies.streamed_body(body.body, is_response=True, is_end=body.end_of_stream)
        return [replies.CONTINUE_RESPONSE_TRAILERS]

    def _response_headers(self) -> bytes:
        """Let the head of an answer pass, with the headers that plugins add; our own Envoy adds them by itself."""
        added = self._forward.response_headers if self._forward is not None else ()
        return replies.answer_headers(added) if added else replies.CONTINUE_RESPONSE_HEADERS

    # ------------------------------------------------------------------ the decision

    def _decide(self, is_body_phase: bool = True) -> list[bytes]:
        if self._late is not None:
            return []
        body = bytes(self._body)  # which costs nothing where it is that already
        self._uncharge()
        self._body = b""
        if self._forward is not None:
            return []
        picker = self._picker
        self.request_id = picker.mint()
        self._started_at = time.monotonic()
        placed = picker.ask(
            self.request_id, self._method, self._path, self._headers, body, self._key_name, self._subset
        )
        if type(placed) is Waiting:
            self._wait(placed, body, is_body_phase)
            return []
        return self._reply(placed, body, is_body_phase)

    def _reply(self, placed: Placed | Answered, body: bytes, is_body_phase: bool) -> list[bytes]:
        if isinstance(placed, Answered):
            return [self._answered(placed)]
        self._forward = placed.forward
        return self._send(placed, body, is_body_phase)

    def _wait(self, waiting: Waiting, body: bytes, is_body_phase: bool) -> None:
        """Keep the request, and its body charged, until the router answers."""
        self._late = _Late(waiting, body, is_body_phase)
        self._charged_bytes = len(body)
        self._picker.buffered_bytes += len(body)
        waiting.then(self._answer_late)

    def _answer_late(self, placed: Placed | Answered | Exception) -> None:
        late, self._late = self._late, None
        self._uncharge()
        if late is None or late.send is None:
            return
        if isinstance(placed, Exception):
            late.send(placed)
            return
        answers = self._reply(placed, late.body, late.is_body_phase)
        late.send([*answers, replies.CONTINUE_TRAILERS] if late.has_trailers else answers)

    def _send(self, placed: Placed, body: bytes, is_body_phase: bool) -> list[bytes]:
        picker, forward = self._picker, placed.forward
        is_duplex, is_changed = self._is_duplex, placed.body is not body
        # A gateway's ORIGINAL_DST cluster reads one address and answers a list with 503.
        named = forward.endpoints[: picker.asked_for] if picker.is_behind_gateway else forward.endpoints
        removed = tuple([name for name in picker.removed_headers if name in self._headers])
        if is_changed and "content-encoding" in self._headers:
            removed = (*removed, "content-encoding")
        reply = replies.routed(
            is_body_phase=is_body_phase and not is_duplex,
            destination=",".join(named),
            request_id=self.request_id,
            picker_id=picker.picker_id,
            # A gateway that streams the body has routes of its own, which say how often a request may be tried again.
            retries=None if is_duplex and forward.retry_allowed else picker.retries_of(forward),
            removed=removed,
            own=forward.response_headers,
            length=len(placed.body) if is_changed else None,
            body=placed.body if is_changed and not is_duplex else None,
            skips_response_body=is_duplex,
        )
        if not is_duplex or not is_body_phase:
            return [reply]
        return [reply, *replies.streamed_body(placed.body)]

    # ------------------------------------------------------------------ refusals and the end

    def cut(self, command: Cut | Evict) -> list[bytes]:
        """Return the reply that ends a placed request: Envoy answers so, or breaks off an answer that has begun."""
        if self._forward is None:
            return []
        return [self._answered(self._picker.cut(command, self._headers))]

    def _answered(self, answered: Answered) -> bytes:
        self._uncharge()
        self._is_answered, self._body = True, b""
        status, headers, body, details = answered
        return replies.immediate(status, headers, body, details, self._picker.picker_id)

    def _uncharge(self) -> None:
        self._picker.uncharge(self._charged_bytes)
        self._charged_bytes = 0

    def end(self) -> None:
        """The stream is over: release what it held, once."""
        self._uncharge()
        self._body = b""
        late, self._late = self._late, None
        if late is not None:
            late.waiting.cancel()
        if self._forward is None:
            return
        driver, forward, self._forward = self._picker.driver, self._forward, None
        driver.feed(Ended(self.request_id, self._own_record(forward) if self._ends_itself else None))

    def _own_record(self, forward: Forward) -> Outcome:
        now = time.monotonic()
        first = self._first_byte_at
        return Outcome(
            status=self._status,
            served_address=self._served or forward.endpoints[0],
            ttft_s=None if first is None else first - self._started_at,
            duration_s=now - self._started_at,
            response_bytes=self._response_bytes,
            is_upstream_failure=self._status in (500, 502, 503, 504),
        )


def _subset(context: Any) -> tuple[str, ...] | None:
    """The endpoints that the gateway allows, None when it did not say."""
    if SUBSET_NAMESPACE not in context.filter_metadata:
        return None
    fields = context.filter_metadata[SUBSET_NAMESPACE].fields
    if SUBSET_KEY not in fields:
        return None
    value = fields[SUBSET_KEY]
    if value.WhichOneof("kind") == "string_value":
        names = value.string_value.split(",")
    else:
        names = [entry.string_value for entry in value.list_value.values]
    return tuple(name.strip() for name in names[:4096] if name.strip())


def _metadata_text(context: Any, namespace: str, key: str) -> str:
    if namespace not in context.filter_metadata:
        return ""
    fields = context.filter_metadata[namespace].fields
    return str(fields[key].string_value) if key in fields else ""
