"""A recorded day of a real pool once more, in the twin: under the configuration that it had, or under another.

Owns what a journal becomes in the twin (engines, sessions, outages), the figures of the day itself, and which requests
another configuration sends elsewhere.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from shoal.engine import EngineConfig, Profile
from shoal.kernel import InvalidInput
from shoal.simulation import recorded
from shoal.simulation.cluster import Cluster, ClusterConfig
from shoal.simulation.loop import Rank
from shoal.simulation.nodes import NodeConfig
from shoal.simulation.observed import Pool, Seen, Served, observe
from shoal.simulation.prompts import UNIT_TOKENS
from shoal.simulation.results import Result, Sample, summarise
from shoal.simulation.sessions import Session

_NAN = float("nan")


class Day(NamedTuple):
    """What a journal says.  start_s: of its first request, on its clock.  arrivals: requests in all."""

    pool: Pool
    sessions: list[Session]
    start_s: float
    arrivals: int

    @property
    def machines(self) -> list[Seen]:
        """The endpoints that ever answered, by name."""
        return [seen for _, seen in sorted(self.pool.seen.items()) if any(is_up for _, is_up in seen.up)]


class Moves(msgspec.Struct, frozen=True, kw_only=True):
    """How a run differs from another one, request by request.

    compared: served in both.  elsewhere: served by another endpoint.  warmer, colder: found more, or less, of the
    prompt in a cache.  computed_ratio: tokens of prompts that had to be computed, against the other run.
    """

    compared: int
    elsewhere: int
    warmer: int
    colder: int
    computed_ratio: float


def day_of(files: Sequence[bytes]) -> Day:
    """Return the day of journals; files as `recorded.asked` takes them.  Raises InvalidInput."""
    requests = recorded.asked(files)
    if not requests:
        raise InvalidInput("the journal has no request")
    day = Day(observe(files), recorded.journal(files), requests[0].arrived_s, len(requests))
    if not day.machines:
        raise InvalidInput("the journal has no endpoint that ever was ready")
    return day


def as_recorded(day: Day) -> tuple[Result, list[Sample]]:
    """Return the figures of the day itself; what was not answered in whole counts as failed.

    Requests whose end is not in the journal are in no figure.
    """
    samples = [_sample(seen.endpoint.id, each, day.start_s) for seen in day.machines for each in seen.served]
    good = [sample for sample in samples if not sample.is_failed]
    lost = day.arrivals - day.pool.unfinished - len(good)
    nobody = Sample(0.0, _NAN, _NAN, _NAN, 0, 0, 0, "", "", True)
    names = [seen.endpoint.id for seen in day.machines]
    return summarise([*good, *[nobody] * max(0, lost)], names, day.pool.end_s - day.start_s), good


def _sample(endpoint: str, served: Served, start_s: float) -> Sample:
    waited_s = served.sent_s - served.arrived_s
    total_s = _NAN if served.total_s is None else served.total_s + waited_s
    ttft_s = _NAN if served.ttft_s is None else served.ttft_s + waited_s
    tpot_s = (total_s - ttft_s) / (served.output_tokens - 1) if served.output_tokens > 1 else _NAN
    is_failed = served.left_s is not None or not served.is_answered
    return Sample(
        served.arrived_s - start_s, ttft_s, tpot_s, total_s, served.prompt_tokens, served.cached_tokens,
        served.output_tokens, endpoint, "", is_failed,
    )  # fmt: skip


def nodes_of(day: Day, profile: Profile, factors: dict[str, float]) -> tuple[NodeConfig, ...]:
    """Return the engines of the day.  factors: of those that are slower or faster than the profile.

    An engine whose blocks are no multiple of 16 tokens gets the next larger one that is, and as much room in tokens.
    """
    nodes = []
    for seen in day.machines:
        block_size = -(-seen.block_size // UNIT_TOKENS) * UNIT_TOKENS
        num_blocks = seen.num_blocks
        if num_blocks and block_size:
            num_blocks = max(1, num_blocks * seen.block_size // block_size)
        factor = factors.get(seen.endpoint.id, 1.0)
        engine = EngineConfig(profile=profile, num_blocks=num_blocks, block_size=block_size, slow_factor=factor)
        nodes.append(NodeConfig(id=seen.endpoint.id, engine=engine, labels=seen.endpoint.labels))
    return tuple(nodes)


def play(
    day: Day,
    nodes: tuple[NodeConfig, ...],
    router: str,
    *,
    seed: int = 1,
    progress: Callable[[int, float], None] | None = None,
) -> tuple[Result, list[Sample]]:
    """Run the day under a configuration (its text).

    Sessions begin when they did, and go on as long after each answer as they did; endpoints fail and come back when
    they did.  progress: as of `Cluster`.
    """
    cluster = Cluster(ClusterConfig(nodes=nodes, router=router, routers=max(1, day.pool.routers), seed=seed))
    cluster.on_progress = progress
    for at_s, name, is_up in outages(day, cluster.config.detect_s):
        cluster.loop.at(at_s, Rank.WORLD, cluster.revive if is_up else cluster.kill, name)
    cluster.run(day.sessions)
    names = [node.id for node in nodes]
    return summarise(cluster.samples, names, cluster.loop.now), cluster.samples


def outages(day: Day, detect_s: float) -> list[tuple[float, str, bool]]:
    """Return when which endpoint stopped (False) and began again (True), in seconds of the day.

    detect_s: that long before the router was told, it happened.
    """
    found: list[tuple[float, str, bool]] = []
    for seen in day.machines:
        is_up = True
        before = [state for at, state in seen.up if at <= day.start_s]
        if not (before and before[-1]):
            found.append((0.0, seen.endpoint.id, False))
            is_up = False
        for at, state in seen.up:
            if at > day.start_s and state != is_up:
                found.append((max(0.0, at - day.start_s - detect_s), seen.endpoint.id, state))
                is_up = state
    return sorted(found)


def moves(before: Sequence[Sample], after: Sequence[Sample]) -> Moves:
    """Return what became of the requests of a run in another one of the same day."""
    places: dict[tuple[str, int, int], list[Sample]] = defaultdict(list)
    for sample in sorted(after, key=lambda each: each.arrived_s):
        if not sample.is_failed:
            places[_key(sample)].append(sample)
    pairs = []
    for sample in sorted(before, key=lambda each: each.arrived_s):
        same = places[_key(sample)] if not sample.is_failed else []
        if same:
            pairs.append((sample, same.pop(0)))
    computed = [sum(each.prompt_tokens - each.cached_tokens for each in run) for run in zip(*pairs, strict=True)]
    return Moves(
        compared=len(pairs),
        elsewhere=sum(one.endpoint != other.endpoint for one, other in pairs),
        warmer=sum(one.cached_tokens < other.cached_tokens for one, other in pairs),
        colder=sum(one.cached_tokens > other.cached_tokens for one, other in pairs),
        computed_ratio=computed[1] / max(1, computed[0]) if computed else 1.0,
    )


def _key(sample: Sample) -> tuple[str, int, int]:
    return sample.session, sample.prompt_tokens, sample.output_tokens
