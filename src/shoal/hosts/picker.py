"""The picker as every data plane asks it: the checks at the door, one question to the router, the pool's own answers.

Owns key, declared length and the budget of buffered bodies, the way from bytes to a booked endpoint, and what changes
in a request on its way to an engine.  How bytes come and go is for the hosts; it decides nothing about load.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import NamedTuple
from urllib.parse import unquote

from shoal.hosts.driver import Driver
from shoal.hosts.waiting import Asked, TokenSource, Waiting
from shoal.kernel import InvalidInput
from shoal.pool import Api, Refusal, RefusalReason, Request
from shoal.prefix import BlockHasher
from shoal.routing import Arrived, Ended, Forward, Refuse
from shoal.routing.claims import Claims
from shoal.routing.commands import Cut, Evict, Fetch
from shoal.routing.config import RouterConfig
from shoal.wire import Limits, answer, api_of, decode, refusal_of, render_model, render_models, rewrite

# A body of unknown length is charged as this much until it is there.
UNKNOWN_LENGTH_BYTES = 1 << 20
# Bodies up to this size never wait for the budget, so that large ones cannot shut them out; it takes 16,000 of these to
# fill the default budget once more.
SMALL_BODY_BYTES = 1 << 16
TRACE_HEADERS = ("traceparent",)
CLIENT_KEY_HEADERS = ("authorization", "x-api-key")
MODELS_PATH = "/v1/models"
JSON_TYPE = (("content-type", "application/json"),)


class Answered(NamedTuple):
    """An answer that no engine gives.  details: the reason of a refusal, or `models`."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes
    details: str


class Placed(NamedTuple):
    """A request that is booked on an endpoint; the host owes the router its `Ended`.

    body: what the engine gets; the very object that was asked about unless something in it was changed, and then plain.
    """

    request: Request
    forward: Forward
    body: bytes


