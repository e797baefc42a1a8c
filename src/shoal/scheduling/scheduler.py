"""The scheduler: filters, weighted scorers and a picker applied to a view of the fleet.

Owns the order of these steps, the clamping, weighing and explaining of scores, and the fallbacks.  It has no
clock, keeps no books, and changes plugin state only in `dispatched` and `endpoint_left`.
"""

from typing import Generic, NamedTuple, TypeVar

import numpy as np

from shoal.kernel import Chance
from shoal.pool import Decision, FleetView, Refusal, RefusalReason, Request, ScoreColumn
from shoal.scheduling.columns import PerFleet
from shoal.scheduling.pickers import Draws, MaxScorePicker, best
from shoal.scheduling.plugin import (
    FEW,
    Admitter,
    Adopting,
    Answering,
    Drawing,
    FewScorer,
    Filter,
    Observer,
    Picker,
    Releasing,
    Scorer,
    Scores,
)

T = TypeVar("T", covariant=True)


class Named(NamedTuple, Generic[T]):
    """A plugin under its configured name.  weight: for scorers."""

    name: str
    plugin: T
    weight: float = 1.0


class Profile(NamedTuple):
    """An ordered recipe for one decision."""

    name: str
    filters: tuple[Named[Filter], ...]
    scorers: tuple[Named[Scorer], ...]
    picker: Named[Picker]

    def plugins(self) -> list[Named[object]]:
        """Return each plugin once, in order of first use."""
        seen: dict[str, Named[object]] = {}
        for named in (*self.filters, *self.scorers, self.picker):
            seen.setdefault(named.name, named)
        return list(seen.values())


class Policy(NamedTuple):
    """How a request is placed.

    fallbacks: endpoints to name after those that the picker chose, by descending total, so that a retry has
    somewhere to go.  admitters: asked before anything else.  stand_in: decides while predicted latencies cannot be
    trusted, None where nothing reads them.
    """

    profile: Profile
    fallbacks: int = 2
    admitters: tuple[Named[Admitter], ...] = ()
    stand_in: Profile | None = None


