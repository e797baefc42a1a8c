"""Measures every router that can be had, ours among them, in turn and in rounds.

All run at once and are idle but for the one that is asked, so that a drift of the machine hits all alike.
"""

import importlib.metadata
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from urllib.parse import urlsplit

import msgspec
import numpy as np

from bench.cost import Cost, cost_of, failures
from bench.ground import DIRECT, Pool, backends, pool_of
from bench.peers.catalog import NGINX, PEERS, Peer
from bench.peers.front import Failed, Front, running
from bench.processes import resident_bytes
from bench.prompts import Prompts
from bench.sender import send
from shoal.hosts.load import StageFailed

ENDPOINTS = 4
SMALL_CHARS = 1_000
LARGE_CHARS = 16_384
_ROUNDS = 3
_SECONDS = 2.0
_SINGLE_S = 0.7
NOBODY = "no router"
OURS = {"shoal, direct": DIRECT, "shoal, envoy": ()}
"""Our data planes, by the name of their row: the flags of `shoal up`."""


class Row(msgspec.Struct, frozen=True):
    """One router.  failed: why it has no figures, "" when it has.

    small_us, large_us: CPU per request of the whole process tree, by part.  p50_ms: with one connection, small prompts.
    rss_mb: resident memory of the tree before the first measured request and after the last.
    """

    name: str
    version: str = ""
    flags: str = ""
    failed: str = ""
    small_us: dict[str, float] = {}
    large_us: dict[str, float] = {}
    p50_ms: float = float("nan")
    requests_per_s: float = float("nan")
    rss_mb: tuple[float, float] = (float("nan"), float("nan"))


class _Seen:
    """What is gathered of one router over the rounds."""

    def __init__(self, front: Front) -> None:
        self.front = front
        self.failed = ""
        self.small: list[Cost] = []
        self.large: list[Cost] = []
        self.p50_s: list[float] = []
        self.rss_before = resident_bytes(front.pids())

    async def measure(self, scale: float, *, is_small_wanted: bool, is_kept: bool) -> None:
        """One round; the first request that fails ends the measuring of this router."""
        front, seconds = self.front, _SECONDS * scale
        sent = []
        if is_small_wanted and front.parts:
            small = await cost_of(front.url, front.parts, prompt_chars=SMALL_CHARS, seconds=seconds)
            sent.append(small.sent)
            self.small += [small] * is_kept
        if front.parts:
            large = await cost_of(front.url, front.parts, prompt_chars=LARGE_CHARS, seconds=seconds)
            sent.append(large.sent)
            self.large += [large] * is_kept
        single = await send(
            front.url, Prompts(urlsplit(front.url).netloc, SMALL_CHARS), connections=1, seconds=_SINGLE_S * scale
        )
        self.p50_s += [single.p50_s] * is_kept
        self.failed = failures(*sent, single)

    def row(self) -> Row:
        """The medians of the rounds."""
        front = self.front
        named = Row(front.name, front.version, front.flags, self.failed)
        if self.failed:
            return named
        rates = [cost.sent.ok / cost.sent.duration_s for cost in self.small]
        return msgspec.structs.replace(
            named,
            small_us=_medians(self.small),
            large_us=_medians(self.large),
            p50_ms=float(np.median(self.p50_s)) * 1e3,
            requests_per_s=float(np.median(rates)) if rates else float("nan"),
            rss_mb=(self.rss_before / 2**20, resident_bytes(front.pids()) / 2**20),
        )


async def survey(
    scale: float,
    *,
    peers: Sequence[Peer] = (*PEERS, NGINX),
    ours: Sequence[str] = tuple(OURS),
    is_small_wanted: bool = True,
    say: Callable[[str], object] = lambda _: None,
) -> list[Row]:
    """Start what can be started, measure it in rounds, and return a row for each, failed ones too."""
    rows: dict[str, Row] = {}
    with backends(ENDPOINTS) as addresses:
        async with AsyncExitStack() as stack:
            seen = [_Seen(Front(NOBODY, "", "", f"http://{addresses[0]}", {}))]
            for name in [*ours, *(peer.name for peer in peers)]:
                say(f"starting {name}")
                rows[name] = Row(name)
                try:
                    front = await stack.enter_async_context(_front(name, peers, addresses))
                except Failed as error:
                    rows[name] = Row(name, failed=str(error))
                    continue
                seen.append(_Seen(front))
            for turn in range(_ROUNDS + 1):
                for each in seen[turn % len(seen) :] + seen[: turn % len(seen)]:
                    if not each.failed:
                        say(f"round {turn} of {_ROUNDS}: {each.front.name}")
                        share = scale if turn else scale / 4
                        await each.measure(share, is_small_wanted=is_small_wanted, is_kept=turn > 0)
            for each in seen:
                rows[each.front.name] = each.row()
    return list(rows.values())


@asynccontextmanager
async def _front(name: str, peers: Sequence[Peer], addresses: Sequence[str]) -> AsyncIterator[Front]:
    if name not in OURS:
        async with running(next(peer for peer in peers if peer.name == name), addresses) as front:
            yield front
        return
    flags = OURS[name]
    async with AsyncExitStack() as stack:
        try:
            pool = await stack.enter_async_context(pool_of(addresses, flags))
        except (StageFailed, TimeoutError, OSError) as error:
            raise Failed(f"{error or type(error).__name__}") from error
        words = " ".join((*flags, "--workers", "1"))
        yield Front(name, importlib.metadata.version("shoal"), words, pool.url, parts_of(pool))


def parts_of(pool: Pool) -> dict[str, Callable[[], list[int]]]:
    """The processes of a pool, by what they do for a request; `rest` is the supervisor and the spare worker."""
    parts: dict[str, Callable[[], list[int]]] = {"worker": lambda: pool.pickers}
    if pool.envoys:
        parts["Envoy"] = lambda: pool.envoys
    parts["rest"] = lambda: sorted(set(pool.everything) - set(pool.routers))
    return parts


def _medians(costs: list[Cost]) -> dict[str, float]:
    """Per part the median over the rounds."""
    names = costs[0].parts_us if costs else {}
    return {name: float(np.median([cost.parts_us[name] for cost in costs])) for name in names}
