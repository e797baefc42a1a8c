"""Whose word counts: what a client says of itself and of its request, before the router hears it.

Owns who a request belongs to and which of its hints are believed.  Priorities of tenants are `tenancy`.
"""

import msgspec

from shoal.pool import Request
from shoal.pool.request import Hints
from shoal.routing.config import RouterConfig
from shoal.scheduling.producers import AgentIdentity

AGENT = "agent:"
"""Before the name of a tenant that is an agent's session, so that no client can name itself as a configured one."""


class Claims:
    """The rules of one configuration."""

    __slots__ = ("_identity", "_max_return_s", "_trusts_hints", "_trusts_tenants")

    def __init__(self, config: RouterConfig) -> None:
        plugins = (each.plugin for each in config.plugins)
        self._identity = next((each for each in plugins if isinstance(each, AgentIdentity)), None)
        self._trusts_hints = config.pool.agents.trust_hints
        # A name is worth a share of the queue, and who invents names takes as many as they like.  Who asks for llm-d's
        # flow control gets llm-d's, which believes the header.
        self._trusts_tenants = config.pool.flow.trust_headers or not config.pool.flow.enabled
        self._max_return_s = config.pool.agents.max_return_s

    def settle(self, request: Request, owner: str) -> Request:
        """Return the request as it is believed.  owner: of the key that it showed, "" when there are no keys."""
        changed: dict[str, object] = {}
        if owner:
            # Who a request belongs to is the key's word where there are keys, not a header's.
            changed["tenant_id"] = owner
        elif request.tenant_id and not self._trusts_tenants:
            changed["tenant_id"] = ""
        identity = self._identity
        if identity is not None:
            session = identity.session_of(request) or request.session_id
            changed["session_id"] = session
            if session and not changed.get("tenant_id", request.tenant_id):
                changed["tenant_id"] = AGENT + session
        if request.hints is not None:
            changed["hints"] = self._believed(request.hints) if self._trusts_hints else None
        return msgspec.structs.replace(request, **changed) if changed else request

    def _believed(self, hints: Hints) -> Hints:
        seconds = hints.returns_within_s
        if seconds is None or seconds <= self._max_return_s:
            return hints
        return msgspec.structs.replace(hints, returns_within_s=self._max_return_s)