class Scheduler:
    """Places one request at a time.  chance: its stream `scheduling` breaks ties and draws for pickers."""

    __slots__ = (
        "_answering", "_chance", "_draws", "_few", "_ids", "_observers", "_ranks", "_releasing", "_scorers",
        "_stand_in", "policy",
    )  # fmt: skip

    def __init__(self, policy: Policy, chance: Chance) -> None:
        self.policy = policy
        self._chance = chance.stream("scheduling")
        self._draws = Draws(self._chance)
        # What this picker chooses and its fallbacks are one ranking.
        self._ranks = isinstance(policy.profile.picker.plugin, MaxScorePicker)
        self._stand_in = (
            None if policy.stand_in is None else Scheduler(Policy(policy.stand_in, policy.fallbacks), chance)
        )
        plugins = policy.profile.plugins()
        self._observers = [named.plugin for named in plugins if isinstance(named.plugin, Observer)]
        self._releasing = [named.plugin for named in plugins if isinstance(named.plugin, Releasing)]
        self._answering = [named.plugin for named in plugins if isinstance(named.plugin, Answering)]
        self._few = _few_scorer(policy.profile)
        self._scorers = [
            (name, plugin.score, weight, getattr(plugin, "is_within", False) is True)
            for name, plugin, weight in policy.profile.scorers
        ]
        self._ids = PerFleet(lambda fleet: tuple(endpoint.id for endpoint in fleet))
        for named in (*plugins, *policy.admitters):
            if isinstance(named.plugin, Drawing):
                named.plugin.draw_from(chance.stream(f"plugin {named.name}"))

    def adopt(self, previous: "Scheduler") -> None:
        """Take over what the plugins of `previous` have learned, where name and class are the same."""
        old = {named.name: named.plugin for named in previous.policy.profile.plugins()}
        for name, plugin, _ in self.policy.profile.plugins():
            if isinstance(plugin, Adopting) and type(old.get(name)) is type(plugin):
                plugin.adopt(old[name])

    def schedule(self, request: Request, view: FleetView, now: float, priority: int = 0) -> Decision | Refusal:
        """Choose endpoints for `request` among the candidates of `view`.

        A refusal does not say when to come back: that is for whoever knows how fast requests end.
        """
        profile = self.policy.profile
        if len(view) == 0:
            return Refusal(reason=RefusalReason.NO_ENDPOINTS, message="no endpoint is ready", retry_after_s=1.0)
        if self._stand_in is not None and view.level("is_latency_unknown") == 1.0:
            return self._stand_in.schedule(request, view, now)
        for _, admitter, _ in self.policy.admitters:
            if why := admitter.objection(request, priority, view):
                return Refusal(reason=RefusalReason.NOT_ADMITTED, message=why)
        dropped: list[tuple[str, int]] = []
        for name, narrow, _ in profile.filters:
            mask = narrow.keep(request, view)
            kept = int(np.count_nonzero(mask))
            dropped.append((name, len(view) - kept))
            if kept == 0:
                return _saturated(dropped)
            if kept < len(view):
                view = view.keep(mask)
        columns, total = self._scores(request, view)
        picker = profile.picker.plugin
        if self._ranks:
            picked = best(total, picker.max_num_of_endpoints + self.policy.fallbacks, self._draws)
        else:
            picked = picker.pick(np.array(total) if isinstance(total, list) else total, self._chance)
            picked += best(total, self.policy.fallbacks, self._draws, picked)
        ids = self._ids.of(view)
        candidates = ids if view.rows is None else tuple([ids[row] for row in view.rows.tolist()])
        chosen = tuple([candidates[position] for position in picked])
        return Decision(profile.name, chosen, candidates, columns, total, tuple(dropped))

    def _scores(self, request: Request, view: FleetView) -> tuple[tuple[ScoreColumn, ...], Scores | list[float]]:
        """Return each scorer's clamped column and the weighted sum."""
        if self._few is not None and len(view) <= FEW:
            values = self._few.plugin.score_few(request, view)
            if values is not None:
                column = ScoreColumn(self._few.name, self._few.weight, values)
                return (column,), values if column.weight == 1.0 else [column.weight * value for value in values]
        columns = []
        total: Scores | None = None
        for name, score, weight, is_within in self._scorers:
            scores = score(request, view)
            if not is_within:
                scores = _clamped(scores)
            columns.append(ScoreColumn(name, weight, scores))
            weighted = scores if weight == 1.0 else weight * scores
            total = weighted if total is None else total + weighted
        return tuple(columns), np.zeros(len(view)) if total is None else total

    def dispatched(self, request: Request, view: FleetView, decision: Decision, now: float) -> None:
        """Tell the plugins that `request` was sent to `decision.chosen[0]`; `view` is the one given to schedule."""
        for observer in self._observers:
            observer.dispatched(request, view, decision, now)

    def released(self, request_id: str) -> None:
        """Tell the plugins that a request is over."""
        for releasing in self._releasing:
            releasing.released(request_id)

    def endpoint_left(self, endpoint_id: str) -> None:
        """Tell the plugins that an endpoint is gone."""
        for observer in self._observers:
            observer.endpoint_left(endpoint_id)

    def response_headers(self, request: Request, decision: Decision) -> tuple[tuple[str, str], ...]:
        """Return the headers that plugins add to the client's response."""
        if not self._answering:
            return ()
        headers: dict[str, str] = {}
        for answering in self._answering:
            headers.update(answering.response_headers(request, decision))
        return tuple(headers.items())


def _few_scorer(profile: Profile) -> Named[FewScorer] | None:
    """The only scorer of a profile, when it can do without arrays."""
    plugins = [named.plugin for named in profile.scorers]
    if len(plugins) == 1 and isinstance(plugins[0], FewScorer):
        return Named(profile.scorers[0].name, plugins[0], profile.scorers[0].weight)
    return None


def _clamped(values: Scores) -> Scores:
    """Return the scores within 0 to 1, what a scorer does not know as 0."""
    if values[values.argmin()] >= 0.0 and values[values.argmax()] <= 1.0:
        return values
    # fmax takes the number where the other is NaN.
    within: Scores = np.fmin(np.fmax(values, 0.0), 1.0)
    return within


def _saturated(dropped: list[tuple[str, int]]) -> Refusal:
    steps = ", ".join(f"{name} dropped {count}" for name, count in dropped if count)
    return Refusal(reason=RefusalReason.SATURATED, message=f"no endpoint can take the request now: {steps}")
