"""Whether an engine serves other weights than before: what it cached by the old ones is then worth nothing.

Owns the reading of an engine's weight version and the memory of where its models came from.  How often to look and
what follows is `member`'s.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from shoal.hosts.fleet.door import EngineDoor, Unreachable
from shoal.pool import ServedModel

MAX_INFO_BYTES = 1 << 16
MAX_VERSION_CHARS = 256
MAX_MODELS = 2000

_PATHS = {
    "vllm": ("/weight_info",),
    "shoal": ("/weight_info",),
    "sglang": ("/model_info", "/get_model_info"),
}
# What an engine answers that does not tell, or not to us.
_NEVER = (401, 403, 404, 405, 501)


class Weights:
    """What one engine was seen to serve."""

    __slots__ = ("_door", "_engine", "_paths", "_roots", "_timeout_s", "_version")

    def __init__(self, door: EngineDoor, timeout_s: float) -> None:
        self._door = door
        self._timeout_s = timeout_s
        self.forget()

    def forget(self) -> None:
        """Another process may run at this address now."""
        self._version: str | None = None
        self._engine = ""
        self._paths: tuple[str, ...] = ()
        self._roots: dict[str, tuple[str, bool]] = {}

    def models(self, served: Iterable[ServedModel]) -> str:
        """Note what is served; return what is no longer the same under its name, "" for nothing.

        A name that was gone and is back counts as other weights.
        """
        now = {model.id: model.root for model in served}
        changed = [name for name, root in now.items() if name in self._roots and self._roots[name] != (root, True)]
        self._roots.update({name: (root, False) for name, (root, _) in self._roots.items() if name not in now})
        for name, root in now.items():
            self._roots.pop(name, None)
            self._roots[name] = (root, True)
        while len(self._roots) > MAX_MODELS:
            del self._roots[next(iter(self._roots))]
        return f"{changed[0]} was loaded anew" if changed else ""

    async def version(self, engine: str) -> str:
        """Read the version of the weights; return the new one when it changed, else "".  An engine may not tell."""
        if engine != self._engine:
            self._engine, self._paths = engine, _PATHS.get(engine, ())
        while self._paths:
            try:
                path = self._paths[0]
                page = await self._door.get(path, limit_bytes=MAX_INFO_BYTES, timeout_s=self._timeout_s)
            except Unreachable as error:
                if error.status not in _NEVER:
                    return ""
                self._paths = self._paths[1:]
                continue
            found = _version(page)
            before, self._version = self._version, found if found is not None else self._version
            return found if before is not None and found is not None and found != before else ""
        return ""


def _version(page: bytes) -> str | None:
    try:
        answer: Any = msgspec.json.decode(page)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(answer, dict) or not isinstance(answer.get("weight_version"), str | int | float):
        return None
    return str(answer["weight_version"])[:MAX_VERSION_CHARS]
