"""An experiment: a fleet, a workload and a router's configuration, run once per seed.

Owns the document and what it makes.  Files are read by whoever runs it.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from shoal.kernel import Chance, ConfigError, InvalidInput
from shoal.routing.config import load
from shoal.simulation import fleets, recorded, traces
from shoal.simulation.arrivals import Arrivals
from shoal.simulation.cluster import Cluster, ClusterConfig, Places
from shoal.simulation.fleets import Group, Store
from shoal.simulation.handover import Handover, Role
from shoal.simulation.incidents import Incident, check_incidents, in_order, late
from shoal.simulation.inferenceperf import read_perf
from shoal.simulation.loop import Rank
from shoal.simulation.network import check_jitter
from shoal.simulation.nodes import NodeConfig
from shoal.simulation.results import Result, Sample, summarise
from shoal.simulation.sessions import Session
from shoal.simulation.talks import Seconds
from shoal.simulation.timeline import Timeline
from shoal.simulation.workloads import Recipe
from shoal.wire.documents import read_document

_PLAIN = ClusterConfig(nodes=())


class Trace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="trace", tag_field="shape"):
    """Recorded traffic.  rate: how much faster than recorded.  limit: sessions, 0 for all.  skip: sessions left out at
    its beginning, as when a policy was chosen on them; the first one behind them begins at 0.

    has_sessions: of `mooncake`, see `traces.mooncake`; journals have sessions of themselves.  Without a skip the limit
    of these two is one of requests, of which sessions are made.
    """

    path: str
    format: Literal["mooncake", "azure", "claude-code", "tracelab", "journal"]
    has_sessions: bool = False
    rate: Annotated[float, msgspec.Meta(ge=1e-6, le=1e6)] = 1.0
    limit: Annotated[int, msgspec.Meta(ge=0)] = 0
    skip: Annotated[int, msgspec.Meta(ge=0)] = 0

    @property
    def last(self) -> int:
        """Up to which request or session it is read, 0 for all."""
        if self.skip and (self.has_sessions or self.format == "journal"):
            # How many requests the sessions have is known when all are read.
            return 0
        return self.limit + self.skip if self.limit else 0

    @property
    def is_timed(self) -> bool:
        """Whether the trace says when its sessions begin; else `arrivals` does."""
        return self.format in ("mooncake", "azure", "journal")


class Perf(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="inference-perf", tag_field="shape"
):
    """A configuration file of inference-perf: data and load.  stage: of its load, from 0."""

    path: str
    stage: Annotated[int, msgspec.Meta(ge=0)] = 0


class Tenant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who sends a share of the sessions.  share: against the others'.  headers: of each of its requests."""

    share: Annotated[float, msgspec.Meta(ge=1e-9, le=1e9)] = 1.0
    headers: dict[str, str] = {}


class RouterSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The router.  config: path of its configuration, "" for the default profile.  count: pickers."""

    config: str = ""
    count: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    gossip_s: Seconds = 0.01


class Delays(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What takes time beside engines; between pickers it is the router's.  See `ClusterConfig`."""

    network_s: Seconds = _PLAIN.network_s
    jitter_s: tuple[Seconds, ...] = _PLAIN.jitter_s
    record_s: Seconds = _PLAIN.record_s
    scrape_s: Annotated[float, msgspec.Meta(ge=0.001, le=10_000_000)] = _PLAIN.scrape_s
    tokenise_s: Seconds = _PLAIN.tokenise_s
    detect_s: Seconds = _PLAIN.detect_s

    def __post_init__(self) -> None:
        check_jitter(self.jitter_s)


