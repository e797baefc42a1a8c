"""`shoal explain REQUEST_ID`: why a request went where it went, waits, or was refused.

Owns how the explanation looks.  The figures are those that decided, kept by the picker that decided.
"""

import argparse
import json
import sys
from typing import Any

from shoal.cli.queues import ahead_words, printable, seconds, tenant_name
from shoal.cli.status import add_pool_flags
from shoal.hosts.admin import find_pool

_EXAMPLES = """examples:
  curl -si localhost:8080/v1/chat/completions -H 'x-request-id: mine-1' ... then
  shoal explain mine-1           by the id that the client sent
  shoal explain ef50e552-1       by the id that Shoal minted (response header x-shoal-request-id)
  shoal explain mine-1 --json    for scripts

Recent requests only: each picker keeps the last 10,000 or fewer, and the last 5,000 refusals.  What a picker knew that
was replaced by an upgrade stays until the next one; what one knew that died is gone.
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "explain",
        help="say why a request went where it went, waits or was refused",
        description="Print a request's candidates, each scorer's value and weight, the choice, and what came of it;\n"
        "how long it waits or waited in the queue, and who was ahead by tenant and band.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("request_id", metavar="REQUEST_ID", help="the minted id, or the client's x-request-id")
    add_pool_flags(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the explanation; returns 0 when the request is known, 1 when not."""
    explained = find_pool(args.run_dir, args.port).explain(args.request_id)
    if args.json:
        json.dump(explained, sys.stdout, indent=2)
        sys.stdout.write("\n")
        return 0 if explained["found"] else 1
    if not explained["found"]:
        print(
            f"shoal: no picker remembers request {args.request_id!r}: only recent ones are kept, or it was "
            "refused before it reached the router; its answer says why",
            file=sys.stderr,
        )
        if explained["silent"]:
            print(f"shoal: picker {', '.join(explained['silent'])} did not answer", file=sys.stderr)
        if explained.get("renewed"):
            renewed = ", ".join(explained["renewed"])
            print(f"shoal: picker {renewed} died and was started anew: what it knew before is gone", file=sys.stderr)
        return 1
    _print(explained["found"])
    return 0


def _print(found: list[dict[str, Any]]) -> None:
    from rich.console import Console

    console = Console() if sys.stdout.isatty() else Console(width=160)
    for explanation in found:
        console.print(head(explanation), highlight=False)
        state = explanation.get("state", "sent")
        if state == "sent":
            console.print(candidates_table(explanation))
            console.print(ending(explanation), highlight=False)
        else:
            console.print((wait if state == "waiting" else refusal)(explanation), highlight=False, markup=False)


def head(explanation: dict[str, Any]) -> str:
    """Return the lines above the table: which request, and what it asked for."""
    from rich.markup import escape

    model, target = _shown(explanation, "model"), _shown(explanation, "target_model")
    named = escape(model) if not target or target == model else f"{escape(model)} -> {escape(target)}"
    client = f" (client's id {escape(_shown(explanation, 'client_id'))})" if explanation.get("client_id") else ""
    tenant = f", tenant {escape(tenant_name(explanation['tenant']))}" if explanation.get("tenant") else ""
    dropped = "".join(f", {name} dropped {count}" for name, count in explanation.get("dropped", []) if count)
    counted = "by its exact tokens" if explanation.get("is_exact") else "estimated before dispatch"
    profile = f", profile {escape(str(explanation['profile']))}{dropped}" if "profile" in explanation else ""
    replaced = " (replaced since)" if explanation.get("is_replaced") else ""
    return (
        f"request [bold]{escape(_shown(explanation, 'request_id'))}[/bold]{client}, "
        f"picker {explanation.get('picker', '?')}{replaced}\n"
        f"{explanation.get('api', '')}, model {named or '-'}{tenant}, {_count(explanation.get('prompt_tokens'))} "
        f"prompt tokens ({counted}){profile}"
    )


def wait(explanation: dict[str, Any]) -> str:
    """Return what is known of a request that waits: since when, where, and who goes before it."""
    ahead = explanation.get("ahead") or 0
    return (
        f"waits in the queue for {seconds(explanation.get('queue_s'))}, in band {explanation.get('priority', 0)}, "
        f"place {ahead + 1:,}: {ahead_words(explanation) or 'nobody ahead'}"
    )


def refusal(explanation: dict[str, Any]) -> str:
    """Return why a request was refused, how long it waited before that, and who was ahead when it came."""
    waited, ahead = explanation.get("queue_s") or 0.0, ahead_words(explanation)
    lines = [f"refused: {explanation.get('reason', '')}: {_shown(explanation, 'message')}"]
    lines.append(f"waited {seconds(waited)} in band {explanation.get('priority', 0)}" if waited else "refused at once")
    lines[1] += f"; when it came {ahead}" if ahead else ""
    if explanation.get("retry_after_s") is not None:
        lines.append(f"told to come back in {seconds(explanation['retry_after_s'])}")
    return "\n".join(lines)


