"""One page of HTML with everything that is said of runs; it opens without a network.

Owns what stands on the page and in which order.  Its form is `page.html`, the plots are `figures`'.
"""

from collections.abc import Sequence
from importlib.resources import files
from typing import Any, NamedTuple

import jinja2
import msgspec
import yaml
from markupsafe import Markup

from shoal.engine import find_profile
from shoal.report.comparison import Cell, Figure, Row, compare, short, told
from shoal.report.document import Document
from shoal.report.figures import Plot, distributions, endpoints, over_loads, over_time, seconds, tenants
from shoal.report.honesty import AGGREGATE, CAUTION, MODELLED, NOT_MODELLED, REFERENCE
from shoal.report.plots import COLOURS
from shoal.simulation import Run
from shoal.simulation.fleets import Group

# What fits on a page; the results file has all.
_LEFT_OUT = ("e2e_p50", "requests")


class View(NamedTuple):
    """What is shown of one load.  title: "" when there is only one."""

    title: str
    sections: list[tuple[str, list[Plot]]]


class Tile(NamedTuple):
    """A figure in large type."""

    title: str
    value: str
    note: str


def as_html(document: Document, runs: Sequence[Run]) -> str:
    """Return the page.  runs: one or more."""
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string((files("shoal.report") / "page.html").read_text())
    rows = compare(runs)
    policies = list(dict.fromkeys(run.policy for run in runs))
    figures = [figure for figure in told(runs) if figure.key not in _LEFT_OUT]
    whole = sum(not run.result.is_partial for run in runs)
    return template.render(
        document=document,
        name=document.experiment.name or "Experiment",
        policies=[(short(policy), policy, place % COLOURS, place >= COLOURS) for place, policy in enumerate(policies)],
        is_comparison=len(policies) > 1,
        cut=f"{whole} of {document.planned} runs were done, {len(runs) - whole} in part"
        if whole < document.planned
        else "",
        tiles=_tiles(rows[0], figures) if len(rows) == 1 else [],
        figures=[figure.title for figure in figures],
        has_loads=any(row.load is not None for row in rows),
        rows=[_row(row, figures) for row in rows],
        sweep=[_safe(plot) for plot in over_loads(runs, document.load_unit)],
        views=_views(document, runs),
        fleet=_fleet(document),
        experiment=_yaml(document.experiment),
        configs=[(name, text or "# the default profile") for name, text in document.policies.items()],
        modelled=MODELLED,
        not_modelled=(*NOT_MODELLED, *_approximated(document)),
        caution=CAUTION,
        reference=REFERENCE if document.trials else "",
        delays=_delays(document),
    )


def _views(document: Document, runs: Sequence[Run]) -> list[View]:
    views = []
    for load in dict.fromkeys(run.load for run in runs):
        own = [run._replace(policy=short(run.policy)) for run in runs if run.load == load]
        sections = [
            ("Latency", distributions(own)),
            ("Over time", over_time(own)),
            ("Endpoints", endpoints(own)),
            ("Tenants", tenants(own)),
        ]
        title = "" if load is None else f"{load:g} {document.load_unit}"
        views.append(View(title, [(name, [_safe(plot) for plot in plots]) for name, plots in sections if plots]))
    return views


def _safe(plot: Plot) -> Plot:
    """The text of a plot escapes what stands in it."""
    return plot._replace(svg=Markup(plot.svg))


def _tiles(row: Row, figures: Sequence[Figure]) -> list[Tile]:
    cells = row.cells

    def time(key: str, factor: float) -> str:
        return seconds(cells[key].mean * factor)

    has_slo = any(figure.key == "slo" for figure in figures)
    slo = [Tile("SLO met", f"{cells['slo'].mean:.1f} %", "of requests that have one")] if has_slo else []
    return [
        *slo,
        Tile("TTFT p50", time("ttft_p50", 1e-3), f"p95 {time('ttft_p95', 1e-3)}, p99 {time('ttft_p99', 1e-3)}"),
        Tile("TPOT p50", time("tpot_p50", 1e-3), f"p95 {time('tpot_p95', 1e-3)}"),
        Tile("End to end p50", time("e2e_p50", 1.0), f"p95 {time('e2e_p95', 1.0)}"),
        Tile("Hit ratio", f"{cells['hit'].mean:.1f} %", "of prompt tokens"),
        Tile("Throughput", f"{cells['tokens'].mean:,.0f}", f"tokens/s, {cells['requests'].mean:.3g} requests/s"),
        Tile(
            "Requests", f"{row.requests:,}", f"{cells['failed'].mean:g} failed" + (" per seed" if row.seeds > 1 else "")
        ),
    ]


def _row(row: Row, figures: Sequence[Figure]) -> dict[str, Any]:
    return {
        "policy": short(row.policy),
        "load": "" if row.load is None else f"{row.load:g}",
        "requests": f"{row.requests:,}",
        "cells": [_cell(figure, row.cells[figure.key]) for figure in figures],
    }


def _cell(figure: Figure, cell: Cell) -> dict[str, str]:
    change, mood = "", ""
    if cell.change == cell.change:
        change = f"{cell.change * 100:+.0f} %"
        if figure.better and cell.is_clear:
            mood = "good" if (cell.change > 0) == (figure.better > 0) else "bad"
    half = "" if cell.half != cell.half else f"±{cell.half:,.{figure.digits}f}"
    return {"mean": f"{cell.mean:,.{figure.digits}f}", "half": half, "change": change, "mood": mood}


def _approximated(document: Document) -> tuple[str, ...]:
    return (AGGREGATE,) if any(group.mode == "aggregate" for group in document.experiment.fleet) else ()


def _fleet(document: Document) -> str:
    pickers = document.experiment.router.count
    return " + ".join(_group(group) for group in document.experiment.fleet) + (
        f", {pickers} pickers" if pickers > 1 else ""
    )


def _group(group: Group) -> str:
    """Equal engines in words: how many of which, and what is not as by default."""
    plain = Group()
    said = [
        f"{field} {getattr(group, field)}"
        for field in group.__struct_fields__
        if field not in ("count", "profile", "labels", "cost_per_hour")
        and getattr(group, field) != getattr(plain, field)
    ]
    return f"{group.count} × {find_profile(group.profile).name}" + (f" ({', '.join(said)})" if said else "")


def _yaml(value: Any) -> str:
    text: str = yaml.safe_dump(msgspec.to_builtins(value), sort_keys=False, allow_unicode=True, width=100)
    return text


def _delays(document: Document) -> str:
    used = document.experiment.delays
    jitter = f", by chance up to {seconds(used.jitter_s[-1])} more" if used.jitter_s else ""
    said = (
        f"{seconds(used.network_s)} from a picker to an engine{jitter}",
        f"{seconds(used.scrape_s)} between two readings of its metrics",
        f"{seconds(used.record_s)} until the record of a request",
        f"{seconds(used.tokenise_s)} for a prompt's tokens",
        f"{seconds(document.experiment.router.gossip_s)} between pickers",
        f"{seconds(used.detect_s)} until a dead engine is noticed",
    )
    return ", ".join(said)
