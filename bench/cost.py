"""What a request costs the processes that it passes through, under a closed loop."""

import asyncio
from collections.abc import Callable, Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from bench.processes import total_cpu_s
from bench.prompts import Prompts
from bench.sender import Sent, send

CONNECTIONS = 16
"""Requests in flight in every figure of CPU per request: a router is busy, and nobody waits long."""

# What is done for a request after its answer, such as its record, is part of its cost.
_SETTLE_S = 0.3

Parts = Mapping[str, Callable[[], list[int]]]


class Cost(NamedTuple):
    """CPU microseconds per request of each part, and what became of the requests."""

    parts_us: dict[str, float]
    sent: Sent

    @property
    def us(self) -> float:
        """CPU microseconds per request of all parts together."""
        return sum(self.parts_us.values())


async def cost_of(
    url: str,
    parts: Parts,
    *,
    prompt_chars: int,
    seconds: float,
    connections: int = CONNECTIONS,
    chunks: int = 0,
    pace_us: int = 0,
    requests: float = float("inf"),
) -> Cost:
    """Send unique prompts for so long, or so many; chunks: answers are streams of so many, `pace_us` apart.

    A tenth of it goes first, unmeasured.
    """
    headers = {"x-bench-chunks": str(chunks), "x-bench-pace-us": str(pace_us)} if chunks else None
    prompts = Prompts(urlsplit(url).netloc, prompt_chars, stream=chunks > 0, headers=headers)
    await send(url, prompts, connections=connections, seconds=seconds / 10, requests=max(connections, requests / 10))
    before = {name: total_cpu_s(pids()) for name, pids in parts.items()}
    sent = await send(url, prompts, connections=connections, seconds=seconds, requests=requests)
    await asyncio.sleep(_SETTLE_S)
    done = max(1, sent.ok + sent.failed)
    spent = {name: (total_cpu_s(pids()) - before[name]) / done * 1e6 for name, pids in parts.items()}
    return Cost(spent, sent)


def failures(*sent: Sent) -> str:
    """Say which requests failed and how often, "" when none did."""
    kinds: dict[str, int] = {}
    for each in sent:
        for kind, count in each.errors.items():
            kinds[kind] = kinds.get(kind, 0) + count
    if not kinds:
        return ""
    listed = ", ".join(f"{count} x {kind}" for kind, count in sorted(kinds.items()))
    return f"{listed} of {sum(each.ok + each.failed for each in sent)} requests"