class Picker:
    """What all requests of one worker share.

    picker_id: names this worker in records.  check_key: (authorization, x-api-key) -> the key's name, None for a bad
    one; None when the pool is open.  draining: set when another worker takes over.  buffered_bytes: what the bodies
    that are being received were charged.  tokens: where the tokens of prompts come from, None for the estimate alone.
    is_behind_gateway: the Envoy is somebody else's.  asked_for: how many endpoints the file wants a decision to name.
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
        self.is_behind_gateway = False
        self.tokens: TokenSource | None = None
        self._run = run
        self._minted = 0
        self.configure(config)

    def configure(self, config: RouterConfig) -> None:
        """Take new host settings; requests under way keep theirs."""
        self.settings = settings = config.pool
        self.claims = Claims(config)
        self.asked_for = config.policy.profile.picker.plugin.max_num_of_endpoints
        if "retries.fallbacks" in config.stated:
            self.asked_for += config.policy.fallbacks
        kept = (*config.request_headers, *(TRACE_HEADERS if settings.tracing.otlp_endpoint else ()))
        self.limits = Limits(max_body_bytes=settings.limits.max_body_bytes, kept_headers=kept)
        self.removed_headers = () if settings.forward_client_key else CLIENT_KEY_HEADERS
        self._injects_usage = settings.usage == "inject"

    def mint(self) -> str:
        """Return an id that is unique in the pool: this run's random name and a count."""
        self._minted += 1
        return f"{self._run}-{self._minted}"

    # ------------------------------------------------------------------ at the door

    def let_in(self, path: str, headers: Mapping[str, str]) -> str | Answered:
        """Return the name of the key that a request shows, "" in an open pool, or the 401.

        headers: lower-case names, here as in every method.
        """
        if self.check_key is None:
            return ""
        name = self.check_key(headers.get("authorization"), headers.get("x-api-key"))
        if name is not None:
            return name
        message = "Missing or unknown API key: send `Authorization: Bearer KEY` or `x-api-key: KEY`."
        return self.refused(path, headers, RefusalReason.UNAUTHORIZED, message)

    def charge(self, path: str, headers: Mapping[str, str], length: int | None) -> int | Answered:
        """Take the budget for a body of `length` bytes (None: not declared) before it is received.

        Returns what to give back to `uncharge`, or the 413 or 429.
        """
        limits = self.settings.limits
        charged = min(UNKNOWN_LENGTH_BYTES, limits.max_body_bytes) if length is None else length
        if charged > limits.max_body_bytes:
            return self.too_large(path, headers)
        if charged > SMALL_BODY_BYTES and charged + self.buffered_bytes > limits.max_buffered_bytes:
            message = "Too many request bodies are being received; try again."
            return self.refused(path, headers, RefusalReason.SATURATED, message, retry_after_s=1.0)
        self.buffered_bytes += charged
        return charged

    def uncharge(self, charged: int) -> None:
        """Give the budget back: the body is there, or will not come."""
        self.buffered_bytes -= charged

    def models(self, method: str, path: str, headers: Mapping[str, str]) -> Answered | None:
        """Answer for the whole pool: its models, or the one that `path` names; None when it asks for neither."""
        if method != "GET" or not path.startswith(MODELS_PATH):
            return None
        path = path.partition("?")[0]
        if path != MODELS_PATH and not path.startswith(f"{MODELS_PATH}/"):
            return None
        models = self.driver.router.models()
        name = unquote(path[len(MODELS_PATH) + 1 :])
        if not name:
            return Answered(200, JSON_TYPE, render_models(models), "models")
        for model in models:
            if model.id == name:
                return Answered(200, JSON_TYPE, render_model(model), "models")
        message = f"The model `{name[:200]}` does not exist."
        return self.refused(path, headers, RefusalReason.MODEL_NOT_FOUND, message)

    # ------------------------------------------------------------------ the decision

    def ask(
        self,
        request_id: str,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes,
        tenant: str = "",
        subset: tuple[str, ...] | None = None,
    ) -> Placed | Answered | Waiting:
        """Read a complete request and have the router place it, now or later.

        request_id: from `mint`.  tenant: who the key belongs to, "" when there are no keys.  subset: the endpoints that
        a gateway allows, None when it did not say.  Whatever is raised leaves nothing booked.
        """
        try:
            decoded = decode(request_id, method, path, headers, body, self.limits, subset)
            request = self.claims.settle(decoded.request, tenant)
            blocks = b""
            if decoded.prompts:
                model = self.driver.router.canonical(request.model)
                blocks = self.hasher.hash_bytes(decoded.prompts, (model, decoded.salt.hex()))
            return self._place(request, blocks, headers, body)
        except InvalidInput as error:
            refusal = refusal_of(error)
            return self.refused(path, headers, refusal.reason, refusal.message, request_id=request_id)

    def _place(
        self, request: Request, blocks: bytes, headers: Mapping[str, str], body: bytes
    ) -> Placed | Answered | Waiting:
        request_id = request.id
        try:
            commands = self.driver.feed(Arrived(request, blocks))
            for command in commands:
                if type(command) is Forward and command.request_id == request_id:
                    return Placed(request, command, self._rewritten(command, request, headers, body))
                if type(command) is Refuse and command.request_id == request_id:
                    return self._answered(command.refusal, command.api, headers, request_id)
        except Exception:
            # A plugin may fail after the work was booked.
            self.driver.feed(Ended(request_id))
            raise
        waiting = Waiting(self, Asked(request, headers, body))
        for command in commands:
            if type(command) is Fetch and command.request_id == request_id:
                waiting.take(command)
        return waiting

    def carry_out(
        self, command: Forward | Refuse, request: Request, headers: Mapping[str, str], body: bytes
    ) -> Placed | Answered:
        """Return what the router's late word on a request means for it.  Whatever is raised leaves it booked."""
        if isinstance(command, Forward):
            return Placed(request, command, self._rewritten(command, request, headers, body))
        return self._answered(command.refusal, command.api, headers, request.id)

    def _rewritten(self, forward: Forward, request: Request, headers: Mapping[str, str], body: bytes) -> bytes:
        injects = self._injects_usage and request.is_streaming
        if not (injects or forward.model) or not body:
            return body
        changed = rewrite(
            body,
            request.api,
            model=forward.model,
            inject_usage=injects,
            content_type=headers.get("content-type", ""),
            content_encoding=headers.get("content-encoding", ""),
            limits=self.limits,
        )
        return body if changed == body else changed

    def retries_of(self, forward: Forward) -> int:
        """Return how often a request may be tried again; past the end of its list are engines of other models."""
        if not forward.retry_allowed:
            return 0
        return min(len(forward.endpoints) - 1, self.settings.retries.attempts)

    # ------------------------------------------------------------------ refusals

    def too_large(self, path: str, headers: Mapping[str, str]) -> Answered:
        """Refuse a body over the limit."""
        message = f"The request body is over the limit of {self.limits.max_body_bytes} bytes."
        return self.refused(path, headers, RefusalReason.BODY_TOO_LARGE, message)

    def cut(self, command: Cut | Evict, headers: Mapping[str, str]) -> Answered:
        """Return what a client gets in the place of an answer that the router has cut before it began."""
        return self._answered(command.refusal, command.api, headers, command.request_id)

    def refused(
        self,
        path: str,
        headers: Mapping[str, str],
        reason: RefusalReason,
        message: str,
        *,
        retry_after_s: float | None = None,
        request_id: str = "",
    ) -> Answered:
        """Count a refusal that the router was not asked about, and return it in the shape of the path's API."""
        self.driver.fold.refused_at_door(reason)
        refusal = Refusal(reason=reason, message=message, retry_after_s=retry_after_s)
        return self._answered(refusal, api_of(path), headers, request_id)

    def _answered(self, refusal: Refusal, api: Api, headers: Mapping[str, str], request_id: str) -> Answered:
        local = answer(refusal, api, headers.get("x-request-id", request_id))
        return Answered(local.status, local.headers, local.body, str(refusal.reason))
