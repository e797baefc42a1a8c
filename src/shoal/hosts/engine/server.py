"""The HTTP server of one embedded engine: routes, the door, start and stop.

Owns what every request passes: loading, API key, injected failures, request ids, counting.  aiohttp's low-level
server is used without a router: a dictionary finds the handler.
"""

import asyncio
import errno
import ssl
import time
from collections import Counter
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from shoal.engine import Engine, EngineConfig
from shoal.hosts.engine import controlling, generating, operating, reading
from shoal.hosts.engine.answers import Answers
from shoal.hosts.engine.catalog import Catalog
from shoal.hosts.engine.config import EngineServerConfig
from shoal.hosts.engine.context import Call, Context
from shoal.hosts.engine.control import Control
from shoal.hosts.engine.driver import EngineDriver
from shoal.hosts.engine.errors import ApiError, unreadable
from shoal.hosts.engine.exposition import Exposition
from shoal.hosts.engine.faults import FaultBox
from shoal.hosts.engine.kvforms import KvEncoder
from shoal.hosts.engine.kvpublisher import KvPublisher
from shoal.hosts.engine.lag import LoopLag
from shoal.hosts.engine.meter import HttpCounts, Meter
from shoal.hosts.engine.planning import Planner
from shoal.hosts.engine.ranks import Rank, Ranks
from shoal.hosts.engine.recording import Recorder
from shoal.hosts.engine.streams import reset
from shoal.kernel import Chance, ConfigError

Handler = Callable[[Context, Call], Awaitable[web.StreamResponse]]

_API: dict[str, Handler] = {
    "/v1/chat/completions": generating.chat_completions,
    "/v1/completions": generating.completions,
    "/v1/responses": generating.responses,
    "/v1/messages": generating.messages,
    "/v1/messages/count_tokens": generating.count_tokens,
    "/inference/v1/generate": generating.generate,
    "/v1/audio/transcriptions": generating.transcriptions,
    "/v1/audio/translations": generating.transcriptions,
    "/v1/embeddings": reading.embeddings,
    "/pooling": reading.pool,
    "/score": reading.score,
    "/v1/score": reading.score,
    "/rerank": reading.rerank,
    "/v1/rerank": reading.rerank,
    "/v2/rerank": reading.rerank,
    "/tokenize": reading.tokenize,
    "/detokenize": reading.detokenize,
}
_OPERATING: dict[tuple[str, str], Handler] = {
    ("GET", "/health"): operating.health,
    ("GET", "/ping"): operating.health,
    ("GET", "/version"): operating.version,
    ("GET", "/v1/models"): operating.models,
    ("GET", "/metrics"): operating.metrics,
    ("GET", "/kv_event_sources"): operating.kv_event_sources,
    ("GET", "/server_info"): operating.server_info,
    ("POST", "/v1/load_lora_adapter"): operating.load_adapter,
    ("POST", "/v1/unload_lora_adapter"): operating.unload_adapter,
    ("GET", "/faults"): operating.show_faults,
    ("POST", "/faults"): operating.change_faults,
    **controlling.HANDLERS,
}
_KNOWN_PATHS = {*_API, *(path for _, path in _OPERATING), "/load", "/requests"}
_KEEPALIVE_S = 75.0
_BACKLOG = 2048


