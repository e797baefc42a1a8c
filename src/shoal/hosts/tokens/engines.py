"""Which engines could be asked for a prompt's tokens, as the events that this worker is fed tell.

Owns a list of addresses, kinds and models; what they are worth for a request is the router's business.
"""

from typing import NamedTuple

from shoal.pool import EndpointState
from shoal.routing import Event
from shoal.routing.events import EndpointChanged, EndpointJoined, EndpointLeft, ModelsSeen

EMBEDDED = "shoal"


class Engine(NamedTuple):
    """One engine.  kind: `vllm`, `sglang`, `shoal`, ..."""

    id: str
    address: str
    kind: str
    is_tls: bool


class EngineList:
    """The engines by endpoint id."""

    def __init__(self) -> None:
        self._engines: dict[str, Engine] = {}
        self._kinds: dict[str, set[str]] = {}
        self._ready: set[str] = set()
        self._models: dict[str, frozenset[str]] = {}
        self._turn = 0

    def on_event(self, event: Event) -> None:
        """Take what an event says of engines."""
        match event:
            case EndpointJoined():
                at = event.endpoint
                self._forget_kind(at.id)
                self._kinds.setdefault(at.engine, set()).add(at.id)
                self._engines[at.id] = Engine(at.id, at.address, at.engine, at.is_tls)
                self._set_state(at.id, event.state)
            case EndpointChanged():
                self._set_state(event.endpoint_id, event.state)
            case EndpointLeft():
                self._forget_kind(event.endpoint_id)
                self._engines.pop(event.endpoint_id, None)
                self._models.pop(event.endpoint_id, None)
                self._ready.discard(event.endpoint_id)
            case ModelsSeen():
                names = {name for model in event.models for name in (model.id, model.parent) if name}
                self._models[event.endpoint_id] = frozenset(names)

    def _forget_kind(self, name: str) -> None:
        if name in self._engines:
            self._kinds[self._engines[name].kind].discard(name)

    def _set_state(self, name: str, state: EndpointState) -> None:
        if state in (EndpointState.READY, EndpointState.HALF_OPEN):
            self._ready.add(name)
        else:
            self._ready.discard(name)

    def has(self, kind: str, model: str) -> bool:
        """Whether an engine of this kind serves the model, ready or not."""
        return any(model in self._models.get(name, ()) for name in self._kinds.get(kind, ()))

    def serving(self, model: str) -> Engine | None:
        """Return a ready engine that serves the model, another one each time, None when there is none."""
        able = [name for name in sorted(self._ready & self._engines.keys()) if model in self._models.get(name, ())]
        if not able:
            return None
        self._turn += 1
        return self._engines[able[self._turn % len(able)]]
