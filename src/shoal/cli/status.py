"""`shoal status`: the fleet as a live table, one table, or JSON.

Owns how the picture looks.  The figures come merged from the pool's admin API.
"""

import argparse
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shoal.cli.queues import queue_lines, tenants_table
from shoal.hosts.admin import EndpointPicture, NoPool, PoolClient, PoolPicture, find_pool
from shoal.hosts.admin.snapshots import SharedPicture

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

_EXAMPLES = """examples:
  shoal status                         live table of the pool on port 8080; Ctrl-C ends it
  shoal status --once                  one table, then exit
  shoal status --json | jq .endpoints  for scripts
  shoal status --port 9000             another pool
"""

_COLUMNS = (
    "ENDPOINT",
    "STATE",
    "MODELS",
    "BUSY",
    "WAIT",
    "RUN",
    "KV",
    "HIT",
    "CACHE",
    "REQ/S",
    "TTFT",
    "REQS",
    "FAILED",
)
# What is tried in turn where all columns do not fit: columns left out, spaces between the others.
_NARROWER = (
    (("MODELS",), 2),
    (("MODELS",), 1),
    (("MODELS", "TTFT"), 1),
    (("MODELS", "TTFT", "REQS"), 1),
)

_STATE_STYLES = {
    "ready": "green",
    "half-open": "yellow",
    "loading": "cyan",
    "starting": "cyan",
    "unresolved": "bold red",
    "ejected": "bold red",
    "draining": "magenta",
    "paused": "magenta",
}


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "status",
        help="show the fleet live",
        description="Show the endpoints of a running pool: health, load, cache hits, requests/s.  BUSY: requests that\n"
        "the pool has there now; WAIT, RUN, KV: what the engine says of itself; HIT: share of prompt tokens found in\n"
        "its cache; CACHE: how far its KV events can be trusted; TTFT: mean time to the first byte.  A narrow\n"
        "terminal gets fewer columns.  With flow control also the bands, how long requests wait there and waited in\n"
        "the last minute, and the tenants: SHARE of the COMPUTED tokens of their band (prompts that no cache held,\n"
        "and answers) in the last minute, beside their WEIGHT.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_pool_flags(parser)
    parser.add_argument("--once", action="store_true", help="print one table and exit, as into a pipe or a file")
    parser.add_argument("--json", action="store_true", help="print the merged snapshot as JSON and exit")
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between readings (1)")
    parser.set_defaults(run=run)


def add_pool_flags(parser: argparse.ArgumentParser, *, is_again: bool = False) -> None:
    """Add the flags that say which running pool is meant.  is_again: the parser above has them too."""
    port, run_dir = (argparse.SUPPRESS, argparse.SUPPRESS) if is_again else (8080, None)
    parser.add_argument("--port", type=int, default=port, help="public port of the pool (8080)")
    parser.add_argument(
        "--run-dir", metavar="DIR", default=run_dir, help="run directory of the pool, when it was given to `shoal up`"
    )


def run(args: argparse.Namespace) -> int:
    """Show the status; returns 0."""
    pool = find_pool(args.run_dir, args.port)
    if args.json:
        sys.stdout.write(pool.snapshot_json().decode() + "\n")
        return 0
    rates = Rates()
    rates.update(pool.picture())
    interval_s = max(0.1, args.interval)
    if args.once or not sys.stdout.isatty():
        time.sleep(interval_s)
        picture = pool.picture()
        rates.update(picture)
        console = _console()
        console.print(render(picture, rates, console))
        return 0
    return _watch(pool, rates, interval_s)


class Rates:
    """Requests per second of each endpoint, from the last two pictures."""

    __slots__ = ("_at_s", "_pid", "_totals", "per_endpoint", "pool")

    def __init__(self) -> None:
        self._at_s = 0.0
        self._pid = 0
        self._totals: dict[str, float] = {}
        self.per_endpoint: dict[str, float] = {}
        self.pool: float | None = None

    def update(self, picture: PoolPicture) -> None:
        """Take a newer picture.  A count that fell (a worker restarted) gives no rate below 0."""
        totals: dict[str, float] = {endpoint.id: endpoint.requests_total for endpoint in picture.endpoints}
        totals[""] = picture.requests_total
        elapsed_s = picture.at_s - self._at_s
        if self._totals and picture.pid == self._pid and elapsed_s > 0:
            rates = {
                name: max(0.0, total - self._totals[name]) / elapsed_s
                for name, total in totals.items()
                if name in self._totals
            }
            self.pool = rates.pop("", None)
            self.per_endpoint = rates
        self._totals, self._at_s, self._pid = totals, picture.at_s, picture.pid


def render(picture: PoolPicture, rates: Rates, console: "Console") -> "RenderableType":
    """Return the whole screen: the head, the endpoints, the queue, why some are not ready, the warnings.

    A narrow console gets fewer columns.
    """
    from rich.console import Group
    from rich.text import Text

    parts: list[Any] = [Text.from_markup(_head(picture, rates)), _fitting(picture, rates, console)]
    parts += [Text(line) for line in queue_lines(picture.flow)]
    tenants = tenants_table(picture.flow)
    parts += [tenants] if tenants is not None else []
    parts += [Text(f"{each.id}: {each.reason}", style="dim") for each in picture.endpoints if each.reason]
    parts += [Text(_peer(each), style="dim") for each in picture.peers]
    parts += [Text(f"! {warning}", style="yellow") for warning in all_warnings(picture)]
    return Group(*parts)


