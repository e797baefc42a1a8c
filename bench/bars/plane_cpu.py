"""What a request costs the direct plane's worker, with everything on that is on by default.

All prompts are unique, 16 requests are in flight, and what is counted is the whole CPU time of the process, so the
scrapes and records that fall into the time count too.
"""

from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress

import numpy as np
import uvloop

from bench.bars.registry import Figure, bar
from bench.cost import Cost, Parts, cost_of, failures
from bench.ground import DIRECT, Pool, backends, pool_of
from bench.peers import NGINX, Failed, running
from bench.sender import Sent

_ROUNDS = 3
_SECONDS = 3.0
_CHUNKS = (10, 1_000)
_STREAMS = 100
_PACE_US = 2_000
_LONGEST_S = 120.0


def parts_of(pool: Pool) -> Parts:
    """All that a request passes through: the worker, and Envoy in the plane that has one."""
    return {"worker": lambda: pool.pickers, "Envoy": lambda: pool.envoys}


def figure_of(rounds: Sequence[Cost], value: float) -> Figure:
    """A figure with what was seen in its rounds; void when a request failed."""
    return Figure(
        value=value,
        void=failures(*(each.sent for each in rounds)),
        details={
            "rounds_us": [round(each.us, 1) for each in rounds],
            "requests_per_s": [round(each.sent.ok / each.sent.duration_s) for each in rounds],
            "p50_ms": [round(each.sent.p50_s * 1e3, 3) for each in rounds],
        },
    )


async def _one(
    scale: float, flags: Sequence[str], *, endpoints: int, prompt_chars: int, connections: int = 16
) -> Figure:
    with backends(endpoints) as addresses:
        async with pool_of(addresses, flags) as pool:
            rounds = [
                await cost_of(
                    pool.url,
                    parts_of(pool),
                    prompt_chars=prompt_chars,
                    seconds=_SECONDS * scale,
                    connections=connections,
                )
                for _ in range(_ROUNDS)
            ]
    return figure_of(rounds, float(np.median([each.us for each in rounds])))


@bar("direct.cpu-small", "worker CPU of a 1 KB request, 4 endpoints, unique", unit="us", at_most=70, part=2)
def small(scale: float, flags: Sequence[str] = DIRECT) -> Figure:
    """A small request."""
    return uvloop.run(_one(scale, flags, endpoints=4, prompt_chars=1_000))


@bar("direct.cpu-16k", "worker CPU of a 16 KB request, 4 endpoints, unique", unit="us", at_most=100, part=2)
def middle(scale: float, flags: Sequence[str] = DIRECT) -> Figure:
    """A request of 16 KB."""
    return uvloop.run(_one(scale, flags, endpoints=4, prompt_chars=16_384))


@bar("direct.cpu-400k", "worker CPU of a 400 KB request, 100 endpoints, unique", unit="us", at_most=1_600, part=2)
def large(scale: float, flags: Sequence[str] = DIRECT) -> Figure:
    """A request of 400 KB."""
    return uvloop.run(_one(scale, flags, endpoints=100, prompt_chars=400_000, connections=4))


@bar("direct.cpu-vs-nginx", "worker CPU of a 1 KB request over nginx's, round robin, same run", at_most=5.0, part=2)
def against_nginx(scale: float, flags: Sequence[str] = DIRECT) -> Figure:
    """The same small request through both, in turn."""

    async def both() -> Figure:
        rounds: list[tuple[Cost, Cost]] = []
        with backends(4) as addresses:
            async with AsyncExitStack() as stack:
                try:
                    nginx = await stack.enter_async_context(running(NGINX, addresses))
                except Failed as error:
                    return Figure(value=float("inf"), why=str(error))
                pool = await stack.enter_async_context(pool_of(addresses, flags))
                for _ in range(_ROUNDS):
                    ours = await cost_of(pool.url, parts_of(pool), prompt_chars=1_000, seconds=_SECONDS * scale)
                    floor = await cost_of(nginx.url, nginx.parts, prompt_chars=1_000, seconds=_SECONDS * scale)
                    rounds.append((ours, floor))
        figure = figure_of([ours for ours, _ in rounds], float(np.median([ours.us / each.us for ours, each in rounds])))
        floors = [each for _, each in rounds]
        nginx_us = [round(each.us, 1) for each in floors]
        void = figure.void or failures(*(each.sent for each in floors))
        return Figure(value=figure.value, void=void, details={**figure.details, "nginx_us": nginx_us})

    return uvloop.run(both())


@bar("direct.cpu-chunk", "worker CPU of a streamed chunk of 200 bytes", unit="us", at_most=8.0, part=2)
def chunk(scale: float, flags: Sequence[str] = DIRECT, rounds: int = _ROUNDS) -> Figure:
    """The difference of answers of 1,000 and of 10 chunks, 100 streams at once.

    Chunks of one stream are 2 ms apart, so that each comes by itself as a token does.  Sent as fast as can be, many
    arrive in one read: that figure, and nginx's of both, stand beside.
    """
    return uvloop.run(_chunks(max(16, int(_STREAMS * scale)), flags, rounds))


async def _chunks(streams: int, flags: Sequence[str], rounds: int) -> Figure:
    seen: dict[str, list[float]] = {}
    sent: list[Sent] = []
    with backends(4) as addresses:
        async with AsyncExitStack() as stack:
            pool = await stack.enter_async_context(pool_of(addresses, flags))
            ways: dict[str, tuple[str, Parts]] = {"worker": (pool.url, parts_of(pool))}
            with suppress(Failed):
                nginx = await stack.enter_async_context(running(NGINX, addresses))
                ways["nginx"] = (nginx.url, nginx.parts)
            for _ in range(rounds):
                for name, (url, parts) in ways.items():
                    for how, pace_us in (("", _PACE_US), (", unpaced", 0)):
                        us, both = await _per_chunk(url, parts, streams, pace_us)
                        seen.setdefault(f"{name}{how}", []).append(round(us, 2))
                        sent += both
    medians = {name: float(np.median(each)) for name, each in seen.items()}
    why = f"nginx {medians['nginx']:.1f} us in the same run" if "nginx" in medians else ""
    return Figure(value=medians["worker"], void=failures(*sent), why=why, details={"rounds_us": seen, "us": medians})


async def _per_chunk(url: str, parts: Parts, streams: int, pace_us: int) -> tuple[float, list[Sent]]:
    costs = [
        await cost_of(
            url,
            parts,
            prompt_chars=1_000,
            seconds=_LONGEST_S,
            requests=streams,
            connections=streams,
            chunks=chunks,
            pace_us=pace_us,
        )
        for chunks in _CHUNKS
    ]
    return (costs[1].us - costs[0].us) / (_CHUNKS[1] - _CHUNKS[0]), [each.sent for each in costs]
