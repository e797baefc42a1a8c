"""Runs of the twin, one after the other or several at once, with progress, until somebody interrupts.

Owns the processes.  What a run is stands in `simulation`.
"""

import multiprocessing
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

from shoal.cli.twin_files import experiment_of, recorded_sessions
from shoal.simulation import Experiment, Run, Session, Timeline, run_experiment
from shoal.simulation.clairvoyant import find_reference
from shoal.simulation.experiment import at_load, nodes_of
from shoal.simulation.results import columns

__all__ = ["Job", "Progress", "Search", "Work", "run_jobs", "searches"]

_LOOK_S = 0.2

Progress = Callable[[float, int], None]
"""Told of the runs that are done, with the share of those in progress, and of requests that have ended in all."""


class Job(NamedTuple):
    """One run of one policy with one seed.  source, text: of the experiment.  router: text of its configuration.

    load: None for what the experiment says.
    """

    policy: str
    source: str
    text: str
    router: str
    seed: int
    load: float | None = None

    def run(self, told: Callable[[int, float], None]) -> Run:
        """Return the run.  told: of the requests that have ended, and of the share of it that is done."""
        experiment, sessions = _read(self.text, self.source, self.load)
        timeline = Timeline([node.id for node in nodes_of(experiment)])
        result, samples = run_experiment(
            experiment, self.seed, router=self.router, sessions=sessions, progress=told, timeline=timeline
        )
        return Run(self.policy, self.load, self.seed, result, columns(samples), timeline)


class Search(NamedTuple):
    """The search for the reference of runs, which have one load and seed.  source, text: of the experiment."""

    source: str
    text: str
    runs: tuple[Run, ...]
    trials: int

    def run(self, told: Callable[[int, float], None]) -> Run:
        """Return the best run that was found.  told: as by a job."""
        experiment, sessions = _read(self.text, self.source, self.runs[0].load)
        return find_reference(experiment, self.runs, sessions=sessions, trials=self.trials, progress=told)


Work = Job | Search


def _read(text: str, source: str, load: float | None) -> tuple[Experiment, list[Session] | None]:
    experiment = experiment_of(text, Path(source))
    if load is not None:
        experiment = at_load(experiment, load)
    return experiment, recorded_sessions(experiment, Path(source))


def searches(jobs: Sequence[Job], runs: Sequence[Run], trials: int) -> list[Search]:
    """Return a search per load and seed.  runs: of the jobs, all whole."""
    groups: dict[tuple[float | None, int], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.load, run.seed), []).append(run)
    return [Search(jobs[0].source, jobs[0].text, tuple(group), trials) for group in groups.values()]


def run_jobs(jobs: Sequence[Work], at_once: int, progress: Progress) -> tuple[list[Run], bool]:
    """Return the runs in the order of their jobs, and whether Ctrl-C cut them short.

    What had been done then is there, the run in progress as a partial one; with several at once too.
    """
    return _in_turn(jobs, progress) if at_once == 1 or len(jobs) == 1 else _at_once(jobs, at_once, progress)


def _in_turn(jobs: Sequence[Work], progress: Progress) -> tuple[list[Run], bool]:
    runs: list[Run] = []
    ended = 0

    def told(requests: int, share: float) -> None:
        progress(len(runs) + share, ended + requests)

    try:
        for job in jobs:
            run = job.run(told)
            runs.append(run)
            ended += len(run.requests)
            progress(len(runs), ended)
            if run.result.is_partial:
                return runs, True
    except KeyboardInterrupt:
        return runs, True
    return runs, False


# ---------------------------------------------------------------------- several processes


def _at_once(jobs: Sequence[Work], at_once: int, progress: Progress) -> tuple[list[Run], bool]:
    """Give each process a job when it is free.  They are told of Ctrl-C, as to hear it could stop them anywhere."""
    context = multiprocessing.get_context()
    requests, shares = context.Array("q", len(jobs), lock=False), context.Array("d", len(jobs), lock=False)
    stop = context.Value("b", 0, lock=False)
    waiting = list(enumerate(jobs))
    pending: dict[Future[Run], int] = {}
    done: dict[int, Run] = {}
    with ProcessPoolExecutor(at_once, context, _begin, (requests, shares, stop)) as pool:
        while waiting or pending:
            try:
                while waiting and len(pending) < at_once:
                    number, job = waiting.pop(0)
                    pending[pool.submit(_remote, number, job)] = number
                for future in wait(pending, _LOOK_S, FIRST_COMPLETED).done:
                    done[pending.pop(future)] = future.result()
                progress(sum(shares), sum(requests))
            except KeyboardInterrupt:
                stop.value = 1
                waiting.clear()
    return [done[number] for number in sorted(done)], bool(stop.value)


_shared: tuple[Any, Any, Any] | None = None


def _begin(requests: Any, shares: Any, stop: Any) -> None:
    """Keep what a worker process shares with the one that started it."""
    global _shared
    _shared = (requests, shares, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _remote(number: int, job: Work) -> Run:
    assert _shared is not None
    requests, shares, stop = _shared

    def told(count: int, share: float) -> None:
        requests[number], shares[number] = count, share
        if stop.value:
            raise KeyboardInterrupt

    run = job.run(told)
    requests[number], shares[number] = len(run.requests), 1.0
    return run
