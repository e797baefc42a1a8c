"""The handlers of control: pause, sleep, cache, aborts, weights, as vLLM has them and as SGLang has them."""

import re
from collections.abc import Awaitable, Callable

from aiohttp import web

from shoal.engine.events import PauseMode
from shoal.hosts.engine.bodies import AbortBody, AbortOneBody, PauseGenerationBody, WeightVersionBody, read
from shoal.hosts.engine.context import Call, Context
from shoal.hosts.engine.control import SLEEP_TAGS
from shoal.hosts.engine.errors import bad_request

_ANSWER_PREFIX = re.compile(r"^(?:chatcmpl-|cmpl-|trsc-|resp_|msg_)")
_TRUE = ("1", "true", "yes", "on")
_SGLANG_MODES = {
    "abort": (PauseMode.ABORT, True),
    "retract": (PauseMode.KEEP, True),
    "in_place": (PauseMode.KEEP, False),
}
_FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. (When there are running or waiting requests, the "
    "operation will not be performed.)\n"
)


async def pause(context: Context, call: Call) -> web.StreamResponse:
    """POST /pause?mode=abort|wait|keep&clear_cache=true; answers when nothing runs any more."""
    await context.control.pause(_mode(call), is_clearing=_flag(call, "clear_cache", is_default=True))
    return call.respond_json({"status": "paused"})


async def resume(context: Context, call: Call) -> web.StreamResponse:
    """POST /resume."""
    context.control.resume()
    return call.respond_json({"status": "resumed"})


async def is_paused(context: Context, call: Call) -> web.StreamResponse:
    """GET /is_paused."""
    return call.respond_json({"is_paused": context.control.is_paused})


async def sleep(context: Context, call: Call) -> web.StreamResponse:
    """POST /sleep?level=0|1|2&mode=abort|wait|keep."""
    asked = call.request.query.get("level", "1")
    level = int(asked) if asked in ("0", "1", "2") else None
    if level is None:
        raise bad_request(f"level must be 0, 1 or 2, got {asked!r}", "level")
    await context.control.sleep(level, _mode(call))
    return call.respond(b"")


async def wake_up(context: Context, call: Call) -> web.StreamResponse:
    """POST /wake_up?tags=...; without tags all wakes."""
    tags = call.request.query.getall("tags", [])
    known = {tag for level in SLEEP_TAGS.values() for tag in level}
    if not known.issuperset(tags):
        raise bad_request(f"tags must be of {', '.join(sorted(known))}", "tags")
    context.control.wake(tags)
    return call.respond_json({"status": "awake" if not context.control.is_sleeping else "sleeping", "tags": tags})


async def is_sleeping(context: Context, call: Call) -> web.StreamResponse:
    """GET /is_sleeping."""
    return call.respond_json({"is_sleeping": context.control.is_sleeping})


async def reset_prefix_cache(context: Context, call: Call) -> web.StreamResponse:
    """POST /reset_prefix_cache?reset_running_requests&reset_external; fails while blocks are in use."""
    is_done = await context.ranks.reset_cache(
        is_forced=_flag(call, "reset_running_requests"), is_all=_flag(call, "reset_external")
    )
    return call.respond_json({"success": is_done})


async def abort_requests(context: Context, call: Call) -> web.StreamResponse:
    """POST /abort_requests with the ids that answers carry, or those that clients sent as x-request-id."""
    meant = {_ANSWER_PREFIX.sub("", each) for each in read(call.body, AbortBody).request_ids}
    context.ranks.cancel(lambda own_id: own_id.rsplit("-", 2)[0] in meant)
    return call.respond(b"")


