"""The clairvoyant reference: an offline search for the places of all requests, with everything known beforehand.

Owns the search.  It runs the twin again and again on the same arrivals, each time with other places, and so knows how
long answers are and what sessions will send.  That is no policy and nothing that a router can do: it says how much is
left to win.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product

import msgspec
import numpy as np
import numpy.typing as npt

from shoal.kernel import Chance
from shoal.simulation.cluster import Cluster, Places
from shoal.simulation.experiment import Experiment, arriving, build, nodes_of
from shoal.simulation.regret import NEVER_S, REFERENCE, Scale, waits
from shoal.simulation.results import Requests, Run, Sample, columns, summarise
from shoal.simulation.sessions import Session, Turn
from shoal.simulation.timeline import Timeline

Plan = tuple[int, ...]
"""The endpoint of each request, by its place in the fleet."""

Floats = npt.NDArray[np.float64]


class Future:
    """All requests that will come, session by session.  endpoints: names, in the order of the fleet."""

    __slots__ = ("_experiment", "_groups", "_places", "_seed", "_sessions", "count", "endpoints")

    def __init__(self, experiment: Experiment, seed: int, sessions: list[Session] | None = None) -> None:
        self._experiment = experiment
        self._seed = seed
        self._sessions = [_kept(session) for session in arriving(experiment, seed, sessions)]
        self._places: dict[str, list[int]] = defaultdict(list)
        self.endpoints = [node.id for node in nodes_of(experiment)]
        asked = [entry for session in self._sessions for entry in _asked(session)]
        self.count = len(asked)
        for place, (name, _) in enumerate(asked):
            self._places[name].append(place)
        self._groups = _groups([turn for _, turn in asked])

    def groups(self, request: int) -> list[list[int]]:
        """Return the requests that begin like this one, ever fewer that share ever more; itself alone at last."""
        return self._groups[request]

    def plan_of(self, requests: Requests) -> Plan:
        """Return where the requests of a run were served, the first endpoint for those that were not."""
        plan = [0] * self.count
        served = [self.endpoints.index(name) if name else 0 for name in requests.endpoint.names]
        rows = np.argsort(requests.arrived_s, kind="stable").tolist()
        names = (requests.session.names[requests.session.codes[row]] for row in rows)
        for place, row in zip(self._order(names), rows, strict=True):
            plan[place] = served[requests.endpoint.codes[row]]
        return tuple(plan)

    def waits(self, plan: Plan) -> Floats:
        """Return the time to first token of each request with these places, in seconds; NEVER_S for none."""
        samples = sorted(self.play(plan).samples, key=_arrival)
        waits_s = np.full(self.count, NEVER_S)
        for place, sample in zip(self._order(sample.session for sample in samples), samples, strict=True):
            if not sample.is_failed:
                waits_s[place] = sample.ttft_s
        return waits_s

    def play(self, plan: Plan, timeline: Timeline | None = None) -> Cluster:
        """Return the pool after a run with these places.  timeline: filled, when there is one."""
        cluster = build(self._experiment, self._seed, places=self._follow(plan))
        if timeline is None:
            # Nobody reads the metrics.
            cluster.config = msgspec.structs.replace(cluster.config, scrape_s=math.inf)
        cluster.timeline = timeline
        cluster.run(self._sessions)
        return cluster

    def _follow(self, plan: Plan) -> Places:
        """Place the requests of a session in their order; a dead endpoint's go on to those behind it."""
        left = {name: iter(places) for name, places in self._places.items()}
        turned = [(*self.endpoints[n:], *self.endpoints[:n]) for n in range(len(self.endpoints))]
        return lambda session: turned[plan[next(left[session])]]

    def _order(self, sessions: Iterable[str]) -> Iterator[int]:
        """Yield which request each is, given the sessions of all that were sent in their order."""
        left = {name: iter(places) for name, places in self._places.items()}
        return (next(left[session]) for session in sessions)


def find_reference(
    experiment: Experiment,
    runs: Sequence[Run],
    *,
    sessions: list[Session] | None = None,
    trials: int,
    progress: Callable[[int, float], None] | None = None,
) -> Run:
    """Return the best run that is found within `trials` runs of the twin.

    runs: of policies on the same arrivals; the search begins with the best one's places.  Where there are no more ways
    to place all requests than trials, each is tried, and the best is the best there is.  progress: told of the requests
    simulated and of the share of the trials that are over.  A KeyboardInterrupt ends it with what there is
    (`is_partial`).
    """
    seed = runs[0].seed
    future = Future(experiment, seed, sessions)
    scale = Scale.of(runs)
    best = min(runs, key=lambda run: scale.cost(waits(run, future.count)))
    plan = future.plan_of(best.requests)
    is_cut = False
    try:
        found = search(future, scale.cost, plan, trials, Chance(seed).stream("clairvoyant"))
        for trial, plan in enumerate(found, 1):  # noqa: B007
            if progress is not None:
                progress(trial * future.count, min(1.0, trial / trials))
    except KeyboardInterrupt:
        is_cut = True
    timeline = Timeline(future.endpoints)
    cluster = future.play(plan, timeline)
    result = summarise(cluster.samples, future.endpoints, cluster.loop.now, timeline=timeline, is_partial=is_cut)
    return Run(REFERENCE, runs[0].load, seed, result, columns(cluster.samples), timeline)


