"""One request's conversation with Envoy: assembles head and body, asks the router once, answers.

Owns the phases of ext_proc (BUFFERED from our own Envoy, FULL_DUPLEX_STREAMED from others) and the checks at the door:
key, declared length, buffered bytes.  It decides nothing about load.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

import msgspec

from shoal.hosts.driver import Driver
from shoal.hosts.extproc import replies
from shoal.kernel import InvalidInput
from shoal.pool import Api, Outcome, Refusal, RefusalReason
from shoal.prefix import BlockHasher
from shoal.routing import Arrived, Ended, Forward, Recorded, Refuse
from shoal.routing.config import RouterConfig
from shoal.wire import Limits, answer, api_of, decode, refusal_of, render_model, render_models, rewrite

log = logging.getLogger("shoal.extproc")

FULL_DUPLEX_STREAMED = 4
BODY_MODE_NONE = 0
# A body of unknown length is charged as this much until it is there.
UNKNOWN_LENGTH_BYTES = 1 << 20
SUBSET_NAMESPACE = "envoy.lb.subset_hint"
SUBSET_KEY = "x-gateway-destination-endpoint-subset"
SERVED_KEY = "x-gateway-destination-endpoint-served"
TRACE_HEADERS = ("traceparent",)
# Bodies up to this size never wait for the budget: large ones cannot shut them out.
SMALL_BODY_BYTES = 1 << 20
MODELS_PATH = "/v1/models"
JSON_TYPE = (("content-type", "application/json"),)
CLIENT_KEY_HEADERS = ("authorization", "x-api-key")


class Picker:
    """What all exchanges of one worker share.

    picker_id: names this worker in records.  check_key: (authorization, x-api-key) -> the key's name, None for a bad
    one; None when the pool is open.  draining: set when another worker takes over; access-log streams then end,
    so that Envoy opens them anew to its successor.
    """

    def __init__(
        self,
        driver: Driver,
        config: RouterConfig,
        hasher: BlockHasher,
        picker_id: str,
        run: str,
        check_key: Callable[[str | None, str | None], str | None] | None = None,
    ) -> None:
        self.driver = driver
        self.hasher = hasher
        self.picker_id = picker_id
        self.check_key = check_key
        self.draining = asyncio.Event()
        self.buffered_bytes = 0
        self._run = run
        self._minted = 0
        self.configure(config)

    def configure(self, config: RouterConfig) -> None:
        """Take new host settings; requests under way keep theirs."""
        self.settings = settings = config.pool
        kept = (*config.request_headers, *(TRACE_HEADERS if settings.tracing.otlp_endpoint else ()))
        self.limits = Limits(max_body_bytes=settings.limits.max_body_bytes, kept_headers=kept)

    def mint(self) -> str:
        """Return an id that is unique in the pool: this run's random name and a count."""
        self._minted += 1
        return f"{self._run}-{self._minted}"


