"""Session affinity: the requests of one session go where its first one went.

Two strategies, each usable as a filter (only that endpoint, while it is a candidate) or as a scorer (1 for it, 0
for the others).  Neither ever empties the candidates.
"""

import base64
import binascii
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal, Protocol

import msgspec
import numpy as np

from shoal.pool import Decision, Endpoint, FleetView, Request
from shoal.scheduling.columns import PerFleet, known
from shoal.scheduling.plugin import Ignored, Mask, Scores
from shoal.scheduling.producers import SessionIdProducer

Headers = tuple[tuple[str, str], ...]
_MAX_SESSIONS = 500_000
"""Sessions remembered at once, so that a flood of new ids cannot grow memory without bound: about 100 MB."""


class EncodedEndpointHeaderConfig(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The client sends back the token that the last response gave it; no state in the router."""

    header: Annotated[str, "request and response header of the token"] = "x-session-token"


class SessionIdSource(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One place where a session id may stand: exactly one of header and attribute."""

    header: Annotated[str, "request header"] = ""
    attribute: Annotated[str, "request attribute; only the one of session-id-producer exists"] = ""
    producer: Annotated[str, "name of the producer of the attribute"] = ""


class SessionIdConfig(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The client sends an id of its own; the router remembers where that session went."""

    sources: Annotated[
        tuple[SessionIdSource, ...], "where the id is looked for, in order; x-session-id by default"
    ] = ()
    eviction_ttl_seconds: Annotated[float, "a session idle for longer is forgotten; 0 means 300"] = 300.0
    eviction_sweep_seconds: Annotated[float, "time between two sweeps; 0 means 10"] = 10.0


class Sessions(Protocol):
    def endpoint_of(self, request: Request) -> str: ...

    def request_headers(self) -> tuple[str, ...]: ...

    def connect(self, plugins: Mapping[str, object]) -> None: ...

    def dispatched(self, request: Request, view: FleetView, decision: Decision, now: float) -> None: ...

    def endpoint_left(self, endpoint_id: str) -> None: ...

    def response_header_names(self) -> tuple[str, ...]: ...

    def response_headers(self, request: Request, decision: Decision) -> Headers: ...

    def adopt(self, previous: "Sessions") -> None: ...


class EncodedEndpoints:
    """The session is the endpoint's id in base64, kept by the client."""

    __slots__ = ("_header",)

    def __init__(self, config: EncodedEndpointHeaderConfig) -> None:
        self._header = config.header.strip().lower() or "x-session-token"

    def endpoint_of(self, request: Request) -> str:
        try:
            return base64.b64decode(request.headers.get(self._header, ""), validate=True).decode()
        except (binascii.Error, UnicodeDecodeError, ValueError):
            return ""

    def request_headers(self) -> tuple[str, ...]:
        return (self._header,)

    def connect(self, plugins: Mapping[str, object]) -> None:
        pass

    def dispatched(self, request: Request, view: FleetView, decision: Decision, now: float) -> None:
        pass

    def endpoint_left(self, endpoint_id: str) -> None:
        pass

    def response_header_names(self) -> tuple[str, ...]:
        return (self._header,)

    def response_headers(self, request: Request, decision: Decision) -> Headers:
        return ((self._header, base64.b64encode(decision.chosen[0].encode()).decode()),)

    def adopt(self, previous: Sessions) -> None:
        pass


class BoundSessions:
    """The session is an id of the client; where it went is kept here until it has been idle for the TTL.

    A session stays bound while its endpoint is offered, even when the request went elsewhere; it moves when its
    endpoint is not offered any more.
    """

    __slots__ = ("_bound", "_next_sweep", "_producer", "_sources", "_sweep_s", "_ttl_s")

    def __init__(self, config: SessionIdConfig) -> None:
        for at, source in enumerate(config.sources):
            if bool(source.header) == bool(source.attribute):
                raise ValueError(f"sessionIdConfig.sources[{at}]: exactly one of header and attribute must be set")
        if config.eviction_ttl_seconds < 0 or config.eviction_sweep_seconds < 0:
            raise ValueError("sessionIdConfig: evictionTtlSeconds and evictionSweepSeconds must not be negative")
        self._sources = config.sources or (SessionIdSource(header="x-session-id"),)
        self._ttl_s = config.eviction_ttl_seconds or 300.0
        self._sweep_s = config.eviction_sweep_seconds or 10.0
        self._next_sweep = float("-inf")
        self._producer: SessionIdProducer | None = None
        # session id -> (endpoint id, last seen), the longest idle first
        self._bound: OrderedDict[str, tuple[str, float]] = OrderedDict()

    def connect(self, plugins: Mapping[str, object]) -> None:
        named = next((source.producer for source in self._sources if source.producer), SessionIdProducer.type)
        producer = plugins.get(named)
        self._producer = producer if isinstance(producer, SessionIdProducer) else None

    def request_headers(self) -> tuple[str, ...]:
        return tuple(source.header.strip().lower() for source in self._sources if source.header)

    def session_of(self, request: Request) -> str:
        for source in self._sources:
            if source.header:
                session = request.headers.get(source.header.strip().lower(), "").strip()
            else:
                session = self._attribute(request)
            if session:
                return session
        return ""

    def _attribute(self, request: Request) -> str:
        if self._producer is None:
            return request.session_id
        (name,) = self._producer.request_headers()
        return request.headers.get(name, "").strip()

    def endpoint_of(self, request: Request) -> str:
        bound = self._bound.get(self.session_of(request))
        return bound[0] if bound else ""

    def dispatched(self, request: Request, view: FleetView, decision: Decision, now: float) -> None:
        session = self.session_of(request)
        if session:
            target = decision.chosen[0]
            bound = self._bound.get(session)
            if bound is None or bound[0] == target or not any(each.id == bound[0] for each in view.endpoints):
                self._bound[session] = (target, now)
                self._bound.move_to_end(session)
        self._sweep(now)

    def _sweep(self, now: float) -> None:
        if len(self._bound) > _MAX_SESSIONS:
            self._bound.popitem(last=False)
        if now < self._next_sweep:
            return
        self._next_sweep = now + self._sweep_s
        while self._bound and now - next(iter(self._bound.values()))[1] > self._ttl_s:
            self._bound.popitem(last=False)

    def endpoint_left(self, endpoint_id: str) -> None:
        # Bindings to it are replaced at the session's next request, since it is no longer offered.
        pass

    def response_header_names(self) -> tuple[str, ...]:
        return ()

    def response_headers(self, request: Request, decision: Decision) -> Headers:
        return ()

    def adopt(self, previous: Sessions) -> None:
        if isinstance(previous, BoundSessions):
            self._bound = previous._bound


Strategy = Annotated[
    Literal["encoded_endpoint_header", "session_id"],
    "encoded_endpoint_header: the client returns a token; session_id: the router remembers the client's id",
]
ProfileName = Annotated[
    str,
    "the profile whose endpoint the session keeps; the only one by default",
    Ignored("this version has one profile", alike=("", "default")),
]
EncodedConfig = Annotated[EncodedEndpointHeaderConfig, "for strategy encoded_endpoint_header"]
IdConfig = Annotated[SessionIdConfig, "for strategy session_id"]


class Pins:
    """The endpoint of a request's session, as a mask over the candidates."""

    __slots__ = ("_rows", "sessions")

    def __init__(self, strategy: str, encoded: EncodedEndpointHeaderConfig, by_id: SessionIdConfig) -> None:
        self.sessions: Sessions = BoundSessions(by_id) if strategy == "session_id" else EncodedEndpoints(encoded)
        self._rows = PerFleet(self._index)

    @staticmethod
    def _index(fleet: Sequence[Endpoint]) -> dict[str, int]:
        return {endpoint.id: row for row, endpoint in enumerate(fleet)}

    def of(self, request: Request, view: FleetView) -> Mask:
        """Return true for the session's endpoint, false for all others."""
        row = self._rows.of(view).get(self.sessions.endpoint_of(request), -1)
        mask: Mask = (np.arange(len(view)) if view.rows is None else view.rows) == row
        return mask

    def adopt(self, previous: object) -> None:
        if isinstance(previous, _SessionAffinity):
            self.sessions.adopt(previous.pins.sessions)


class _SessionAffinity:
    """The parameters of both plugins, and what they do alike."""

    def __init__(
        self,
        *,
        strategy: Strategy = "encoded_endpoint_header",
        encoded_endpoint_header_config: EncodedConfig = EncodedEndpointHeaderConfig(),
        session_id_config: IdConfig = SessionIdConfig(),
        profile_name: ProfileName = "",
        max_wait_penalty_ms: Annotated[
            float, "how much longer than on another a request may wait on the session's endpoint; 0 never gives way"
        ] = 0.0,
    ) -> None:
        if max_wait_penalty_ms < 0:
            raise ValueError(f"maxWaitPenaltyMs must not be negative, got {max_wait_penalty_ms}")
        self._penalty_s = max_wait_penalty_ms / 1000
        pins = self.pins = Pins(strategy, encoded_endpoint_header_config, session_id_config)
        sessions = pins.sessions
        self.request_headers, self.response_headers = sessions.request_headers, sessions.response_headers
        self.response_header_names = sessions.response_header_names
        self.dispatched, self.endpoint_left = sessions.dispatched, sessions.endpoint_left
        self.connect, self.adopt = sessions.connect, pins.adopt

    def _pinned(self, request: Request, view: FleetView) -> Mask:
        """Return true for the session's endpoint, for none when it gives way: a wait is the predicted ttft where there
        is one, else the prefill that is booked."""
        mask = self.pins.of(request, view)
        if self._penalty_s <= 0 or not mask.any() or mask.all():
            return mask
        name = "predicted_ttft_s" if view.has("predicted_ttft_s") else "inflight_prefill_s"
        wait_s = known(view, name)
        is_busy = bool(wait_s[mask].min() - np.fmin.reduce(wait_s[~mask]) > self._penalty_s)
        return np.zeros(len(mask), np.bool_) if is_busy else mask


class SessionAffinityFilter(_SessionAffinity):
    """Keeps only the endpoint that serves the session.

    All stay when it has none, when that one is not offered, or when it is busier than maxWaitPenaltyMs allows.
    """

    type: ClassVar[str] = "session-affinity-filter"

    def keep(self, request: Request, view: FleetView) -> Mask:
        mask = self._pinned(request, view)
        return mask if mask.any() else ~mask


class SessionAffinityScorer(_SessionAffinity):
    """Scores 1 for the endpoint that serves the session, unless that is too busy, and 0 for the others."""

    type: ClassVar[str] = "session-affinity-scorer"
    needs: ClassVar[tuple[str, ...]] = ("inflight_prefill_s", "predicted_ttft_s")

    def score(self, request: Request, view: FleetView) -> Scores:
        return self._pinned(request, view).astype(np.float64)
