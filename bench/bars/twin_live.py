"""The twin against what it models: the same chats sent to embedded engines behind a live pool, and in virtual time.

Live, clients, a real Envoy with its picker and four engines talk over real sockets.  Prompts have the very tokens in
both; an answer has as many.  Chats come at random, so that a run does not hang on which of a crowd was first.  What the
way to an engine takes on this machine is measured first, with requests that come alone, and told the twin as its delay
of the network, the shortest and how much longer the others were: a twin of a pool knows its network, and nothing else
is fitted.  Prompts have so much to compute that engines, and not the machine's two cores, decide when answers begin.  A
live run with a loop lag p99 above 5 ms, or more than 4,000 chunks a second, means nothing; it is repeated.
"""

import functools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import uvloop
import xxhash

from bench.bars.registry import Figure, bar
from bench.live import ENGINES, run_once, void_of
from shoal.engine import EngineConfig, find_profile
from shoal.hosts.engine import tokens
from shoal.hosts.load import LoadReport, Sample
from shoal.simulation import Cluster, ClusterConfig, NodeConfig, Prompt, Result, Session, Turn
from shoal.simulation.prompts import UNIT_TOKENS
from shoal.simulation.results import summarise
from shoal.workload import Chat, Plan, hot, multi_turn, poisson_arrivals, unique, zipf

_MOST_CHUNKS_PER_S = 4_000
_RUNS, _TRIES = 3, 8
"""Live runs of a workload that count, and that are made at most to get them."""
_LONE = 120

_PLANS: dict[str, tuple[Callable[[np.random.Generator, float], Plan], float]] = {
    # How to make it, and chats a second.
    "multi-turn": (
        lambda rng, scale: multi_turn(
            rng, chats=max(8, round(96 * scale)), turns=5, systems=8, system_chars=4_000, say_chars=(400, 1_200),
            reply_tokens=(24, 64), think_s=0.5,
        ),
        4.0,
    ),
    "hot": (
        lambda rng, scale: hot(rng, requests=max(40, round(500 * scale)), say_chars=1_200, reply_tokens=(8, 16)),
        25.0,
    ),
    "zipf": (
        lambda rng, scale: zipf(rng, documents=40, requests=max(40, round(400 * scale)), reply_tokens=(16, 48)),
        16.0,
    ),
    "unique": (lambda rng, scale: unique(rng, requests=max(40, round(400 * scale)), prompt_chars=2_400), 16.0),
}  # fmt: skip


def sessions_of(plan: Plan, arrivals: list[float]) -> list[Session]:
    """Return the chats of a plan as the twin plays them, token by token the same but for what answers say."""
    return [
        Session("", functools.partial(_turns, chat, f"{plan.name} {number}"), arrives_s=at)
        for number, (chat, at) in enumerate(zip(plan.chats, arrivals, strict=True))
    ]