def all_warnings(picture: PoolPicture) -> list[str]:
    """Return what the operator should look at: the pool's own warnings, then what the figures show."""
    warnings = list(picture.warnings)
    silent = [each.picker for each in picture.workers if not each.is_answering and each.state != "starting"]
    if silent:
        warnings.append(f"picker {', '.join(silent)} does not answer: the figures are without it")
    deaf = [endpoint.id for endpoint in picture.endpoints if endpoint.reports_cached_tokens is False]
    if deaf and not any("--enable-prompt-tokens-details" in warning for warning in warnings):
        warnings.append(
            f"{', '.join(deaf)} report no cached tokens, so hit ratios are guesses; start vLLM with "
            "--enable-prompt-tokens-details, SGLang with --enable-cache-report"
        )
    return warnings


def _peer(peer: SharedPicture) -> str:
    """One other picker, or one of the pool's own that its siblings hear."""
    heard = "not heard yet" if peer.age_s is None else f"{peer.state}, last word {peer.age_s:.1f} s ago"
    lost = f", {peer.gaps:,} messages lost" if peer.gaps else ""
    skipped = f", {peer.skipped:,} skipped" if peer.skipped else ""
    return f"peer {peer.name or peer.address}: {heard}{lost}{skipped}"


def _head(picture: PoolPicture, rates: Rates) -> str:
    ready = sum(endpoint.state in ("ready", "half-open") for endpoint in picture.endpoints)
    workers = f"{sum(worker.is_answering for worker in picture.workers)}/{len(picture.workers)}"
    per_s = "-" if rates.pool is None else f"{rates.pool:.1f}"
    return (
        f"[bold]{picture.url or 'pool'}[/bold]  {ready}/{len(picture.endpoints)} endpoints ready  "
        f"{workers} pickers  up {_duration(picture.at_s)}\n"
        f"[bold]{per_s}[/bold] requests/s  {picture.inflight:,} in flight  {picture.requests_total:,} requests  "
        f"{picture.errors_total:,} refused or failed"
    )


def _fitting(picture: PoolPicture, rates: Rates, console: "Console") -> "Table":
    """The table of endpoints, without the least useful columns where all of them do not fit side by side."""
    unused = () if any(endpoint.cache != "none" for endpoint in picture.endpoints) else ("CACHE",)
    table = _endpoints(picture, rates, unused)
    for dropped, gap in _NARROWER:
        if console.measure(table, options=console.options.update(width=1000)).maximum <= console.width:
            break
        table = _endpoints(picture, rates, (*dropped, *unused), gap)
    return table


def _endpoints(picture: PoolPicture, rates: Rates, dropped: tuple[str, ...], gap: int = 2) -> "Table":
    from rich.table import Table

    rows = [_row(endpoint, rates.per_endpoint.get(endpoint.id)) for endpoint in picture.endpoints]
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, gap, 0, 0))
    shown = [name for name in _COLUMNS if name not in dropped]
    for name in shown:
        match name:
            case "ENDPOINT":  # the one that gives way: a long name goes on in the next line
                table.add_column(name, overflow="fold")
            case "MODELS":
                table.add_column(name, max_width=32, overflow="ellipsis", no_wrap=True)
            case _:
                table.add_column(name, justify="left" if name == "STATE" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(row[name] for name in shown))
    if not rows:
        table.add_row("[dim]no endpoint yet[/dim]")
    return table


def _row(endpoint: EndpointPicture, rate: float | None) -> dict[str, str]:
    from rich.markup import escape

    style = _STATE_STYLES.get(endpoint.state, "")
    return {
        "ENDPOINT": escape(endpoint.id),
        "STATE": f"[{style}]{_state(endpoint)}[/]" if style else _state(endpoint),
        "MODELS": escape(", ".join(endpoint.models)) or "-",
        "BUSY": f"{endpoint.inflight_requests:,}",
        "WAIT": _shown(endpoint.waiting, lambda value: f"{value:.0f}"),
        "RUN": _shown(endpoint.running, lambda value: f"{value:.0f}"),
        "KV": _shown(endpoint.kv_usage_ratio, lambda value: f"{value:.0%}"),
        "HIT": hit_ratio(endpoint),
        "CACHE": "-" if endpoint.cache == "none" else endpoint.cache,
        "REQ/S": _shown(rate, lambda value: f"{value:.1f}"),
        "TTFT": _shown(endpoint.ttft_s_avg, lambda value: f"{value * 1000:,.0f} ms"),
        "REQS": f"{endpoint.requests_total:,}",
        "FAILED": f"{endpoint.failures_total:,}",
    }


def hit_ratio(endpoint: EndpointPicture) -> str:
    """Return the share of prompt tokens that the engine found in its cache, `?` when it does not report them."""
    if endpoint.reports_cached_tokens is False:
        return "?"
    if not endpoint.prompt_tokens_total:
        return "-"
    return f"{endpoint.cached_tokens_total / endpoint.prompt_tokens_total:.0%}"


def _state(endpoint: EndpointPicture) -> str:
    if not endpoint.states:
        return endpoint.state
    agreeing, asked = endpoint.states.get(endpoint.state, 0), sum(endpoint.states.values())
    return f"{endpoint.state} {agreeing}/{asked}"


def _shown(value: float | None, write: Callable[[float], str]) -> str:
    return "-" if value is None else write(value)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s"


def _console() -> "Console":
    from rich.console import Console

    # A pipe has no width of its own; a table that is cut there is of no use to grep.
    return Console() if sys.stdout.isatty() else Console(width=160)


def _watch(pool: PoolClient, rates: Rates, interval_s: float) -> int:
    from rich.live import Live

    console = _console()
    with Live(console=console, auto_refresh=False, screen=False) as live:
        while True:
            try:
                picture = pool.picture()
            except NoPool:
                live.stop()
                print("the pool has ended", file=sys.stderr)
                return 0
            rates.update(picture)
            live.update(render(picture, rates, console), refresh=True)
            time.sleep(interval_s)
