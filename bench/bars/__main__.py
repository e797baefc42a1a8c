"""`python -m bench.bars`: measure bars, print a line each, write JSON, and fail when one falls short."""

import argparse
import fnmatch
import importlib
import json
import sys
import time
import traceback
from pathlib import Path

import msgspec

from bench.bars.registry import BARS, Bar, Figure
from bench.machine import FOREIGN_CORES_LIMIT, Neighbours, build_flaw, wait_until_idle

_MODULES = (
    "decide", "cpu", "journal", "streams", "demo", "shapes", "books", "faults", "disconnects", "share",
    "plane_cpu", "plane_gaps", "plane_faults", "plane_memory", "plane_same", "plane_peers",
    "exact", "tokens", "kv", "flow", "latency", "slo", "twin", "twin_fit", "twin_live", "headline",
    "policies",
)  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Run the chosen bars; 0 when all are met, 1 when one is not, 2 when none was chosen."""
    parser = argparse.ArgumentParser(prog="bench.bars", description="Check the figures that the project promises.")
    parser.add_argument("settings", nargs="*", metavar="PART=N", help="the same as --part N, for make")
    parser.add_argument("--part", type=int, help="only the bars of this part")
    parser.add_argument("--id", action="append", default=[], help="only these bars (repeatable, may hold *)")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the full load, for a quick look (1.0)")
    parser.add_argument("--wait-idle", type=float, default=30.0, metavar="S", help="longest wait for idleness (30)")
    parser.add_argument(
        "--tries", type=int, default=2, metavar="N", help="measure again when void, so often in all (2)"
    )
    parser.add_argument("--list", action="store_true", help="say what would be measured")
    parser.add_argument("--json", type=Path, default=Path(".bench/bars.json"), help="where the figures go")
    arguments = parser.parse_args(argv)
    part = arguments.part
    for setting in arguments.settings:
        name, _, value = setting.partition("=")
        if name.upper() != "PART" or not value.isdigit():
            parser.error(f"unknown setting {setting!r}")
        part = int(value)
    for module in _MODULES:
        importlib.import_module(f"bench.bars.{module}")
    chosen = [each for each in BARS.values() if _is_chosen(each, part, arguments.id)]
    if not chosen:
        print("no such bar; --list names them all", file=sys.stderr)
        return 2
    if arguments.list:
        for each in chosen:
            print(f"{each.id:24} {_limit(each):>12}  {each.text}")
        return 0
    if flaw := build_flaw():
        print(f"{flaw}; one that has it takes 12 to 16 % less CPU", file=sys.stderr)
    results: dict[str, Figure] = {}
    for each in chosen:
        results[each.id] = _measure(each, arguments.scale, arguments.wait_idle, arguments.tries)
        _write(arguments.json, results, arguments.scale)  # a run that is cut short keeps what it has measured
    return 0 if all(BARS[id].is_met(figure) for id, figure in results.items()) else 1


def _is_chosen(each: Bar, part: int | None, ids: list[str]) -> bool:
    return (part is None or each.part == part) and (not ids or any(fnmatch.fnmatch(each.id, id) for id in ids))


def _measure(each: Bar, scale: float, wait_s: float, tries: int) -> Figure:
    """Measure, again when the run was void, and print the line."""
    began = time.monotonic()
    for _ in range(max(1, tries)):
        wait_until_idle(wait_s)
        figure = _once(each, scale)
        if not figure.void or figure.value != figure.value:
            break
    verdict = "ok" if each.is_met(figure) else "void" if figure.void else "short"
    spent = time.monotonic() - began
    line = f"{each.id:24} {figure.value:>10.4g} {each.unit:<5} {_limit(each):>14}  {verdict:<5} {spent:6.1f} s"
    reason = figure.void or (figure.why if verdict == "short" else "")
    print(line + (f"  ({reason})" if reason else ""), flush=True)
    return figure


def _once(each: Bar, scale: float) -> Figure:
    """One measurement; one that falls short on a machine that does other work is void."""
    neighbours = Neighbours()
    try:
        figure = each.measure(scale)
    except Exception as error:
        traceback.print_exc()
        return Figure(value=float("nan"), void=f"{type(error).__name__}: {error}"[:200])
    cores = neighbours.cores()
    void = figure.void
    if not void and not each.is_met(figure) and cores > FOREIGN_CORES_LIMIT:
        void = f"other processes used {cores:.1f} cores"
    return msgspec.structs.replace(figure, void=void, details={**figure.details, "foreign_cores": round(cores, 2)})


def _limit(each: Bar) -> str:
    return f"{'>=' if each.is_floor else '<='} {each.limit:g} {each.unit}".rstrip()


def _write(path: Path, results: dict[str, Figure], scale: float) -> None:
    """Merge the figures into the file, so that a run of one bar does not forget the others."""
    path.parent.mkdir(parents=True, exist_ok=True)
    known = json.loads(path.read_text()) if path.exists() else {}
    for id, figure in results.items():
        each = BARS[id]
        known[id] = {
            **msgspec.to_builtins(figure),
            "bar": _limit(each),
            "is_met": each.is_met(figure),
            "scale": scale,
            "build_flaw": build_flaw(),
            "text": each.text,
            "measured_at": int(time.time()),
        }
    path.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    sys.exit(main())
