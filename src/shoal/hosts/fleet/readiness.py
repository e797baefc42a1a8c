"""Whether an engine can serve, which kind it is, what it serves, and where it publishes KV events.

Ready means: `/v1/models` names a model, and the engine's cheapest health path answers.  SGLang's `/health` runs
a generation, so `/model_info` is asked there; engines without a health path (llama.cpp) go by their models.
How often to ask and what follows from an answer is `member`'s.
"""

from shoal.hosts.fleet.door import EngineDoor, Unreachable
from shoal.hosts.fleet.pace import Pace
from shoal.kernel import InvalidInput
from shoal.pool import ServedModel
from shoal.pool.kvevents import KvSource
from shoal.wire import parse_models
from shoal.wire.kvsources import parse_event_sources, parse_server_info

MAX_METRICS_BYTES = 4 << 20
MAX_MODELS_BYTES = 1 << 20
_MAX_HEALTH_BYTES = 1 << 16
NO_SUCH_PATH = (404, 405, 501)

_MARKS = (
    (b"sglang:", "sglang"),
    (b"trtllm_", "trtllm-serve"),
    (b"nv_trt_llm_", "triton-tensorrt-llm"),
    (b"vllm:", "vllm"),
)


def detect_engine(page: bytes) -> str:
    """Return the kind of engine that writes such a metrics page, "" when none is recognised."""
    return next((engine for mark, engine in _MARKS if b"\n" + mark in page or page.startswith(mark)), "")


class Readiness:
    """The checks of one endpoint.  Every method raises Unreachable with the reason why it is not ready."""

    __slots__ = ("_door", "_has_health_path", "_pace", "_speaks_tls")

    def __init__(self, door: EngineDoor, pace: Pace) -> None:
        self._door = door
        self._pace = pace
        self.forget()

    def forget(self) -> None:
        """Another engine may run at this address now: look for its health path anew."""
        self._has_health_path = True
        self._speaks_tls: bool | None = None

    async def models(self) -> tuple[ServedModel, ...]:
        """Read `/v1/models`, the first thing that an engine is asked."""
        try:
            body = await self._call("/v1/models", MAX_MODELS_BYTES)
        except Unreachable as error:
            raise Unreachable(await self._hinted(error), error.status) from None
        try:
            models = parse_models(body)
        except InvalidInput as error:
            raise Unreachable(str(error), 200) from None
        if not models:
            raise Unreachable("/v1/models names no model", 200)
        return models

    async def engine(self) -> str:
        """Find out the kind of engine by its metrics page, "" when the page tells nothing or is not there."""
        try:
            return detect_engine(await self._call("/metrics", MAX_METRICS_BYTES))
        except Unreachable:
            return ""

    async def kv_sources(self, engine: str, host: str) -> tuple[KvSource, ...]:
        """Ask the engine where it publishes KV events; none when it does not, or cannot say.

        host: IP literal of the endpoint.  Raises Unreachable when it may say another time.
        """
        is_sglang = engine == "sglang"
        try:
            path, limit_bytes = ("/server_info", MAX_MODELS_BYTES) if is_sglang else ("/kv_event_sources", 1 << 16)
            body = await self._call(path, limit_bytes)
        except Unreachable as error:
            if 400 <= error.status < 500:
                return ()
            raise
        try:
            return parse_server_info(body, host) if is_sglang else parse_event_sources(body, host)
        except InvalidInput:
            return ()

    async def health(self, engine: str) -> None:
        """Ask the engine whether it is well, by the cheapest path that it has."""
        if self._has_health_path:
            try:
                await self._call("/model_info" if engine == "sglang" else "/health", _MAX_HEALTH_BYTES)
                return
            except Unreachable as error:
                if error.status not in NO_SUCH_PATH:
                    raise
            self._has_health_path = False
        await self.models()

    async def _hinted(self, error: Unreachable) -> str:
        """Why the call failed, and what to write instead where that can be told."""
        if error.status in NO_SUCH_PATH:
            return f"{error}: no OpenAI API is at this URL; is it an engine?"
        if error.may_want_tls:
            if self._speaks_tls is None:
                self._speaks_tls = await self._door.speaks_tls(self._pace.timeout_s)
            if self._speaks_tls:
                return "the server speaks TLS: write https://"
        return str(error)

    async def _call(self, path: str, limit_bytes: int) -> bytes:
        try:
            return await self._door.get(path, limit_bytes=limit_bytes, timeout_s=self._pace.timeout_s)
        except Unreachable as error:
            reason = f"{path} answered {error}" if error.status else str(error)
            raise Unreachable(reason, error.status) from None
