"""The handlers of operation: health, models, metrics, adapters, where KV events come from, faults."""

import time

from aiohttp import web

from shoal import __version__
from shoal.hosts.engine import faults
from shoal.hosts.engine.bodies import AdapterBody, read
from shoal.hosts.engine.context import Call, Context
from shoal.hosts.engine.errors import bad_request
from shoal.kernel import UNREADABLE

_EXPOSITION = "text/plain; version=1.0.0; charset=utf-8"
_TEXT = "text/plain; charset=utf-8"


async def health(context: Context, call: Call) -> web.StreamResponse:
    """GET /health."""
    return call.respond(b"", 200 if context.box.faults.is_healthy else 503)


async def version(context: Context, call: Call) -> web.StreamResponse:
    """GET /version."""
    return call.respond_json({"version": __version__})


async def models(context: Context, call: Call) -> web.StreamResponse:
    """GET /v1/models."""
    return call.respond(context.catalog.listing())


async def metrics(context: Context, call: Call) -> web.StreamResponse:
    """GET /metrics."""
    return call.respond(context.exposition.page(time.time()), content_type=_EXPOSITION)


async def kv_event_sources(context: Context, call: Call) -> web.StreamResponse:
    """GET /kv_event_sources: the publisher of each data-parallel rank."""
    if context.config.kv_form.is_sglang:
        return call.respond_json({"detail": "Not Found"}, 404)
    publishers = [rank.publisher for rank in context.ranks.all]
    return call.respond_json({str(rank): each.config for rank, each in enumerate(publishers) if each is not None})


async def server_info(context: Context, call: Call) -> web.StreamResponse:
    """GET /server_info: of SGLang's answer what tells where KV events come from."""
    if not context.config.kv_form.is_sglang:
        return call.respond_json({"detail": "Not Found"}, 404)
    info = {
        "served_model_name": context.catalog.base,
        "model_path": context.catalog.root,
        "page_size": context.planner.block_size,
    }
    return call.respond_json({**info, "dp_size": len(context.ranks.all), "kv_events": _descriptor(context)})


def _descriptor(context: Context) -> dict[str, object] | None:
    publisher = context.ranks.all[0].publisher
    if publisher is None:
        return None
    config = publisher.config
    host, _, port = config.endpoint.removeprefix("tcp://").rpartition(":")
    replay = (config.replay_endpoint or "").rpartition(":")[2]
    return {
        "publisher": config.publisher,
        "endpoint_host": host,
        "endpoint_port_base": int(port) if port.isdigit() else None,
        "topic": config.topic,
        "block_size": context.planner.block_size,
        "dp_size": len(context.ranks.all),
        "replay_endpoint_port_base": int(replay) if replay.isdigit() else None,
        "load_endpoint_port_base": None,
        "load_topic": None,
    }


async def load_adapter(context: Context, call: Call) -> web.StreamResponse:
    """POST /v1/load_lora_adapter."""
    body = read(call.body, AdapterBody)
    said = context.catalog.load(body.lora_name, body.lora_path, is_in_place=body.load_inplace)
    return call.respond(said.encode(), content_type=_TEXT)


async def unload_adapter(context: Context, call: Call) -> web.StreamResponse:
    """POST /v1/unload_lora_adapter."""
    body = read(call.body, AdapterBody)
    return call.respond(context.catalog.unload(body.lora_name).encode(), content_type=_TEXT)


async def show_faults(context: Context, call: Call) -> web.StreamResponse:
    """GET /faults."""
    return call.respond_json(context.box.faults)


async def change_faults(context: Context, call: Call) -> web.StreamResponse:
    """POST /faults: changes the fields that the JSON object names, and returns all."""
    try:
        changed = faults.change(context.box.faults, call.body)
    except UNREADABLE as error:
        raise bad_request(f"faults: {error}") from None
    context.box.put(changed)
    context.ranks.change_pace(changed.slow_factor)
    return call.respond_json(changed)
