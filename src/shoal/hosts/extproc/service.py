"""The gRPC side for gateways that are not ours: one stream per HTTP request, and one of access-log records per Envoy.

Owns the server, its limits and the health service.  What its streams do with a message is `streams`'; our own Envoy is
served by `lean`.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

import grpc
import grpc.aio
from envoy.service.accesslog.v3 import als_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from shoal.hosts.envoy.recordform import parse_records
from shoal.hosts.extproc.exchange import Exchange
from shoal.hosts.extproc.streams import (
    ACCESS_LOG,
    EXT_PROC,
    HEALTH_SERVICES,
    LIVENESS,
    MESSAGE_OVERHEAD_BYTES,
    note_unplaced,
    take_records,
)
from shoal.hosts.picker import Picker
from shoal.routing.commands import Cut

END: Any = grpc.aio.EOF  # type: ignore[attr-defined]


def serve(
    picker: Picker,
    addresses: list[str],
    *,
    max_body_bytes: int,
    credentials: grpc.ServerCredentials | None = None,
    live: "LiveCalls | None" = None,
) -> tuple[grpc.aio.Server, HealthServicer]:
    """Make the server for `addresses` (`unix:PATH` or `ip:port`); the caller starts and stops it.

    live: told of every request under way.  Returns the server and its health service, which says NOT_SERVING until
    `set_serving`.
    """
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", max_body_bytes + MESSAGE_OVERHEAD_BYTES),
            ("grpc.max_send_message_length", max_body_bytes + MESSAGE_OVERHEAD_BYTES),
            ("grpc.so_reuseport", 0),
            ("grpc.max_concurrent_streams", 1_000_000),
            ("grpc.http2.max_ping_strikes", 0),
            # grpc refuses streams that it could not hand over in time, and a refused stream passes unrouted.
            ("grpc.server.max_pending_requests", 100_000),
            ("grpc.server.max_pending_requests_hard_limit", 200_000),
            ("grpc.server_max_unrequested_time_in_server", 600),
        ]
    )
    health_service = HealthServicer()
    server.add_generic_rpc_handlers((_ext_proc_handler(picker, live or LiveCalls()), _access_log_handler(picker)))
    health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
    for address in addresses:
        bound = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
        if not bound and not address.startswith("unix:"):
            raise OSError(f"cannot listen on {address}")
    return server, health_service


async def set_serving(health_service: HealthServicer, is_serving: bool) -> None:
    """Tell the health service's watchers; liveness stays SERVING for as long as the process answers."""
    serving, stopped = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    for name in HEALTH_SERVICES:
        await health_service.set(name, serving if is_serving or name == LIVENESS else stopped)


class _LateReplies:
    """The replies of one stream that could not be given at once.  writing: the task that sends them."""

    def __init__(self, picker: Picker, context: Any) -> None:
        self._picker = picker
        self._context = context
        self.writing: asyncio.Task[None] | None = None

    def send(self, replies: list[bytes] | Exception) -> None:
        """Send them, or end the stream because of a fault."""
        self.writing = asyncio.ensure_future(self._write(replies))

    async def _write(self, replies: list[bytes] | Exception) -> None:
        if isinstance(replies, Exception):
            note_unplaced(self._picker, replies)
            # It ends the call; the task that reads is told by grpc.
            with contextlib.suppress(grpc.aio.AbortError):
                await self._context.abort(grpc.StatusCode.INTERNAL, "not placed")
            return
        for reply in replies:
            await self._context.write(reply)

    def cancel(self) -> None:
        """The stream is over."""
        if self.writing is not None:
            self.writing.cancel()


class LiveCalls:
    """The requests under way, so that they can be ended from outside."""

    def __init__(self) -> None:
        self._calls: dict[Exchange, _LateReplies] = {}

    def joined(self, exchange: Exchange, late: _LateReplies) -> None:
        """A stream has begun."""
        self._calls[exchange] = late

    def left(self, exchange: Exchange) -> None:
        """A stream is over."""
        self._calls.pop(exchange, None)

    def cut(self, commands: Mapping[str, Cut]) -> int:
        """End these requests; returns how many there were."""
        count = 0
        for exchange, late in list(self._calls.items()):
            command = commands.get(exchange.request_id)
            if command is not None and (replies := exchange.cut(command)):
                late.send(replies)
                count += 1
        return count


def _ext_proc_handler(picker: Picker, live: LiveCalls) -> Any:
    async def process(_: Any, context: Any) -> None:
        exchange = Exchange(picker)
        read, write = context.read, context.write
        late = _LateReplies(picker, context)
        live.joined(exchange, late)
        try:
            while True:
                message = await read()
                if message is END:
                    return
                if late.writing is not None:
                    # One write at a time.
                    await late.writing
                try:
                    answers = exchange.receive(message)
                except Exception as error:
                    note_unplaced(picker, error)
                    raise
                for answer in answers:
                    await write(answer)
                if not answers:
                    exchange.send_late(late.send)
        finally:
            live.left(exchange)
            exchange.end()
            late.cancel()

    return grpc.method_handlers_generic_handler(
        EXT_PROC,
        {
            "Process": grpc.stream_stream_rpc_method_handler(
                process, request_deserializer=pb.ProcessingRequest.FromString, response_serializer=None
            )
        },
    )


async def _until(messages: AsyncIterator[Any], event: asyncio.Event) -> AsyncIterator[Any]:
    """Pass the messages on until there are no more or `event` is set."""
    over = asyncio.ensure_future(event.wait())
    step: asyncio.Future[Any] = asyncio.ensure_future(anext(messages, END))
    try:
        while True:
            await asyncio.wait({step, over}, return_when=asyncio.FIRST_COMPLETED)
            if not step.done() or (message := step.result()) is END:
                return
            step = asyncio.ensure_future(anext(messages, END))
            yield message
    finally:
        over.cancel()
        step.cancel()


def _access_log_handler(picker: Picker) -> Any:
    async def stream_access_logs(messages: AsyncIterator[Any], _: Any) -> Any:
        async for message in _until(messages, picker.draining):
            take_records(picker, message)
            await asyncio.sleep(0)
        return als_pb2.StreamAccessLogsResponse()

    return grpc.method_handlers_generic_handler(
        ACCESS_LOG,
        {
            "StreamAccessLogs": grpc.stream_unary_rpc_method_handler(
                stream_access_logs,
                request_deserializer=parse_records,
                response_serializer=als_pb2.StreamAccessLogsResponse.SerializeToString,
            )
        },
    )