def candidates_table(explanation: dict[str, Any]) -> Any:
    """Return the table: one row per candidate, best first, one column per scorer as value x weight."""
    from rich.markup import escape
    from rich.table import Table

    weights: dict[str, float] = explanation.get("weights", {})
    chosen: list[str] = explanation.get("chosen", [])
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    table.add_column("CANDIDATE", no_wrap=True)
    table.add_column("CACHED TOKENS\nexpected", justify="right")
    is_predicted = explanation.get("predicted_ttft_s") is not None
    if is_predicted:
        table.add_column("TTFT\npredicted", justify="right")
        table.add_column("TPOT\npredicted", justify="right")
    for name, weight in weights.items():
        table.add_column(f"{escape(name)}\nvalue x {weight:g}", justify="right")
    table.add_column("TOTAL", justify="right")
    ranks = {endpoint_id: rank for rank, endpoint_id in enumerate(chosen)}
    # Totals that look the same stand in the order of the choice, which was made by chance.
    candidates = sorted(
        explanation.get("candidates", []),
        key=lambda each: (-round(each["total"], 3), ranks.get(each["id"], len(ranks)), each["id"]),
    )
    for candidate in candidates:
        rank = ranks.get(candidate["id"], -1)
        table.add_row(
            "" if rank < 0 else ("=>" if rank == 0 else f"{rank + 1}."),
            escape(candidate["id"]),
            _count(candidate.get("matched_tokens")),
            *((seconds(candidate.get(f"predicted_{what}_s")) for what in ("ttft", "tpot")) if is_predicted else ()),
            *(_score(candidate["scores"].get(name), weight) for name, weight in weights.items()),
            f"{candidate['total']:.3f}",
            style="bold green" if rank == 0 else "",
        )
    return table


def ending(explanation: dict[str, Any]) -> str:
    """Return the lines below the table: the choice and what was measured."""
    from rich.markup import escape

    chosen: list[str] = explanation.get("chosen", [])
    first = chosen[0] if chosen else "-"
    ahead = ahead_words(explanation)
    behind = f" in band {explanation.get('priority', 0)}, {escape(ahead)} when it came" if ahead else ""
    lines = [f"chosen {escape(first)}, after {seconds(explanation.get('queue_s'))} in the queue{behind}"]
    if len(chosen) > 1:
        lines[0] += f"; fallbacks {escape(', '.join(chosen[1:]))}"
    if explanation.get("status") is None:
        return lines[0] + "\nnot ended yet, or its record has not arrived"
    served = str(explanation.get("served") or "-")
    moved = " (not the chosen one: a retry went there)" if served not in ("-", first) else ""
    cut = ", cut off" if explanation.get("is_cut") else ""
    # The status of a server that died is Envoy's: nobody served that.
    what = "served by" if 0 < explanation["status"] < 500 else "failed on"
    lines.append(
        f"{what} {escape(served)}{moved}: status {explanation['status']}, "
        f"{explanation.get('attempts') or 0} attempt(s), ttft {seconds(explanation.get('ttft_s'))}, "
        f"duration {seconds(explanation.get('duration_s'))}{cut}"
    )
    if explanation.get("predicted_ttft_s") is not None:
        lines.append(_prediction(explanation))
    predicted = next(
        (each.get("matched_tokens") for each in explanation.get("candidates", []) if each["id"] == first), None
    )
    reported = explanation.get("cached_tokens")
    said = "not reported by the engine" if reported is None else f"{_count(reported)} reported"
    lines.append(
        f"cached tokens: {_count(predicted)} expected, {said}; "
        f"{_count(explanation.get('reported_prompt_tokens'))} prompt and "
        f"{_count(explanation.get('completion_tokens'))} completion tokens"
        + (" (completion estimated)" if explanation.get("is_estimated") else "")
    )
    return "\n".join(lines)


def _prediction(explanation: dict[str, Any]) -> str:
    """What was predicted beside what was measured."""
    ttft_s, duration_s = explanation.get("ttft_s"), explanation.get("duration_s") or 0.0
    tokens = explanation.get("completion_tokens") or 0
    engine_s = None if ttft_s is None else max(0.0, ttft_s - (explanation.get("queue_s") or 0.0))
    tpot_s = (duration_s - ttft_s) / (tokens - 1) if ttft_s is not None and tokens > 1 else None
    trust = "" if explanation.get("is_prediction_trusted") else " (not trusted: it did not decide)"
    ttft, tpot = (seconds(explanation.get(f"predicted_{what}_s")) for what in ("ttft", "tpot"))
    return (
        f"predicted ttft {ttft}, measured {seconds(engine_s)} after the queue; "
        f"predicted tpot {tpot}, measured {seconds(tpot_s)}{trust}"
    )


def _score(value: float | None, weight: float) -> str:
    return "-" if value is None else f"{value:.3f} = {value * weight:.3f}"


def _shown(explanation: dict[str, Any], name: str) -> str:
    return printable(str(explanation.get(name) or ""))


def _count(value: Any) -> str:
    return "-" if value is None else f"{int(value):,}"
