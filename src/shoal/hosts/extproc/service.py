"""The gRPC side: one stream per HTTP request, and one long stream of access-log records per Envoy.

Owns the server, its limits and the health service.  Messages are read by `exchange` and `hosts.envoy`.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
from envoy.service.accesslog.v3 import als_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from shoal.hosts.envoy import decode_records
from shoal.hosts.extproc.exchange import Exchange, Picker
from shoal.routing import Recorded

log = logging.getLogger("shoal.extproc")

END: Any = grpc.aio.EOF  # type: ignore[attr-defined]
EXT_PROC = "envoy.service.ext_proc.v3.ExternalProcessor"
ACCESS_LOG = "envoy.service.accesslog.v3.AccessLogService"
# The services that the endpoint picker protocol asks for.
HEALTH_SERVICES = ("", "liveness", "readiness", EXT_PROC)
# A buffered body comes in one message, with its protobuf frame around it.
MESSAGE_OVERHEAD_BYTES = 1 << 20


def serve(
    picker: Picker,
    addresses: list[str],
    *,
    max_body_bytes: int,
    credentials: grpc.ServerCredentials | None = None,
) -> tuple[grpc.aio.Server, HealthServicer]:
    """Make the server for `addresses` (`unix:PATH` or `ip:port`); the caller starts and stops it.

    Returns the server and its health service, which says NOT_SERVING until `set_serving`.
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
    server.add_generic_rpc_handlers((_ext_proc_handler(picker), _access_log_handler(picker)))
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
        await health_service.set(name, serving if is_serving or name == "liveness" else stopped)


def _ext_proc_handler(picker: Picker) -> Any:
    async def process(_: Any, context: Any) -> None:
        exchange = Exchange(picker)
        read, write = context.read, context.write
        try:
            while True:
                message = await read()
                if message is END:
                    return
                for reply in _receive(exchange, message, picker):
                    await write(reply)
        finally:
            exchange.end()

    return grpc.method_handlers_generic_handler(
        EXT_PROC,
        {
            "Process": grpc.stream_stream_rpc_method_handler(
                process, request_deserializer=pb.ProcessingRequest.FromString, response_serializer=None
            )
        },
    )


def _receive(exchange: Exchange, message: Any, picker: Picker) -> list[bytes]:
    try:
        return exchange.receive(message)
    except Exception:
        # A bug in a decision or a plugin costs this request its placement, not its answer: ending the stream lets
        # Envoy apply the failure mode that the operator chose.
        picker.failed_open += 1
        log.exception("a request could not be placed; Envoy applies its failure mode")
        raise


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
    feed: Callable[[Any], Any] = picker.driver.feed

    async def stream_access_logs(messages: AsyncIterator[Any], _: Any) -> Any:
        async for message in _until(messages, picker.draining):
            for record in decode_records(message):
                if record.request_id:
                    feed(Recorded(record.request_id, record.outcome))
                elif not record.picker:
                    picker.driver.fold.unrouted(record.outcome)
            await asyncio.sleep(0)
        return als_pb2.StreamAccessLogsResponse()

    return grpc.method_handlers_generic_handler(
        ACCESS_LOG,
        {
            "StreamAccessLogs": grpc.stream_unary_rpc_method_handler(
                stream_access_logs,
                request_deserializer=als_pb2.StreamAccessLogsMessage.FromString,
                response_serializer=als_pb2.StreamAccessLogsResponse.SerializeToString,
            )
        },
    )
