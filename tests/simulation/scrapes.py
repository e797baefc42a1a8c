"""Metrics pages of an engine in virtual time, as a Prometheus would have scraped them."""

from collections.abc import Iterator

import numpy as np

from shoal.engine import Emit, Engine, EngineConfig, Finish, Profile, Submitted, Ticked
from shoal.hosts.engine.meter import Meter

EVERY_S = 60.0
_LABELS = 'engine="0",model_name="m"'


def scrapes(profile: Profile, seed: int, *, rate_per_s: float = 1.0, count: int = 10) -> list[tuple[float, bytes]]:
    """Return when pages were scraped, and the pages, of chats that come at `rate_per_s`."""
    rng = np.random.default_rng(seed)
    engine, meter = Engine(EngineConfig(profile=profile)), Meter(_LABELS)
    arrivals = _requests(rng, rate_per_s)
    at, request = next(arrivals)
    pages = [(0.0, _page(engine, meter))]
    while len(pages) < count:
        deadline = engine.deadline()
        now = min(at, pages[-1][0] + EVERY_S, np.inf if deadline is None else deadline)
        if now == pages[-1][0] + EVERY_S:
            pages.append((now, _page(engine, meter)))
            continue
        is_arrival = now == at
        for command in engine.handle(request if is_arrival else Ticked(), now):
            if isinstance(command, Emit):
                meter.observe_step(command.step_tokens)
            elif isinstance(command, Finish):
                meter.observe_finish(command, 0)
        if is_arrival:
            at, request = next(arrivals)
    return pages


def _requests(rng: np.random.Generator, rate_per_s: float) -> Iterator[tuple[float, Submitted]]:
    at = 0.0
    for number in range(1_000_000):
        # From quiet to busy, as a day is.
        at += rng.exponential(1 / (rate_per_s * (1 + 0.8 * np.sin(at / 80))))
        prompt, output = int(rng.integers(200, 4_000)), 1 + int(rng.exponential(200))
        yield at, Submitted(request_id=f"r{number}", prompt_tokens=prompt, output_tokens=output)


def _page(engine: Engine, meter: Meter) -> bytes:
    families = "".join(
        f"# TYPE vllm:{name} histogram\n{histogram.lines()}" for name, histogram in meter.histograms.items()
    )
    running = f"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{{{_LABELS}}} {engine.num_running}\n"
    return (families + running).encode()