async def update_weight_version(context: Context, call: Call) -> web.StreamResponse:
    """POST /update_weight_version: what was cached under the old weights is dropped, running requests begin again."""
    body = read(call.body, WeightVersionBody)
    version = body.weight_version or body.new_version
    if not version:
        raise bad_request("weight_version (or new_version) must be given", "weight_version")
    context.control.weight_version = version
    await context.ranks.reset_cache(is_forced=True, is_all=True)
    message = f"Weight version updated to {version}"
    return call.respond_json({"success": True, "message": message, "weight_version": version, "new_version": version})


async def weight_version(context: Context, call: Call) -> web.StreamResponse:
    """GET /weight_info, and SGLang's /get_weight_version."""
    return call.respond_json({"weight_version": context.control.weight_version})


async def model_info(context: Context, call: Call) -> web.StreamResponse:
    """GET /model_info of SGLang."""
    root = context.catalog.root
    return call.respond_json(
        {
            "model_path": root,
            "tokenizer_path": root,
            "is_generation": True,
            "weight_version": context.control.weight_version,
        }
    )


async def flush_cache(context: Context, call: Call) -> web.StreamResponse:
    """GET or POST /flush_cache of SGLang: 400 while blocks are in use."""
    is_done = await context.ranks.reset_cache(is_all=True)
    return call.respond(_FLUSHED.encode(), 200 if is_done else 400, "text/plain; charset=utf-8")


async def pause_generation(context: Context, call: Call) -> web.StreamResponse:
    """POST /pause_generation of SGLang."""
    body = read(call.body or b"{}", PauseGenerationBody)
    if body.mode not in _SGLANG_MODES:
        raise bad_request(f"mode must be one of {', '.join(_SGLANG_MODES)}", "mode")
    mode, is_clearing = _SGLANG_MODES[body.mode]
    await context.control.pause(mode, is_clearing=is_clearing)
    return call.respond_json({"message": "Generation paused successfully.", "status": "ok"})


async def continue_generation(context: Context, call: Call) -> web.StreamResponse:
    """POST /continue_generation of SGLang."""
    context.control.resume()
    return call.respond_json({"message": "Generation continued successfully.", "status": "ok"})


async def abort_request(context: Context, call: Call) -> web.StreamResponse:
    """POST /abort_request of SGLang: ids match by their beginning."""
    body = read(call.body, AbortOneBody)
    beginning = _ANSWER_PREFIX.sub("", body.rid)
    if not beginning and not body.abort_all:
        raise bad_request("rid or abort_all must be given", "rid")
    context.ranks.cancel(lambda own_id: body.abort_all or own_id.startswith(beginning))
    return call.respond(b"")


def _mode(call: Call) -> PauseMode:
    asked = call.request.query.get("mode", "abort")
    try:
        return PauseMode(asked)
    except ValueError:
        raise bad_request(f"mode must be abort, wait or keep, got {asked!r}", "mode") from None


def _flag(call: Call, name: str, *, is_default: bool = False) -> bool:
    asked = call.request.query.get(name)
    return is_default if asked is None else asked.lower() in _TRUE


HANDLERS: dict[tuple[str, str], Callable[[Context, Call], Awaitable[web.StreamResponse]]] = {
    ("POST", "/pause"): pause,
    ("POST", "/resume"): resume,
    ("GET", "/is_paused"): is_paused,
    ("POST", "/sleep"): sleep,
    ("POST", "/wake_up"): wake_up,
    ("GET", "/is_sleeping"): is_sleeping,
    ("POST", "/reset_prefix_cache"): reset_prefix_cache,
    ("POST", "/abort_requests"): abort_requests,
    ("POST", "/update_weight_version"): update_weight_version,
    ("GET", "/weight_info"): weight_version,
    ("GET", "/get_weight_version"): weight_version,
    ("GET", "/model_info"): model_info,
    ("GET", "/flush_cache"): flush_cache,
    ("POST", "/flush_cache"): flush_cache,
    ("POST", "/pause_generation"): pause_generation,
    ("POST", "/continue_generation"): continue_generation,
    ("POST", "/abort_request"): abort_request,
}
"""Method and path to handler."""