def _turns(chat: Chat, name: str) -> Iterator[Turn]:
    said = [tokens.Turn("system", chat.system)] if chat.system else []
    for number, (say, reply) in enumerate(zip(chat.says, chat.reply_tokens, strict=True)):
        said.append(tokens.Turn("user", say))
        prompt = _prompt(tokens.chat(said))
        answer = xxhash.xxh3_128_hexdigest(f"{name} {number}".encode()) * (reply * tokens.TOKEN_BYTES // 32 + 1)
        said.append(tokens.Turn("assistant", answer[: reply * tokens.TOKEN_BYTES]))
        whole = _prompt(tokens.chat(said, has_generation_prompt=False))
        yield Turn(prompt, reply, chat.think_s[number] if chat.think_s else 0.0, reply, whole=whole)


def _prompt(packed: bytes) -> Prompt:
    """Return the prompt of packed tokens."""
    size = tokens.TOKEN_BYTES * UNIT_TOKENS
    units = [xxhash.xxh3_64_intdigest(packed[at : at + size]) for at in range(0, len(packed) - size + 1, size)]
    prompt = Prompt.empty(0).units(np.array(units, np.uint64), len(units) * UNIT_TOKENS)
    return prompt.extend(1, len(packed) // tokens.TOKEN_BYTES - prompt.tokens)


def in_twin(plan: Plan, arrivals: list[float], way_s: Sequence[float]) -> Result:
    """Return what the twin says of a plan.  way_s: how long requests were on their way between client and engine."""
    engine = EngineConfig(profile=find_profile("tiny"))
    nodes = tuple(NodeConfig(id=f"e{n}", engine=engine) for n in range(ENGINES))
    shortest_s, *_ = sorted_s = sorted(way_s)
    jitter_s = tuple(each - shortest_s for each in sorted_s)
    cluster = Cluster(ClusterConfig(nodes=nodes, seed=1, network_s=shortest_s, jitter_s=jitter_s))
    cluster.run(sessions_of(plan, arrivals))
    return summarise(cluster.samples, [node.id for node in nodes], cluster.loop.now)


def _gaps(live: LoadReport, twin: Result, mean_s: float) -> dict[str, float]:
    """Return the errors of the twin, each as a share of what is allowed: 10 %, and 2 points of hit ratio."""
    return {
        "ttft_mean": (twin.ttft_mean_s / mean_s - 1) / 0.10,
        "ttft_p95": (twin.ttft_p95_s / live.ttft_p95_s - 1) / 0.10,
        "throughput": (twin.output_tokens_per_s / live.output_tokens_per_s - 1) / 0.10,
        "hit": (twin.hit_ratio - live.hit_ratio) / 0.02,
    }


@bar("twin.live", "twin against live, worst of four workloads: error over what is allowed (10 %, hit ratio 2 points)",
     at_most=1.0, part=6)  # fmt: skip
def _live(scale: float) -> Figure:
    """Median of three live runs of each workload, of those that are not void."""
    errors: dict[str, float] = {}
    voids: list[str] = []
    way_s = uvloop.run(_way_s())
    quantiles = (np.quantile(way_s, (0.0, 0.5, 0.95, 1.0)) * 1e3).tolist()
    details: dict[str, object] = {"network_ms": quantiles}
    for name, (make, per_s) in _PLANS.items():
        rng = np.random.default_rng(11)
        plan = make(rng, scale)
        arrivals = poisson_arrivals(rng, count=len(plan.chats), rate_per_s=per_s).tolist()
        twin = in_twin(plan, arrivals, way_s)
        gaps: list[dict[str, float]] = []
        wanted, void = max(1, round(_RUNS * scale)), ""
        for _ in range(max(1, round(_TRIES * scale))):
            live, mean_s = uvloop.run(_once(plan, arrivals))
            chunks_per_s = live.completion_tokens / live.duration_s
            void = void_of(live) or (f"{chunks_per_s:.0f} chunks/s" if chunks_per_s > _MOST_CHUNKS_PER_S else "")
            if not void:
                gaps.append(_gaps(live, twin, mean_s))
            if len(gaps) == wanted:
                break
        else:
            voids.append(f"{name}: {void or 'a run before the last one'}")
            gaps = gaps or [_gaps(live, twin, mean_s)]
        for figure in gaps[0]:
            errors[f"{name}, {figure}"] = float(np.median([each[figure] for each in gaps]))
        details[name] = {
            "ttft_mean_ms": [mean_s * 1e3, twin.ttft_mean_s * 1e3],
            "ttft_p95_ms": [live.ttft_p95_s * 1e3, twin.ttft_p95_s * 1e3],
            "tokens_per_s": [live.output_tokens_per_s, twin.output_tokens_per_s],
            "hit": [live.hit_ratio, twin.hit_ratio],
            "prompt_tokens": [live.prompt_tokens, twin.prompt_tokens],
        }
    worst = max(errors, key=lambda each: abs(errors[each]))
    return Figure(
        value=abs(errors[worst]), void="; ".join(voids), why=worst, details={**details, "errors": errors}
    )  # fmt: skip


async def _once(plan: Plan, arrivals: list[float]) -> tuple[LoadReport, float]:
    samples: list[Sample] = []
    live = await run_once(plan, arrivals=arrivals, samples=samples)
    ttfts = [each.ttft_s for each in samples if not each.error]
    return live, float(np.mean(ttfts))


async def _way_s() -> list[float]:
    """Return how much longer lone requests take to their first token live than the model says without a network."""
    plan = unique(np.random.default_rng(5), requests=_LONE, concurrency=1)
    samples: list[Sample] = []
    await run_once(plan, samples=samples)
    twin = in_twin(plan, [float(number) for number in range(_LONE)], (0.0, 0.0))
    # All are as long, and an engine that is idle takes as long for each.
    return [max(0.0, each.ttft_s - twin.ttft_p50_s) for each in samples if not each.error]
