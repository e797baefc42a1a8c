"""What all handlers of one server share, and the two ways to answer: whole, or as a stream."""

import time
from collections.abc import Mapping
from typing import Protocol

import msgspec
from aiohttp import web

from shoal.hosts.engine.answer import Answer
from shoal.hosts.engine.bodies import Sampling
from shoal.hosts.engine.catalog import Catalog
from shoal.hosts.engine.config import EngineServerConfig
from shoal.hosts.engine.control import Control
from shoal.hosts.engine.errors import bad_request
from shoal.hosts.engine.exposition import Exposition
from shoal.hosts.engine.faults import FaultBox
from shoal.hosts.engine.generation import Generation
from shoal.hosts.engine.meter import HttpCounts
from shoal.hosts.engine.planning import Planner
from shoal.hosts.engine.ranks import Ranks
from shoal.hosts.engine.streams import EventStream, Shape, WholeAnswer

JSON = "application/json"
_SSE = "text/event-stream; charset=utf-8"
_SERVER = "shoal-engine"


class WholeShape(Shape, Protocol):
    """A shape that can also dress the answer as one body."""

    def whole(self, generations: list[Generation]) -> bytes:
        """Return the body."""
        ...


class Call:
    """One HTTP request being answered.

    id: the client's `x-request-id`, or one of ours.  answer_id: the id suffix of the answer, the client's own when
    it sent one.
    """

    __slots__ = ("answer_id", "body", "id", "request")

    def __init__(self, request: web.BaseRequest, body: bytes, own_id: str) -> None:
        # As bytes they are letters to vLLM, too, whatever they are in UTF-8.
        asked = request.headers.get("X-Request-Id", "").encode(errors="surrogateescape").decode("latin-1")
        self.request = request
        self.body = body
        self.id = asked or own_id * 2
        self.answer_id = asked or own_id

    @property
    def rank(self) -> int | None:
        """The data-parallel rank that the client asked for, None for any."""
        asked = self.request.headers.get("X-data-parallel-rank", "")
        return int(asked) if asked.isdecimal() and len(asked) < 8 else None

    def respond(
        self, body: bytes, status: int = 200, content_type: str = JSON, headers: Mapping[str, str] | None = None
    ) -> web.Response:
        """Return a response with the headers that every answer has."""
        return web.Response(status=status, body=body, headers={**self._headers(content_type), **(headers or {})})

    def respond_json(self, value: object, status: int = 200) -> web.Response:
        """Return `value` as JSON."""
        return self.respond(msgspec.json.encode(value), status)

    async def begin_stream(self) -> tuple[web.StreamResponse, bool]:
        """Send the head of a stream; returns the response and whether it is chunked."""
        response = web.StreamResponse(headers=self._headers(_SSE))
        is_chunked = self.request.version >= (1, 1)
        if is_chunked:
            response.enable_chunked_encoding()
        else:
            response.force_close()
        await response.prepare(self.request)
        return response, is_chunked

    def _headers(self, content_type: str) -> dict[str, str]:
        return {"Content-Type": content_type, "Server": _SERVER, "Vary": "Origin", "X-Request-Id": self.id}


class Context:
    """The parts of a running server."""

    __slots__ = ("box", "catalog", "config", "control", "exposition", "planner", "ranks", "requests")

    def __init__(
        self,
        config: EngineServerConfig,
        catalog: Catalog,
        planner: Planner,
        ranks: Ranks,
        requests: HttpCounts,
        exposition: Exposition,
        box: FaultBox,
        control: Control,
    ) -> None:
        self.config = config
        self.catalog = catalog
        self.planner = planner
        self.ranks = ranks
        self.requests = requests
        self.exposition = exposition
        self.box = box
        self.control = control

    def answer(self, call: Call, model: str) -> Answer:
        """Return the outside of the answer to a call."""
        return Answer(call.answer_id, model, int(time.time()), self.config.is_reporting_cached_tokens)

    async def generate(
        self, call: Call, body: Sampling, adapter: str, generations: list[Generation], shape: WholeShape
    ) -> web.StreamResponse:
        """Let the engine work and answer, streamed if the body asks for it."""
        if body.stream_options is not None and not body.stream:
            raise bad_request("Stream options can only be defined when `stream=True`.", "stream_options")
        if body.priority and not self.config.is_priority_scheduling:
            raise bad_request(f"Got priority {body.priority} but Priority scheduling is not enabled.")
        self.ranks.choose(call.rank).meter.observe_params(body.n or 1, generations[0].limit)
        if body.stream:
            return await self._stream(call, body, adapter, generations, shape)
        await self.run(WholeAnswer(len(generations)), generations, adapter, body.cache_salt, body.priority, call.rank)
        return call.respond(shape.whole(generations))

    async def run(
        self,
        into: WholeAnswer | EventStream,
        generations: list[Generation],
        adapter: str = "",
        cache_salt: str | None = None,
        priority: int | None = 0,
        rank: int | None = None,
    ) -> None:
        """Let the engine work until `into` is done; whatever ends this early aborts the rest.

        rank: that has to do it, None for any.
        """
        try:
            for generation in generations:
                identity = self.catalog.identity(adapter)
                event = self.planner.event(generation, adapter, identity, cache_salt, priority)
                self.ranks.submit(event, into.sink(generation), rank)
            await into.done
        finally:
            for generation in generations:
                if generation.finish is None:
                    self.ranks.abort(generation.id)

    async def _stream(
        self, call: Call, body: Sampling, adapter: str, generations: list[Generation], shape: WholeShape
    ) -> web.StreamResponse:
        """Send the head at once, as vLLM does, then each token when its step ends."""
        response, is_chunked = await call.begin_stream()
        transport = call.request.transport
        if transport is None:
            return response
        stream = EventStream(transport, shape, generations, self.box, is_chunked=is_chunked)
        stream.send(shape.preamble())
        await self.run(stream, generations, adapter, body.cache_salt, body.priority, call.rank)
        await response.write_eof()
        return response