class Experiment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The document `kind: Experiment`.

    headers: of every request, as `x-llm-d-slo-ttft-ms: "500"`.  tenants: by name; sessions that have no tenant by their
    workload get one of these by chance, none when there are none.
    """

    workload: Recipe | Trace | Perf
    tenants: dict[str, Tenant] = {}
    headers: dict[str, str] = {}
    name: str = ""
    fleet: tuple[Group, ...] = (Group(),)
    store: Store | None = None
    handover: Handover = Handover()
    delays: Delays = Delays()
    router: RouterSpec = RouterSpec()
    arrivals: Arrivals = Arrivals()
    incidents: tuple[Incident, ...] = ()
    seeds: tuple[Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)], ...] = (1, 2, 3)


def read_experiment(text: str, source: str, read: Callable[[str], str] | None = None) -> Experiment:
    """Read an experiment.  Raises ConfigError that names the path of the first thing that is wrong.

    read: gives the text of a file that it names: of a profile, or of a configuration; without it only profiles of the
    catalogue are known.
    """
    document = read_document(text, source)
    try:
        experiment = msgspec.convert(document, Experiment)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error), source=source) from None
    if read is not None:
        fleet = fleets.with_profiles(experiment.fleet, read)
        handover = experiment.handover
        if handover.config and "\n" not in handover.config:
            handover = msgspec.structs.replace(handover, config=read(handover.config).rstrip() + "\n")
        experiment = msgspec.structs.replace(experiment, fleet=fleet, handover=handover)
    fleets.check_fleet(experiment.fleet, experiment.store, source)
    if experiment.handover != Handover() and all(group.role is Role.BOTH for group in experiment.fleet):
        raise ConfigError("handover: no engine has the role prefill or decode", source=source)
    if experiment.handover.config:
        load(experiment.handover.config, f"{source}: handover: config")
    check_incidents(experiment.incidents, [node.id for node in nodes_of(experiment)], source)
    if not experiment.seeds:
        raise ConfigError("seeds: give at least one", source=source)
    return experiment


def nodes_of(experiment: Experiment) -> tuple[NodeConfig, ...]:
    """Return the engines of the fleet: e0, e1, ... in the order of its groups."""
    return fleets.nodes(experiment.fleet, experiment.store)


def load_unit(experiment: Experiment) -> str:
    """Return what a load of this experiment is a number of."""
    if isinstance(experiment.workload, Trace) and experiment.workload.is_timed:
        return "times as recorded"
    return "clients" if experiment.arrivals.kind == "closed" else "sessions/s"


def at_load(experiment: Experiment, load: float) -> Experiment:
    """Return the experiment with other arrivals: that many clients, sessions per second, or times the recorded rate.

    Raises ConfigError for a load that cannot be.
    """
    unit = load_unit(experiment)
    if not 1e-6 <= load < 1e9 or (unit == "clients" and load != int(load)):
        raise ConfigError(f"a load must be a number of {unit} above 0, got {load:g}", source="--load")
    if isinstance(experiment.workload, Trace) and unit == "times as recorded":
        return msgspec.structs.replace(experiment, workload=msgspec.structs.replace(experiment.workload, rate=load))
    changed: dict[str, Any] = {"concurrency": int(load)} if unit == "clients" else {"rate_per_s": load}
    return msgspec.structs.replace(experiment, arrivals=msgspec.structs.replace(experiment.arrivals, **changed))


def run_experiment(
    experiment: Experiment,
    seed: int,
    *,
    router: str = "",
    sessions: list[Session] | None = None,
    progress: Callable[[int, float], None] | None = None,
    timeline: Timeline | None = None,
) -> tuple[Result, list[Sample]]:
    """Run it once.

    router: text of the configuration.  sessions: of a trace.  progress: told of the requests done, and of the share of
    sessions that have ended.  timeline: filled, when there is one.  A KeyboardInterrupt ends the run with what there
    is (`is_partial`).
    """
    made = arriving(experiment, seed, sessions)
    cluster = build(experiment, seed, router=router)
    if progress is not None:
        cluster.on_progress = progress
    cluster.timeline = timeline
    is_partial = False
    try:
        cluster.run(made)
    except KeyboardInterrupt:
        is_partial = True
    result = summarise(
        cluster.samples,
        [node.id for node in cluster.config.nodes],
        cluster.loop.now,
        prefilling={node.id for node in cluster.config.nodes if node.role is Role.PREFILL},
        timeline=timeline,
        is_partial=is_partial,
    )
    return result, cluster.samples


def arriving(experiment: Experiment, seed: int, sessions: list[Session] | None = None) -> list[Session]:
    """Return the sessions of a run with their times, tenants and headers.  sessions: of a trace."""
    chance = Chance(seed)
    made = sessions if sessions is not None else _made(experiment, chance)
    if experiment.headers:
        headers = {name.lower(): value for name, value in experiment.headers.items()}
        made = [session._replace(headers={**headers, **session.headers}) for session in made]
    return experiment.arrivals.spread(_owned(made, experiment.tenants, chance), chance.stream("arrivals"))


def build(experiment: Experiment, seed: int, *, router: str = "", places: Places | None = None) -> Cluster:
    """Return the pool of a run, with its incidents ahead of it.

    router: text of the configuration.  places: decides in the place of its pickers.
    """
    nodes = nodes_of(experiment)
    configs = (router, experiment.handover.config or router)
    if any(load(config, "router").precise is not None for config in configs):
        nodes = tuple(
            msgspec.structs.replace(node, engine=msgspec.structs.replace(node.engine, has_cache_events=True))
            for node in nodes
        )
    config = ClusterConfig(
        nodes=nodes,
        router=router,
        routers=experiment.router.count,
        gossip_s=experiment.router.gossip_s,
        seed=seed,
        concurrency=experiment.arrivals.concurrency,
        store_blocks=fleets.store_blocks(experiment.fleet, experiment.store),
        handover=experiment.handover,
        late=late(experiment.incidents),
        **msgspec.structs.asdict(experiment.delays),
    )
    cluster = Cluster(config, places=places)
    for incident in in_order(experiment.incidents):
        name, at_s = incident.endpoint, incident.at_s
        match incident.what:
            case "kill":
                cluster.loop.at(at_s, Rank.WORLD, cluster.kill, name)
            case "revive":
                cluster.loop.at(at_s, Rank.WORLD, cluster.revive, name)
            case "join":
                cluster.loop.at(at_s, Rank.WORLD, cluster.join, name)
            case "leave":
                cluster.loop.at(at_s, Rank.WORLD, cluster.leave, name)
            case "slow":
                cluster.loop.at(at_s, Rank.WORLD, cluster.slow, name, incident.factor)
    return cluster


def sessions_of(trace: Trace, files: list[bytes]) -> list[Session]:
    """Return the sessions of a trace.  files: one, or all of a claude-code trace or of journals; see `traces`.

    Raises InvalidInput.
    """
    sessions = _sessions_of(trace, files)[trace.skip :]
    if trace.skip and trace.limit:
        sessions = sessions[: trace.limit]
    if not sessions and trace.skip:
        raise InvalidInput(f"has no session behind the {trace.skip} to skip")
    start_s = min((session.arrives_s for session in sessions if session.arrives_s is not None), default=0.0)
    if not trace.skip or not start_s:
        return sessions
    return [
        session if session.arrives_s is None else session._replace(arrives_s=session.arrives_s - start_s)
        for session in sessions
    ]


def _sessions_of(trace: Trace, files: list[bytes]) -> list[Session]:
    match trace.format:
        case "claude-code":
            return traces.claude_code(files[: trace.last or None])
        case "journal":
            return recorded.journal(files, rate=trace.rate, limit=trace.last)
        case "azure":
            return traces.azure(files[0].decode(errors="replace"), rate=trace.rate, limit=trace.last)
        case "tracelab":
            return traces.tracelab(files[0].splitlines(), limit=trace.last)
        case "mooncake":
            lines = files[0].splitlines()
            return traces.mooncake(lines, rate=trace.rate, limit=trace.last, has_sessions=trace.has_sessions)


def with_perf(experiment: Experiment, text: str) -> Experiment:
    """Return the experiment with workload and arrivals of its file of inference-perf.  Raises InvalidInput."""
    assert isinstance(experiment.workload, Perf)
    workload, arrivals = read_perf(text, experiment.workload.stage)
    return msgspec.structs.replace(experiment, workload=workload, arrivals=arrivals)


def _owned(sessions: list[Session], tenants: dict[str, Tenant], chance: Chance) -> list[Session]:
    """Give sessions without a tenant one of these, with its headers."""
    if not tenants:
        return sessions
    names = list(tenants)
    shares = np.array([tenants[name].share for name in names])
    drawn = chance.stream("tenants").choice(len(names), size=len(sessions), p=shares / shares.sum()).tolist()
    headers = [{key.lower(): value for key, value in tenants[name].headers.items()} for name in names]
    return [
        session
        if session.tenant
        else session._replace(tenant=names[which], headers={**headers[which], **session.headers})
        for session, which in zip(sessions, drawn, strict=True)
    ]


def _made(experiment: Experiment, chance: Chance) -> list[Session]:
    if isinstance(experiment.workload, Trace | Perf):
        raise ConfigError("a workload in a file needs what was read from it", source=experiment.name)
    return experiment.workload.make(chance.stream("workload"))
