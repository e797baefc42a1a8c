"""Whether a decision depends on the plane that asked for it.

Chats are sent one request at a time, each when nothing is in flight any more, to pools over the same endpoints with the
same seed; their journals say what the router was told and whom it chose.  Times differ between any two runs, and a
router learns speeds from those of streams.  So the decisions of plain answers are compared; a few streams come last, of
which only what the router is told is compared.  The same plane is run twice as a control, and once with another seed: a
comparison in which a plane differs from itself, or in which every seed chooses alike, shows nothing.
"""

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import uvloop

from bench.bars.books import in_flight
from bench.bars.registry import Figure, bar
from bench.ground import DIRECT, MODEL, Pool, backends, pool_of
from shoal.hosts.load import Client
from shoal.pool import Outcome, Request
from shoal.routing import Arrived, Ended, Forward, Recorded
from shoal.routing.journal import Step, read
from shoal.workload import Plan, chat_body, multi_turn

_ENDPOINTS = 4
_TURNS = 4
_SEED = 7
# One chat in so many is streamed, the last ones.
_STREAMED_SHARE = 4
_JOURNALED = """\
apiVersion: shoal.dev/v1alpha1
kind: Pool
journal:
  path: {directory}
"""
# Of a request and its outcome only what no clock and no dice had a part in.
_OF_REQUEST = (
    "api", "path", "model", "is_streaming", "has_body", "prompt_bytes", "prompt_tokens", "max_output_tokens",
    "body_bytes", "tenant_id", "session_id", "objective", "retry_allowed",
)  # fmt: skip
_OF_OUTCOME = ("status", "attempts", "prompt_tokens", "cached_tokens", "completion_tokens", "is_cut", "is_client_gone")


class Told(NamedTuple):
    """What a journal says of a run.

    chosen: the endpoint of each plain request.  requests, outcomes: of all.  is_replayed: whether `shoal replay` finds
    every command the same.
    """

    chosen: list[str]
    requests: list[dict[str, Any]]
    outcomes: list[dict[str, Any]]
    is_replayed: bool
    failed: int


@bar("direct.same-decisions", "requests that the planes tell or decide otherwise, same seed", at_most=0, part=2)
def same(scale: float, planes: tuple[Sequence[str], Sequence[str]] = ((), DIRECT)) -> Figure:
    """The Envoy plane, itself again, the other plane, and another seed."""
    chats = max(6, round(24 * scale))
    plan = multi_turn(np.random.default_rng(8), chats=chats, turns=_TURNS, systems=8, system_chars=3_000)
    first, second = planes
    with backends(_ENDPOINTS) as addresses:
        one, again, other = (uvloop.run(_run(plan, addresses, flags, _SEED)) for flags in (first, first, second))
        reseeded = uvloop.run(_run(plan, addresses, first, _SEED + 1))
    runs = {"first": one, "first again": again, "second": other, "other seed": reseeded}
    decided = differing(one.chosen, other.chosen)
    told = differing(one.requests, other.requests)
    recorded = differing(one.outcomes, other.outcomes)
    unlike = [name for name, run in runs.items() if not run.is_replayed]
    details = {
        "requests": plan.requests,
        "decisions": decided,
        "requests_told": told,
        "records": recorded,
        "control": differing(one.chosen, again.chosen),
        "other_seed": differing(one.chosen, reseeded.chosen),
        "endpoints": len(set(one.chosen)),
        "stayed": stayed(one.chosen),
        "not_replayed": unlike,
    }
    return Figure(value=float(decided + told + recorded + len(unlike)), void=_void(runs, details), details=details)


def _void(runs: dict[str, Told], details: dict[str, Any]) -> str:
    failed = sum(run.failed for run in runs.values())
    short = [name for name, run in runs.items() if len(run.requests) != details["requests"]]
    if failed or short:
        return f"{failed} requests failed; not all in the journal of: {', '.join(short) or 'none'}"
    if details["control"]:
        return f"the same plane with the same seed chose otherwise {details['control']} times"
    if not details["other_seed"] or details["endpoints"] < 2:
        return "every seed chooses alike, so nothing was decided by it"
    return ""


def differing(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Places at which two sequences differ; what only one of them has differs."""
    pairs: int = sum(bool(a != b) for a, b in zip(one, other, strict=False))
    return pairs + abs(len(one) - len(other))


def stayed(chosen: Sequence[str]) -> float:
    """Share of further turns that went where the turn before had gone, 0 to 1."""
    pairs = [chosen[i] == chosen[i - 1] for i in range(len(chosen)) if i % _TURNS]
    return sum(pairs) / len(pairs) if pairs else 0.0


async def _run(plan: Plan, addresses: Sequence[str], flags: Sequence[str], seed: int) -> Told:
    with tempfile.TemporaryDirectory(prefix="shoal-journal-") as root:
        directory = Path(root) / "journal"
        directory.mkdir()
        config = _JOURNALED.format(directory=directory)
        async with pool_of(addresses, (*flags, "--seed", str(seed)), config=config) as pool:
            failed = await _converse(plan, pool)
            await pool.stage.stop()
        return _read(sorted(directory.rglob("*.journal")), failed)


async def _converse(plan: Plan, pool: Pool) -> int:
    """Send every turn by itself; returns how many failed."""
    client = Client(pool.url, timeout_s=30.0)
    failed = 0
    plain = len(plan.chats) - len(plan.chats) // _STREAMED_SHARE
    for at, chat in enumerate(plan.chats):
        replies: list[str] = []
        for _ in chat.says:
            is_streamed = at >= plain
            body = chat_body(chat, replies, model=MODEL, stream=is_streamed)
            headers = {"x-bench-chunks": "4"} if is_streamed else {}
            answer = await client.post("/v1/chat/completions", body, headers=headers)
            replies.append(answer.read().text)
            failed += int(answer.status != 200 or bool(answer.failure))
            await _settled(pool)
    await client.close()
    return failed


async def _settled(pool: Pool, wait_s: float = 5.0) -> None:
    """Return when the request has ended in the books and its record was taken in."""
    async with asyncio.timeout(wait_s):
        while any(in_flight(await pool.metrics()).values()):
            await asyncio.sleep(0.02)


def _read(files: list[Path], failed: int) -> Told:
    if not files:
        return Told([], [], [], False, failed)
    words = [sys.executable, "-m", "shoal.cli", "replay", *map(str, files)]
    is_replayed = subprocess.run(words, capture_output=True, check=False).returncode == 0
    steps = [step for path in files for step in read(path.read_bytes())[1]]
    arrived = [step for step in steps if isinstance(step.event, Arrived)]
    return Told(
        [_chosen(step) for step in arrived if not _request_of(step).is_streaming],
        [_picked(_request_of(step), _OF_REQUEST) for step in arrived],
        [_picked(outcome, _OF_OUTCOME) for step in steps if (outcome := _outcome_of(step)) is not None],
        is_replayed,
        failed,
    )


def _outcome_of(step: Step) -> Outcome | None:
    """What the router was told that came of a request: by Envoy in a record, by the direct plane with its end."""
    return step.event.outcome if isinstance(step.event, Recorded | Ended) else None


def _request_of(step: Step) -> Request:
    assert isinstance(step.event, Arrived)
    return step.event.request


def _chosen(step: Step) -> str:
    forwards = [command for command in step.commands if isinstance(command, Forward)]
    return forwards[0].endpoints[0] if forwards else ""


def _picked(value: msgspec.Struct, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names}
