"""The calls by which engines are paused, resumed and told to drop their prefix cache, for each kind of engine.

Owns their paths, parameters and answers, and what to tell an operator whose engine has not got them.  When to call is
`control`'s.  Sources: vLLM's dev routers (`/pause`, `/resume`, `/reset_prefix_cache`), SGLang's HTTP server.
"""

from enum import StrEnum

import msgspec

from shoal.hosts.fleet.door import EngineDoor, Unreachable
from shoal.kernel import ShoalError

_MAX_ANSWER_BYTES = 1 << 16
_VLLM = ("vllm", "shoal")
_NO_SUCH_CALL = (404, 405, 501)
_NOT_ALLOWED = (401, 403)


class PauseMode(StrEnum):
    """What becomes of requests that run when an engine is paused: they end, end first, or stand still."""

    ABORT = "abort"
    WAIT = "wait"
    KEEP = "keep"


class CallFailed(ShoalError):
    """The engine did not do it.  is_unknown: it may have, or may do it yet."""

    def __init__(self, message: str, *, is_unknown: bool = False) -> None:
        super().__init__(message)
        self.is_unknown = is_unknown


def waits_by_itself(engine: str) -> bool:
    """Whether the engine knows a pause that lets its requests end first."""
    return engine in _VLLM


async def pause(door: EngineDoor, engine: str, mode: PauseMode, timeout_s: float) -> None:
    """Have the engine begin no step any more.  Raises CallFailed."""
    if engine in _VLLM:
        await _post(door, engine, f"/pause?mode={mode}", None, timeout_s)
    elif engine == "sglang":
        # With `wait` the pool's own requests have ended before; others stand still.
        body = {"mode": "abort" if mode is PauseMode.ABORT else "in_place"}
        await _post(door, engine, "/pause_generation", body, timeout_s)
    else:
        raise _unknown(engine, "pausing")


async def resume(door: EngineDoor, engine: str, timeout_s: float) -> None:
    """End a pause; nothing happens without one.  Raises CallFailed."""
    if engine in _VLLM:
        await _post(door, engine, "/resume", None, timeout_s)
    elif engine == "sglang":
        await _post(door, engine, "/continue_generation", {}, timeout_s)
    else:
        raise _unknown(engine, "pausing")


async def reset(door: EngineDoor, engine: str, *, running: bool, external: bool, timeout_s: float) -> None:
    """Have the engine drop its prefix cache.  Raises CallFailed.

    running: requests that hold blocks are preempted and computed anew.  external: caches behind the GPU's as well.
    """
    if engine in _VLLM:
        flags = [name for name, is_set in (("running_requests", running), ("external", external)) if is_set]
        query = "&".join(f"reset_{name}=true" for name in flags)
        answer = await _post(door, engine, f"/reset_prefix_cache{'?' if query else ''}{query}", None, timeout_s)
        if _says_no(answer):
            again = "" if running else ", or --running to have them computed anew"
            raise CallFailed(f"the cache was not reset: requests hold blocks of it; try again when none run{again}")
    elif engine == "sglang":
        if running or external:
            flag = "--running" if running else "--external"
            raise CallFailed(f"SGLang knows no {flag}: its /flush_cache wants an engine without requests")
        await _post(door, engine, "/flush_cache", None, timeout_s)
    else:
        raise _unknown(engine, "resetting the cache")


def _says_no(answer: bytes) -> bool:
    """Whether the body says `"success": false`; older vLLM says nothing."""
    try:
        found = msgspec.json.decode(answer) if answer else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return isinstance(found, dict) and found.get("success") is False


async def _post(door: EngineDoor, engine: str, path: str, body: object, timeout_s: float) -> bytes:
    try:
        return await door.post(path, body, limit_bytes=_MAX_ANSWER_BYTES, timeout_s=timeout_s)
    except Unreachable as error:
        path = path.partition("?")[0]
        if engine in _VLLM and error.status in (*_NO_SUCH_CALL, 403):
            why = "the engine offers it only when it is started with VLLM_SERVER_DEV_MODE=1"
        elif engine == "sglang" and error.status in _NOT_ALLOWED:
            why = "give SGLang's admin API key as the endpoint's key"
        elif engine == "sglang" and path == "/flush_cache" and error.status == 400:
            raise CallFailed("the cache was not reset: requests run or wait there; try again when none do") from None
        elif error.status in _NO_SUCH_CALL:
            why = "this version of the engine does not have it"
        else:
            said = f"{path} answered {error}" if error.status else f"{path}: {error}"
            raise CallFailed(said, is_unknown=not error.status) from None
        raise CallFailed(f"{path} answered HTTP {error.status}: {why}") from None


def _unknown(engine: str, what: str) -> CallFailed:
    return CallFailed(f"{what} is not known for engines of kind {engine}")