class EngineServer:
    """One embedded engine behind HTTP.  `start` and `stop` once each, on the running loop."""

    def __init__(self) -> None:
        self._context: Context | None = None
        self._listener: asyncio.Server | None = None
        self._server: web.Server | None = None
        self._lag: LoopLag | None = None
        self._in_flight = 0
        self._ready_at = 0.0

    async def start(self, config: EngineServerConfig) -> int:
        """Listen and return the port.  Raises ConfigError when the port is taken or the configuration is wrong."""
        if not config.models:
            raise ConfigError("at least one model name is needed", source="--model")
        if not 0 <= config.port <= 65535:  # uvloop would quietly take another one
            raise ConfigError(f"{config.port} is no port", source="--port")
        engine_config = config.engine()
        tls = _tls(config)
        self._loop = asyncio.get_running_loop()
        self._config = config
        self._recorder = Recorder(config.record_last)
        self._chance = Chance(config.seed).stream("faults")
        self._lag = LoopLag()
        ranks = Ranks()
        try:
            self._context = _assemble(config, engine_config, self._lag, ranks)
        except ConfigError:
            self._lag.close()
            await ranks.close()
            raise
        self._ready_at = self._loop.time() + config.startup_delay_s
        self._server = web.Server(
            self._serve, handler_cancellation=True, access_log=None, keepalive_timeout=_KEEPALIVE_S
        )
        try:
            self._listener = await self._loop.create_server(
                self._server, config.host, config.port, ssl=tls, backlog=_BACKLOG
            )
        except OSError as error:
            await self.stop()
            reason = "is already taken" if error.errno == errno.EADDRINUSE else f"cannot be listened on: {error}"
            raise ConfigError(f"{config.host}:{config.port} {reason}", source="--port") from None
        return int(self._listener.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Stop listening, cut what is still open, and free the port."""
        if self._listener is not None:
            self._listener.close()
        if self._server is not None:
            self._server.pre_shutdown()
            await self._server.shutdown(0.01)
        if self._context is not None:
            await self._context.ranks.close()
        if self._lag is not None:
            self._lag.close()

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request; every way out is counted."""
        assert self._context is not None
        if request.headers.get("Expect", "").lower() == "100-continue" and request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await request.content.read() if request.can_read_body else b""
        call = Call(request, body, self._context.planner.fresh_id())
        arrival = self._recorder.add(request, body) if request.path != "/requests" else None
        status = 499
        try:
            response = await self._route(call)
            status = response.status
        except (ApiError, msgspec.DecodeError) as raised:
            error = raised if isinstance(raised, ApiError) else unreadable(raised, body)
            status = error.status
            is_anthropic = request.path.startswith("/v1/messages")
            response = call.respond(error.anthropic_body() if is_anthropic else error.body(), status)
        finally:
            if arrival is not None:
                arrival.outcome = "left" if status == 499 else str(status)
            if request.path != "/metrics":
                handler = request.path if request.path in _KNOWN_PATHS else "none"
                self._context.requests[handler, request.method, status // 100] += 1
        return response

    async def _route(self, call: Call) -> web.StreamResponse:
        """Find the handler and pass the door."""
        assert self._context is not None
        method, path = call.request.method, call.request.path
        if self._loop.time() < self._ready_at:
            raise ApiError(503, "The engine is still loading its model.", "ServiceUnavailableError")
        api = _API.get(path) if method == "POST" else None
        if self._config.api_key and path.startswith("/v1") and not self._has_key(call):
            return call.respond_json({"error": "Unauthorized"}, 401)
        if api is not None:
            return await self._answer(api, call)
        operating_handler = _OPERATING.get((method, path))
        if operating_handler is not None and (path != "/metrics" or self._config.has_metrics):
            return await operating_handler(self._context, call)
        if (method, path) == ("GET", "/load"):
            return call.respond_json({"server_load": self._in_flight})
        if (method, path) == ("GET", "/requests"):
            return call.respond(self._recorder.listing())
        if path in _KNOWN_PATHS and (path != "/metrics" or self._config.has_metrics):
            return call.respond_json({"detail": "Method Not Allowed"}, 405)
        return call.respond_json({"detail": "Not Found"}, 404)

    async def _answer(self, handler: Handler, call: Call) -> web.StreamResponse:
        """Answer an API request, or let an injected fault do so."""
        assert self._context is not None
        faults = self._context.box.faults
        if faults.cut_after == 0 and call.request.transport is not None:
            reset(call.request.transport)
            await self._loop.create_future()
        if faults.fail_rate and self._chance.random() < faults.fail_rate:
            raise ApiError(faults.fail_status, "Injected failure", "InternalServerError")
        self._in_flight += 1
        try:
            return await handler(self._context, call)
        finally:
            self._in_flight -= 1

    def _has_key(self, call: Call) -> bool:
        return call.request.headers.get("Authorization") == f"Bearer {self._config.api_key}"


def _assemble(config: EngineServerConfig, engine_config: EngineConfig, lag: LoopLag, ranks: Ranks) -> Context:
    """Make the parts of a server and join them.  ranks: filled, as far as they could be made."""
    now = time.time()
    max_model_len = config.context_limit(engine_config)
    catalog = Catalog(config.models, config.loras, engine_config.profile.name, max_model_len, now)
    box = FaultBox(config.faults)
    for number in range(config.data_parallel_size):
        ranks.add(_rank(number, config, engine_config, catalog, box))
    control = Control(ranks)
    requests: HttpCounts = Counter()
    block_size = ranks.all[0].engine.block_size
    return Context(
        config=config,
        catalog=catalog,
        planner=Planner(
            Answers(config.seed),
            block_size,
            max_model_len,
            config.seed,
            hash_seed=config.hash_seed,
            has_tokens=engine_config.has_cache_events,
        ),
        ranks=ranks,
        requests=requests,
        exposition=Exposition(ranks, requests, catalog, lag, control, now),
        box=box,
        control=control,
    )


def _rank(
    number: int, config: EngineServerConfig, engine_config: EngineConfig, catalog: Catalog, box: FaultBox
) -> Rank:
    engine = Engine(engine_config)
    name = config.models[0].replace("\\", "\\\\").replace('"', '\\"')
    labels = f'engine="{number}",model_name="{name}"'
    meter = Meter(labels)
    if not engine_config.has_cache_events:
        return Rank(engine, meter, labels, EngineDriver(engine, meter), None)
    publisher = _publisher(number, config, engine.block_size, catalog, box)
    return Rank(engine, meter, labels, EngineDriver(engine, meter, publisher.publish), publisher)


def _publisher(rank: int, config: EngineServerConfig, block_size: int, catalog: Catalog, box: FaultBox) -> KvPublisher:
    encoder = KvEncoder(config.kv_form, block_size, catalog.lora_id, has_bytes=config.has_bytes_hashes, rank=rank)
    has_topic = not config.kv_form.is_array if config.has_replay_topic is None else config.has_replay_topic
    return KvPublisher(config.kv_events.of_rank(rank), encoder, box, config.host, has_topic=has_topic)


def _tls(config: EngineServerConfig) -> ssl.SSLContext | None:
    if not config.tls_cert:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key or None)
    except OSError as error:
        raise ConfigError(f"cannot read the certificate or its key: {error}", source=config.tls_cert) from None
    return context
