"""Which endpoints may serve a request: ready, serving its model, allowed by the gateway, not ejected.

Owns the cache of rows per model and the list of ejected members.  Never lets ejections empty the choice: when every
endpoint that serves a model is ejected, all of them are offered again.
"""

import numpy as np
import numpy.typing as npt

from shoal.pool import EndpointState, Request
from shoal.routing.fleet import Fleet, Member
from shoal.routing.health import EjectionPolicy
from shoal.routing.models import ModelTable

Rows = npt.NDArray[np.intp]


class Candidates:
    """Rows of the fleet that a request may go to."""

    __slots__ = ("_by_model", "_contexts", "_ejected", "_fleet", "_generation", "_models")

    def __init__(self, fleet: Fleet, models: ModelTable) -> None:
        self._fleet = fleet
        self._models = models
        self._by_model: dict[str, Rows] = {}
        self._contexts: dict[str, npt.NDArray[np.float64]] = {}
        self._generation = -1
        self._ejected: dict[str, Member] = {}

    def invalidate(self) -> None:
        """Forget cached rows; models or aliases changed."""
        self._generation = -1

    def rows(self, model: str, request: Request, now: float) -> Rows:
        """Ascending rows that may serve `model` for this request, empty when none may."""
        if self._generation != self._fleet.generation:
            self._by_model, self._contexts = {}, {}
            self._generation = self._fleet.generation
        rows = self._by_model.get(model)
        if rows is None:
            rows = self._found(model)
        if model in self._contexts:
            rows = self._long_enough(model, rows, request)
        if request.subset is not None:
            rows = self._within(rows, request.subset)
        return self._healthy(rows, now) if self._ejected and len(rows) else rows

    def _found(self, model: str) -> Rows:
        """Those that are ready and serve a model; remembered where there are any."""
        serves = self._models.is_served_by
        ready = [m.row for m in self._fleet if m.state is EndpointState.READY and serves(model, m.endpoint.id)]
        rows = np.array(ready, np.intp)
        if len(rows):
            self._by_model[model] = rows
            self._note_contexts(model, rows)
        return rows

    def nobody(self, model: str) -> str:
        """What a client is told when no row may serve it."""
        known = len(self._fleet)
        loading = sum(member.state is EndpointState.LOADING for member in self._fleet)
        what = f"No endpoint is ready for the model `{model[:200]}`" if model else "No endpoint is ready"
        if not known:
            return f"{what}: the pool knows none."
        return f"{what}: {loading} of {known} still loading." if loading else f"{what}: {known} known, 0 loading."

    def _note_contexts(self, model: str, rows: Rows) -> None:
        """Keep the context limits of a model's endpoints where they differ."""
        endpoints = self._fleet.endpoints
        lengths = [self._models.max_model_len(model, endpoints[row].id) or np.inf for row in rows]
        if len(set(lengths)) > 1:
            self._contexts[model] = np.array(lengths, np.float64)

    def _long_enough(self, model: str, rows: Rows, request: Request) -> Rows:
        """Those whose context holds the prompt and its answer, all when none does: tokens are estimated."""
        wanted = request.prompt_tokens + (request.max_output_tokens or 0)
        fitting = rows[self._contexts[model] >= wanted]
        return fitting if len(fitting) else rows

    def _within(self, rows: Rows, subset: tuple[str, ...]) -> Rows:
        """Only the hosts that the gateway names; as in llm-d the port does not count."""
        hosts = {_host(address) for address in subset}
        endpoints = self._fleet.endpoints
        return np.array([row for row in rows if _host(endpoints[row].address) in hosts], np.intp)

    def _healthy(self, rows: Rows, now: float) -> Rows:
        inflight = self._fleet.columns["inflight_requests"]
        shut = {m.row for m in self._ejected.values() if not m.health.is_offered(now, inflight[m.row])}
        healthy = np.array([row for row in rows if row not in shut], np.intp)
        return healthy if len(healthy) else rows

    def failed(self, member: Member, policy: EjectionPolicy, now: float) -> None:
        """Note a failure of the engine; enough of them in a row eject it."""
        member.failures_total += 1
        if member.health.failed(policy, now):
            self._ejected[member.endpoint.id] = member

    def succeeded(self, member: Member) -> None:
        """Note an answer of the engine; it ends an ejection."""
        if member.health.succeeded():
            self._ejected.pop(member.endpoint.id, None)

    def forget(self, endpoint_id: str) -> None:
        """Drop an endpoint that left."""
        self._ejected.pop(endpoint_id, None)


def _host(address: str) -> str:
    """The host of `host:port`, `[v6]:port` or a bare host."""
    host, colon, port = address.rpartition(":")
    return host.strip("[]") if colon and port.isdecimal() else address.strip("[]")