class Exchange:
    """The state of one ext_proc stream."""

    __slots__ = (
        "_body",
        "_charged_bytes",
        "_ends_itself",
        "_first_byte_at",
        "_forward",
        "_headers",
        "_is_duplex",
        "_key_name",
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
        self._body: list[bytes] = []
        self._charged_bytes = 0
        self._forward: Forward | None = None
        self._headers: dict[str, str] = {}
        self._is_duplex = False
        self._key_name = ""
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
        """Take one ProcessingRequest and return the replies to send, in order."""
        phase = message.WhichOneof("request")
        if phase == "request_headers":
            return self._on_headers(message)
        if phase == "request_body":
            return self._on_body(message.request_body)
        if phase == "request_trailers":
            return [*(self._decide() if self._is_duplex else ()), replies.CONTINUE_TRAILERS]
        return self._on_response(message, phase)

    def _on_headers(self, message: Any) -> list[bytes]:
        self._headers = headers = {
            header.key: (header.raw_value or header.value.encode()).decode("latin-1")
            for header in message.request_headers.headers.headers
        }
        self._method, self._path = headers.get(":method", ""), headers.get(":path", "")
        mode = message.protocol_config.request_body_mode if message.HasField("protocol_config") else None
        self._is_duplex = mode == FULL_DUPLEX_STREAMED
        if message.HasField("metadata_context"):
            self._subset = _subset(message.metadata_context)
        refusal = self._at_the_door(not message.request_headers.end_of_stream)
        if refusal is not None:
            return [refusal]
        path = self._path.partition("?")[0]
        if self._method == "GET" and (path == MODELS_PATH or path.startswith(f"{MODELS_PATH}/")):
            return [self._models(unquote(path[len(MODELS_PATH) + 1 :]))]
        if message.request_headers.end_of_stream or mode == BODY_MODE_NONE or "upgrade" in headers:
            return self._decide(is_body_phase=False)
        return [] if self._is_duplex else [replies.CONTINUE_HEADERS]

    def _models(self, name: str) -> bytes:
        """Answer for the whole pool: its models, or the one of that name."""
        models = self._picker.driver.router.models()
        if not name:
            body = render_models(models)
        else:
            found = [model for model in models if model.id == name]
            if not found:
                return self._refused(RefusalReason.MODEL_NOT_FOUND, f"The model `{name[:200]}` does not exist.")
            body = render_model(found[0])
        return replies.immediate(200, JSON_TYPE, body, "models", self._picker.picker_id)

    def _at_the_door(self, has_body: bool) -> bytes | None:
        """Refuse on the head alone what needs no body: no key, too long, too much buffered already."""
        picker, limits = self._picker, self._picker.settings.limits
        get = self._headers.get
        if picker.check_key is not None:
            name = picker.check_key(get("authorization"), get("x-api-key"))
            if name is None:
                return self._refused(
                    RefusalReason.UNAUTHORIZED,
                    "Missing or unknown API key: send `Authorization: Bearer KEY` or `x-api-key: KEY`.",
                )
            self._key_name = name
        if not has_body:
            return None
        declared = get("content-length", "")
        is_declared = declared.isdecimal() and len(declared) < 16
        length = int(declared) if is_declared else min(UNKNOWN_LENGTH_BYTES, limits.max_body_bytes)
        if length > limits.max_body_bytes:
            return self._too_large()
        if length > SMALL_BODY_BYTES and length + picker.buffered_bytes > limits.max_buffered_bytes:
            return self._refused(
                RefusalReason.SATURATED, "Too many request bodies are being received; try again.", retry_after_s=1.0
            )
        self._charged_bytes = length
        picker.buffered_bytes += length
        return None

    def _on_body(self, message: Any) -> list[bytes]:
        body = message.body
        if not self._is_duplex:
            self._body = [body]
            return self._decide()
        if self._forward is not None:
            return []
        self._body.append(body)
        if sum(map(len, self._body)) > self._picker.limits.max_body_bytes:
            return [self._too_large()]
        return self._decide() if message.end_of_stream else []

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
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._uncharge()
        self._body = []
        if self._forward is not None:
            return []
        try:
            return self._ask(body, is_body_phase)
        except InvalidInput as error:
            refusal = refusal_of(error)
            return [self._refused(refusal.reason, refusal.message)]

    def _ask(self, body: bytes, is_body_phase: bool) -> list[bytes]:
        picker = self._picker
        self.request_id = picker.mint()
        self._started_at = time.monotonic()
        decoded = decode(self.request_id, self._method, self._path, self._headers, body, picker.limits, self._subset)
        request = decoded.request
        if self._key_name:
            # Who a request belongs to is the key's word where there are keys, not a header's.
            request = msgspec.structs.replace(request, tenant_id=self._key_name)
        blocks = b""
        if decoded.prompts:
            model = picker.driver.router.canonical(request.model)
            blocks = picker.hasher.hash_prompt(decoded.prompts, (model, decoded.salt.hex())).tobytes()
        try:
            commands = picker.driver.feed(Arrived(request, blocks))
        except Exception:
            # A plugin may fail after the work was booked.
            picker.driver.feed(Ended(self.request_id))
            raise
        for command in commands:
            if isinstance(command, Refuse) and command.request_id == self.request_id:
                return [self._answered(command.refusal, command.api)]
            if isinstance(command, Forward) and command.request_id == self.request_id:
                self._forward = command
                return self._send(command, body, request.api, request.is_streaming, is_body_phase)
        raise RuntimeError("the router neither forwarded nor refused the request")

    def _send(self, forward: Forward, body: bytes, api: Api, is_streaming: bool, is_body_phase: bool) -> list[bytes]:
        picker = self._picker
        destination = ",".join(forward.endpoints)
        set_headers = [(replies.DESTINATION, destination)]
        remove = [] if picker.settings.forward_client_key else [h for h in CLIENT_KEY_HEADERS if h in self._headers]
        if not self._is_duplex or not forward.retry_allowed:
            # A retry past the end of the list would go to any engine of the fleet, also one of another model.
            retries = min(len(forward.endpoints) - 1, picker.settings.retries.attempts) if forward.retry_allowed else 0
            set_headers.append(("x-envoy-max-retries", str(retries)))
        new_body = self._rewritten(forward, body, api, is_streaming)
        if new_body is not None:
            set_headers.append(("content-length", str(len(new_body))))
            if "content-encoding" in self._headers:
                remove.append("content-encoding")
        reply = replies.routed(
            is_body_phase=is_body_phase and not self._is_duplex,
            set_headers=set_headers,
            remove_headers=remove,
            metadata={
                replies.OWN_NAMESPACE: {
                    "id": self.request_id,
                    "picker": picker.picker_id,
                    **dict(forward.response_headers),
                },
                replies.LB_NAMESPACE: {replies.DESTINATION: destination},
            },
            body=None if self._is_duplex else new_body,
            skips_response_body=self._is_duplex,
        )
        if not self._is_duplex or not is_body_phase:
            return [reply]
        return [reply, *replies.streamed_body(body if new_body is None else new_body)]

    def _rewritten(self, forward: Forward, body: bytes, api: Api, is_streaming: bool) -> bytes | None:
        injects = is_streaming and self._picker.settings.usage == "inject"
        if not body or not (forward.model or injects):
            return None
        changed = rewrite(
            body,
            api,
            model=forward.model,
            inject_usage=injects,
            content_type=self._headers.get("content-type", ""),
            content_encoding=self._headers.get("content-encoding", ""),
            limits=self._picker.limits,
        )
        return None if changed == body else changed

    # ------------------------------------------------------------------ refusals and the end

    def _too_large(self) -> bytes:
        limit = self._picker.limits.max_body_bytes
        return self._refused(RefusalReason.BODY_TOO_LARGE, f"The request body is over the limit of {limit} bytes.")

    def _refused(self, reason: RefusalReason, message: str, retry_after_s: float | None = None) -> bytes:
        refusal = Refusal(reason=reason, message=message, retry_after_s=retry_after_s)
        self._picker.driver.fold.refused_at_door(reason)
        return self._answered(refusal, api_of(self._path))

    def _answered(self, refusal: Refusal, api: Api) -> bytes:
        self._uncharge()
        local = answer(refusal, api, self._headers.get("x-request-id", self.request_id))
        return replies.immediate(local.status, local.headers, local.body, str(refusal.reason), self._picker.picker_id)

    def _uncharge(self) -> None:
        self._picker.buffered_bytes -= self._charged_bytes
        self._charged_bytes = 0

    def end(self) -> None:
        """The stream is over: release what it held, once."""
        self._uncharge()
        self._body = []
        if self._forward is None:
            return
        driver, forward, self._forward = self._picker.driver, self._forward, None
        if self._ends_itself:
            driver.feed(Recorded(self.request_id, self._own_record(forward)))
        driver.feed(Ended(self.request_id))

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
