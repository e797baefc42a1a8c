"""llm-d's `program-aware-fairness`: tenants ("programs") with the least attained service go first.

Owns the decayed service of each program and the score of those that wait.
"""

from collections import OrderedDict
from typing import Annotated, ClassVar, Literal

from shoal.flow.fairness import MAX_TENANTS, Turns
from shoal.flow.lines import Line
from shoal.flow.tickets import Ticket

MAX_COMPARED = 256
"""Waiting programs that are compared for one request, in the order in which they were served last."""


class _Program:
    __slots__ = ("at", "tokens")

    def __init__(self, now: float) -> None:
        self.tokens = 0.0
        self.at = now


class _ProgramTurns:
    __slots__ = ("_policy", "_programs", "_ring")

    def __init__(self, policy: "ProgramAwareFairness") -> None:
        self._policy = policy
        self._ring: OrderedDict[str, Line] = OrderedDict()
        self._programs: OrderedDict[str, _Program] = OrderedDict()

    def wake(self, line: Line, now: float) -> None:
        self._ring.setdefault(line.tenant_id, line)

    def next(self, now: float) -> Ticket | None:
        waiting: list[tuple[Ticket, float, float]] = []
        for tenant_id, line in list(self._ring.items())[:MAX_COMPARED]:
            head = line.head()
            if head is None:
                del self._ring[tenant_id]
                continue
            waiting.append((head, self._service(tenant_id, now), max(0.0, now - head.arrived_at)))
        if not waiting:
            return self.next(now) if self._ring else None
        policy = self._policy
        most = max(1.0, *(service for _, service, _ in waiting))
        longest = max(wait for _, _, wait in waiting) or 1.0
        return max(
            waiting,
            key=lambda each: policy.weight_service * (1.0 - each[1] / most) + policy.weight_wait * each[2] / longest,
        )[0]

    def served(self, line: Line, now: float) -> None:
        if line.size:
            self._ring.move_to_end(line.tenant_id)
        else:
            self._ring.pop(line.tenant_id, None)

    def charge(self, tenant_id: str, weight: float, tokens: float, now: float, *, is_late: bool = False) -> None:
        program = self._programs.get(tenant_id)
        if program is None:
            self._evict(now)
            program = self._programs[tenant_id] = _Program(now)
        program.tokens = max(0.0, self._service(tenant_id, now) + tokens)
        program.at = max(program.at, now)
        self._programs.move_to_end(tenant_id)

    def _service(self, tenant_id: str, now: float) -> float:
        program = self._programs.get(tenant_id)
        if program is None:
            return 0.0
        half_life_s = self._policy.half_life_s
        return float(program.tokens * 0.5 ** ((now - program.at) / half_life_s)) if half_life_s > 0 else program.tokens

    def _evict(self, now: float) -> None:
        programs = self._programs
        while programs:
            oldest = next(iter(programs))
            if len(programs) < MAX_TENANTS and now - programs[oldest].at < self._policy.eviction_ttl_s:
                return
            del programs[oldest]


class ProgramAwareFairness:
    """Programs (tenants) that had the least service go first, with some weight on how long their head has waited.

    score = lasWeightService * (1 - service / most service) + lasWeightHeadWait * wait / longest wait, over the programs
    that wait.  Service is what a program's requests cost, halved every lasHalfLifeSeconds.
    """

    type: ClassVar[str] = "program-aware-fairness"

    def __init__(
        self,
        *,
        strategy: Annotated[Literal["las"], "least attained service, the only one"] = "las",
        las_weight_service: Annotated[float, "weight of the service, 0 or more"] = 0.8,
        las_weight_head_wait: Annotated[float, "weight of the wait, 0 or more"] = 0.2,
        las_half_life_seconds: Annotated[float, "after which service counts half; 0 for never"] = 60.0,
        eviction_ttl_seconds: Annotated[float, "after which a silent program is forgotten"] = 3600.0,
        eviction_sweep_seconds: Annotated[float, "no sweep is needed here; read and not used"] = 300.0,
    ) -> None:
        for name, value in (
            ("lasWeightService", las_weight_service),
            ("lasWeightHeadWait", las_weight_head_wait),
            ("lasHalfLifeSeconds", las_half_life_seconds),
            ("evictionTtlSeconds", eviction_ttl_seconds),
        ):
            if value < 0:
                raise ValueError(f"{name} must not be negative, got {value:g}")
        self.weight_service = las_weight_service
        self.weight_wait = las_weight_head_wait
        self.half_life_s = las_half_life_seconds
        self.eviction_ttl_s = eviction_ttl_seconds

    def turns(self) -> Turns:
        """Return the state of a new band."""
        return _ProgramTurns(self)