def search(
    future: Future, cost: Callable[[Floats], float], start: Plan, trials: int, rng: np.random.Generator
) -> Iterator[Plan]:
    """Yield the best plan so far after each of at most `trials` trials.

    All plans are tried where they are no more than that; else each trial changes the best one, and what it found is the
    best when it is no worse.
    """
    endpoints = len(future.endpoints)
    if endpoints ** min(future.count, 64) <= trials:
        yield from _all(future, cost)
        return
    best = start
    waits_s = future.waits(best)
    lowest = cost(waits_s)
    yield best
    for _ in range(1, trials):
        tried = changed(future, best, waits_s, rng)
        tried_s = future.waits(tried)
        if (found := cost(tried_s)) <= lowest:
            best, waits_s, lowest = tried, tried_s, found
        yield best


def _all(future: Future, cost: Callable[[Floats], float]) -> Iterator[Plan]:
    best: Plan = ()
    lowest = math.inf
    for plan in product(range(len(future.endpoints)), repeat=future.count):
        if (found := cost(future.waits(plan))) < lowest:
            best, lowest = plan, found
        yield best


def changed(future: Future, plan: Plan, waits_s: Floats, rng: np.random.Generator) -> Plan:
    """Return the plan with some requests that begin alike on another endpoint, most often such as wait long.

    A request takes with it those of its group that are where it is, all of the group, those behind it, or a part.
    """
    made = list(plan)
    weights = np.minimum(waits_s, 100 * np.median(waits_s)) + 0.1 * np.median(waits_s)
    weights /= weights.sum()
    for _ in range(int(rng.geometric(0.5))):
        which = int(rng.choice(future.count, p=weights)) if rng.random() < 0.7 else int(rng.integers(future.count))
        here = made[which]
        there = (here + int(rng.integers(1, len(future.endpoints)))) % len(future.endpoints)
        if rng.random() < 0.25:
            _move(made, _chosen(future, made, int(rng.integers(future.count)), rng), here)
        _move(made, _chosen(future, made, which, rng), there)
    return tuple(made)


def _chosen(future: Future, plan: Sequence[int], which: int, rng: np.random.Generator) -> list[int]:
    groups = future.groups(which)
    group = groups[int(rng.integers(len(groups)))]
    match int(rng.integers(4)):
        case 0:
            return [each for each in group if plan[each] == plan[which]]
        case 1:
            return [each for each in group if each >= which]
        case 2:
            return [each for each in group if each == which or rng.random() < 0.5]
        case _:
            return group


def _move(plan: list[int], requests: Iterable[int], endpoint: int) -> None:
    for each in requests:
        plan[each] = endpoint


def _arrival(sample: Sample) -> float:
    return sample.arrived_s


def _kept(session: Session) -> Session:
    """Return the session with its turns made once, for many runs."""
    turns = [
        turn if isinstance(turn, Turn) else turn._replace(sessions=tuple(map(_kept, turn.sessions)))
        for turn in session.turns()
    ]
    return session._replace(turns=lambda: iter(turns))


def _asked(session: Session) -> Iterator[tuple[str, Turn]]:
    """Yield the requests of a session and of those that it starts, each with its session's id."""
    for turn in session.turns():
        if isinstance(turn, Turn):
            yield session.id, turn
        else:
            for child in turn.sessions:
                yield from _asked(child)


def _groups(turns: Sequence[Turn]) -> list[list[list[int]]]:
    """Return the groups of each request: by its first unit, the first two, four, and so on, by its whole prompt."""
    sharing: dict[int, list[int]] = defaultdict(list)
    depths = []
    for place, turn in enumerate(turns):
        chain = turn.prompt.chain
        ends = [*(2**n - 1 for n in range(len(chain).bit_length() - 1)), len(chain) - 1] if len(chain) else []
        depths.append([int(chain[end]) for end in ends])
        for depth in dict.fromkeys(depths[-1]):
            sharing[depth].append(place)
    return [
        [*{len(sharing[depth]): sharing[depth] for depth in own}.values(), [place]] for place, own in enumerate(depths)
    ]
