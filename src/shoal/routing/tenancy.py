"""Who a request belongs to, and what that gets it: priority, weight, budget, and the deadline that its client states.

Owns whose word counts: a key's, the configuration's, and a header's only where the configuration says so.  Budgets are
counted in `flow.budgets`.
"""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from shoal.flow import Allowance
from shoal.pool import Request
from shoal.routing.settings import PoolSettings, Tenant

WAIT_HEADER = "x-shoal-max-wait-ms"
SDK_HEADERS = ("x-stainless-read-timeout", "x-stainless-timeout")
"""After how many seconds without an answer an SDK of OpenAI or Anthropic gives up; which is sent is its language's."""
DEADLINE_HEADERS = (WAIT_HEADER, *SDK_HEADERS)
_WORD_RATIO = 0.1
_WORD_S = 1.0
"""An SDK is told so much before it gives up, the shorter of the two, so that it hears when to come back."""
SLO_TTFT_HEADER = "x-llm-d-slo-ttft-ms"
ANYONE = "*"
_UNNAMED = Tenant()
_MAX_MS = 86_400_000.0


class Standing(NamedTuple):
    """What a request's tenant has.  payer: whose budget it uses; "" for nobody's."""

    priority: int
    weight: float
    payer: str
    allowance: Allowance


class Tenancy:
    """The tenants of a configuration.  bands: priorities that it sets up without giving them to anybody.

    priorities: all that a request may have.
    """

    __slots__ = ("_objectives", "_standings", "_tenants", "_trusts_headers", "_trusts_tenants", "priorities")

    def __init__(self, pool: PoolSettings, objectives: Mapping[str, int], bands: Iterable[int] = ()) -> None:
        self._objectives = objectives
        self._tenants = pool.tenants
        self._trusts_headers = pool.flow.trust_headers
        # Where there are keys the tenant is the key's owner, whatever a header says.
        self._trusts_tenants = bool(pool.auth.keys_file) or pool.flow.trust_headers
        self._standings: dict[str, Standing] = {}
        given = (tenant.priority or 0 for tenant in pool.tenants.values())
        self.priorities = frozenset((0, *objectives.values(), *given, *bands))

    @property
    def has_budgets(self) -> bool:
        """Whether any tenant has a limit."""
        return any(tenant.requests_per_s or tenant.tokens_per_min for tenant in self._tenants.values())

    def of(self, request: Request) -> Standing:
        """Return what a request's tenant has."""
        name = request.tenant_id if self._trusts_tenants and request.tenant_id in self._tenants else ANYONE
        standing = self._standings.get(name)
        if standing is None:
            standing = self._standings[name] = self._standing(name)
        if name == ANYONE and self._trusts_tenants and standing.payer:
            standing = standing._replace(payer=request.tenant_id or ANYONE)
        if request.hints is not None and request.hints.priority is not None:
            # Only where hints are believed.  Bands are the configuration's: the nearest one that is not above.
            standing = standing._replace(priority=self._band_of(request.hints.priority))
        if not request.objective:
            return standing
        asked = self._objectives.get(request.objective)
        if asked is None or not (self._trusts_headers or asked < standing.priority):
            # Anybody may ask for less, few for more.
            return standing
        return standing._replace(priority=asked)

    def _band_of(self, priority: int) -> int:
        known = self.priorities
        return max((each for each in known if each <= priority), default=min(known))

    def _standing(self, name: str) -> Standing:
        tenant = self._tenants.get(name, _UNNAMED)
        priority = self._objectives.get(tenant.objective, 0) if tenant.objective else tenant.priority or 0
        allowance = Allowance(tenant.requests_per_s, tenant.tokens_per_min, tenant.burst_requests)
        has_limit = bool(tenant.requests_per_s or tenant.tokens_per_min)
        return Standing(priority, tenant.weight, name if has_limit else "", allowance)


def wait_limit_s(request: Request) -> float:
    """Return how long a request may wait for its client's sake, in seconds; infinite when it does not say, or nonsense.

    That is the shortest of what it says; an SDK's own timeout leaves it time to hear the answer.
    """
    headers = request.headers
    if not headers:
        return math.inf
    gives_up_s = min([_seconds(headers.get(name, ""), 1.0) for name in SDK_HEADERS])
    if gives_up_s < math.inf:
        gives_up_s -= min(_WORD_S, _WORD_RATIO * gives_up_s)
    return min(_seconds(headers.get(WAIT_HEADER, ""), 1e-3), gives_up_s)


def slo_ttft_s(request: Request) -> float:
    """Return the time to first token that the client asks for, in seconds; infinite as above."""
    return _seconds(request.headers.get(SLO_TTFT_HEADER, ""), 1e-3) if request.headers else math.inf


def _seconds(text: str, unit_s: float) -> float:
    if not text or len(text) > 20:
        return math.inf
    try:
        value = float(text)
    except ValueError:
        return math.inf
    return value * unit_s if 0 < value <= _MAX_MS else math.inf
