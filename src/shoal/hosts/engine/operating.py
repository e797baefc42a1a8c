"""The handlers of operation: health, models, metrics, adapters, cache, faults."""

import time

import msgspec
from aiohttp import web

from shoal import __version__
from shoal.hosts.engine import faults
from shoal.hosts.engine.bodies import AdapterBody, read
from shoal.hosts.engine.context import Call, Context
from shoal.hosts.engine.errors import bad_request

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


async def reset_prefix_cache(context: Context, call: Call) -> web.StreamResponse:
    """POST /reset_prefix_cache."""
    return call.respond_json({"success": context.driver.reset_cache()})


async def load_adapter(context: Context, call: Call) -> web.StreamResponse:
    """POST /v1/load_lora_adapter."""
    body = read(call.body, AdapterBody)
    return call.respond(context.catalog.load(body.lora_name, body.lora_path).encode(), content_type=_TEXT)


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
    except msgspec.DecodeError as error:
        raise bad_request(f"faults: {error}") from None
    context.box.put(changed)
    context.driver.change_pace(changed.slow_factor)
    return call.respond_json(changed)
