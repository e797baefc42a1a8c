"""`shoal demo`: the main job on one screen, on a laptop without a GPU.

Starts a pool of embedded engines twice, first with round-robin and then with the default profile, sends both the
same agent-like traffic, and prints one table.  Owns the show; the pool is `shoal up`, the traffic `hosts.load`.
"""

import argparse
import asyncio
import signal
import tempfile
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from shoal.cli import flags
from shoal.hosts.load import LoadReport, Stage, run_load
from shoal.workload import Plan, multi_turn

ROUND_ROBIN = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: round-robin-picker
schedulingProfiles:
- name: round-robin
  plugins:
  - pluginRef: round-robin-picker
"""

# Twelve prompts of 4k tokens and thirty-two growing chats: about three times the 25,600 tokens that one engine of the
# profile `tiny` caches, and less than four of them cache together.
_SYSTEMS = 12
_SYSTEM_CHARS = 16_384
_THINK_S = 0.25
_INTERRUPTED = 130

_EXAMPLES = """examples:
  shoal demo                          four engines, 32 chats of 8 turns
  shoal demo --chats 8 --turns 4      a shorter one
  shoal demo --json demo.json         the figures of both runs, for scripts
"""
_AFTER = """
Keep a pool running:   shoal up --engines {engines}
Ask it something:      curl http://127.0.0.1:8080/v1/chat/completions -H 'content-type: application/json' \\
                         -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
Watch it:              shoal status
Your own engines:      shoal up --backend http://HOST:8000 --backend http://HOST2:8000"""


class Show(NamedTuple):
    """One half of the demo."""

    title: str
    model: str
    report: LoadReport


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "demo",
        help="see the main job work: round-robin against cache-aware routing",
        description="Run the same agent-like traffic against embedded engines, first routed round-robin, then\n"
        "cache-aware, and compare.  Needs no GPU and leaves nothing behind.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--engines", type=_at_least_one, default=4, metavar="N", help="embedded engines (4)")
    parser.add_argument("--chats", type=_at_least_one, default=32, metavar="N", help="chats, all at the same time (32)")
    parser.add_argument("--turns", type=_at_least_one, default=8, metavar="N", help="turns of each chat (8)")
    parser.add_argument("--seed", type=flags.seed, default=1, metavar="N", help="seed of the traffic (1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write both reports there too")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the demo; 0 when both runs had no errors."""
    flags.check_report(arguments.json)
    console = Console()
    try:
        shows = uvloop.run(play(arguments, console))
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print("interrupted; nothing was left running")
        return _INTERRUPTED
    console.print(table(shows))
    if caveat := doubt(shows):
        console.print(f"[yellow]{caveat}")
    console.print(_AFTER.format(engines=arguments.engines, model=shows[0].model), highlight=False, soft_wrap=True)
    if arguments.json:
        reports = {show.title: msgspec.Raw(show.report.to_json()) for show in shows}
        flags.write_report(arguments.json, msgspec.json.encode(reports))
    return 1 if any(show.report.failed for show in shows) else 0


def _at_least_one(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of 1 or more, not {text!r}")
    return number


def doubt(shows: list[Show]) -> str:
    """Return what to say of the figures when the machine ran late while they were taken, else ""."""
    lags_s = [max(show.report.lag_p99_s, show.report.engine_lag_p99_s) for show in shows if show.report.is_void]
    if not lags_s:
        return ""
    return f"figures are approximate: this machine was busy (loop lag p99 {max(lags_s) * 1e3:.0f} ms)"


def traffic(seed: int, *, chats: int, turns: int) -> Plan:
    """The demo's workload: shared system prompts of 4k tokens, multi-turn sessions, all in flight at once."""
    return multi_turn(
        np.random.default_rng(seed),
        chats=chats,
        turns=turns,
        systems=_SYSTEMS,
        system_chars=_SYSTEM_CHARS,
        think_s=_THINK_S,
        concurrency=chats,
    )


async def play(arguments: argparse.Namespace, console: Console) -> list[Show]:
    """Run both halves and return them, round-robin first.  SIGTERM ends the show as Ctrl-C does."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    plan = traffic(arguments.seed, chats=arguments.chats, turns=arguments.turns)
    with tempfile.TemporaryDirectory(prefix="shoal-demo-") as directory:
        config = Path(directory) / "round-robin.yaml"
        config.write_text(ROUND_ROBIN)
        engines = ["--engines", str(arguments.engines)]
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console) as progress:
            return [
                await _half("round-robin", [*engines, "--config", str(config)], plan, progress),
                await _half("cache-aware", engines, plan, progress),
            ]


async def _half(title: str, flags: list[str], plan: Plan, progress: Progress) -> Show:
    task = progress.add_task(f"{title}: starting", total=plan.requests)
    async with Stage(flags) as stage:
        progress.update(task, description=f"{title}: running ")
        model = await stage.model()
        report = await run_load(
            plan, stage.url, model=model, progress=lambda done, _: progress.update(task, completed=done)
        )
        report = await stage.complete(report)
    progress.update(task, description=f"{title}: done    ")
    return Show(title, model, report)


def table(shows: list[Show]) -> Table:
    """Both halves side by side, and how many times better the second is."""
    made = Table(title="The same traffic, routed two ways")
    made.add_column("")
    for show in shows:
        made.add_column(show.title, justify="right")
    made.add_column("better by", justify="right")
    rows = (
        ("TTFT p50", "ms", [show.report.ttft_p50_s * 1e3 for show in shows], True),
        ("TTFT p95", "ms", [show.report.ttft_p95_s * 1e3 for show in shows], True),
        ("output tokens/s", "", [show.report.output_tokens_per_s for show in shows], False),
    )
    for name, unit, values, is_less_better in rows:
        first, last = (values[0], values[-1]) if is_less_better else (values[-1], values[0])
        times = f"{first / last:.1f} x" if last else "-"
        made.add_row(name, *(f"{value:,.0f} {unit}".strip() for value in values), times)
    made.add_row("prefix hit ratio", *(f"{show.report.hit_ratio:.0%}" for show in shows), "")
    made.add_row("imbalance (max/mean)", *(f"{show.report.imbalance:.2f}" for show in shows), "")
    made.add_row("requests", *(str(show.report.requests) for show in shows), "")
    made.add_row("errors", *(str(show.report.failed) for show in shows), "")
    return made
