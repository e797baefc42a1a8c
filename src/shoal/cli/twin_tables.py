"""Runs of the twin in a terminal: policies side by side, then what is behind the figures of the last one.

Owns what is printed; the figures are `report`'s.
"""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shoal.report import Cell, Figure, Row, compare, short, told
from shoal.simulation import Result, Run
from shoal.simulation.regret import REFERENCE
from shoal.simulation.results import Part

__all__ = ["show"]

_MAX_ROWS = 16
_WIDE = 130
# By what they matter: as many as fit into 80 columns, there without intervals.
_SHOWN = ("ttft_p50", "ttft_p95", "failed", "regret", "slo", "hit", "e2e_p95", "tokens")
_NARROW = 6
# Where there is room.
_MORE = ("ttft_p99", "tpot_p95", "handed", "imbalance")


def show(console: Console, runs: Sequence[Run], load_unit: str) -> None:
    """Print all tables.  load_unit: of the loads of a sweep."""
    rows = compare(runs)
    has_loads = any(row.load is not None for row in rows)
    is_wide = console.width >= _WIDE
    all_ = told(runs)
    by_weight = [key for key in _SHOWN if any(figure.key == key for figure in all_)]
    chosen = {*_SHOWN, *_MORE} if is_wide else set(by_weight[:_NARROW])
    figures = [figure for figure in all_ if figure.key in chosen]
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("POLICY", overflow="fold")
    if has_loads:
        table.add_column(load_unit, justify="right")
    for name in ("requests", *(figure.title for figure in figures)):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        load = [f"{row.load:g}"] if has_loads and row.load is not None else []
        cells: list[str | Text] = [_shown(figure, row.cells[figure.key], has_half=is_wide) for figure in figures]
        table.add_row(Text(short(row.policy)), *load, f"{row.requests:,}", *cells)
    console.print(table)
    if is_wide and any(row.seeds > 1 for row in rows):
        console.print(f"± is half of the 95 % interval of the mean over {rows[0].seeds} seeds.", style="dim")
    if any(figure.key == "regret" for figure in figures):
        console.print(f"Regret is against the {REFERENCE}, which knows all beforehand and is no policy.", style="dim")
    _changes(console, rows, figures, load_unit)
    if len({(run.policy, run.load) for run in runs}) == 1:
        _inside(console, [run.result for run in runs])


def _changes(console: Console, rows: list[Row], figures: list[Figure], load_unit: str) -> None:
    """Print how policies differ from the first one, seed by seed."""
    others = [row for row in rows if row.policy != rows[0].policy]
    if not others:
        return
    table = Table(
        box=None,
        pad_edge=False,
        header_style="bold",
        title=Text(f"Against {short(rows[0].policy)}, %"),
        title_justify="left",
    )
    table.add_column("POLICY", overflow="fold")
    has_loads = any(row.load is not None for row in rows)
    if has_loads:
        table.add_column(load_unit, justify="right")
    compared = [figure for figure in figures if figure.better]
    for figure in compared:
        table.add_column(figure.title.rsplit(" ", 1)[0], justify="right", no_wrap=True)
    for row in others:
        load = [f"{row.load:g}"] if has_loads and row.load is not None else []
        table.add_row(Text(short(row.policy)), *load, *(_change(figure, row.cells[figure.key]) for figure in compared))
    console.print()
    console.print(table)
    many = "Green is better and red is worse than by the chance of the seeds."
    console.print(
        many if rows[0].seeds > 1 else "One seed cannot tell a difference from chance: give more.", style="dim"
    )


def _inside(console: Console, results: list[Result]) -> None:
    """Print tenants and endpoints of one policy; figures are of the first seed."""
    result = results[0]
    tenants = {name or "(none)": part for name, part in result.tenants.items()}
    if len(tenants) > 1:
        console.print()
        console.print(_parts("TENANT", tenants, _MAX_ROWS))
    if len(result.endpoints) > 1:
        console.print()
        busiest = dict(sorted(result.endpoints.items(), key=lambda each: -each[1].requests))
        console.print(_parts("ENDPOINT", busiest, _MAX_ROWS))
    note = f"Of seed 1 of {len(results)}. " if len(results) > 1 else ""
    console.print(
        f"{note}Most requests waiting at a look: {result.waiting_peak:,} in engines, {result.held_peak:,} in the "
        "router.",
        style="dim",
    )


def _parts(title: str, parts: dict[str, Part], most: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(title)
    has_slo = any(part.slo_requests for part in parts.values())
    titles = ("requests", "share of work %", "TTFT p50 ms", "TTFT p95 ms", "e2e p95 s", "hit %", "failed")
    for name in (*titles, "SLO met %") if has_slo else titles:
        table.add_column(name, justify="right")
    for name, part in list(parts.items())[:most]:
        table.add_row(
            Text(name),
            f"{part.requests:,}",
            f"{part.token_share * 100:.1f}",
            f"{part.ttft_p50_s * 1e3:,.0f}",
            f"{part.ttft_p95_s * 1e3:,.0f}",
            f"{part.e2e_p95_s:,.2f}",
            f"{part.hit_ratio * 100:.1f}",
            f"{part.failed:,}",
            *([f"{part.slo_ratio * 100:.1f}" if part.slo_requests else ""] if has_slo else []),
        )
    if len(parts) > most:
        table.add_row(f"... {len(parts) - most} more")
    return table


def _shown(figure: Figure, cell: Cell, *, has_half: bool) -> str:
    """The mean, and half the width of its interval where there is one and room for it."""
    shown = f"{cell.mean:,.{figure.digits}f}"
    return shown if cell.half != cell.half or not has_half else f"{shown} ±{cell.half:,.{figure.digits}f}"


def _change(figure: Figure, cell: Cell) -> Text:
    if cell.change != cell.change:
        return Text("")
    half = "" if cell.change_half != cell.change_half else f" ±{cell.change_half * 100:.0f}"
    style = ""
    if cell.is_clear:
        style = "green" if (cell.change > 0) == (figure.better > 0) else "red"
    return Text(f"{cell.change * 100:+.0f}{half}", style=style)
