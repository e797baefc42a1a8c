"""What is plotted of runs: distributions, a curve over loads, the fleet over time, tenants.

Owns which plots there are and what they are made of; how they are drawn is `plots`'.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shoal.report.comparison import Row, compare
from shoal.report.plots import Axis, Bar, Line, bars, heatmap, lines
from shoal.simulation import Result, Run
from shoal.simulation.results import Part

Floats = npt.NDArray[np.float64]

_SHARES = np.concatenate((np.arange(0, 99, 1.0), np.arange(99, 100.01, 0.1))) / 100
_POINTS = 120
_MAX_ROWS = 40
_MAX_TENANTS = 8
_COLUMNS = 96


class Plot(NamedTuple):
    """One plot of the page.  legend: names with their colours, where they are not the policies."""

    title: str
    note: str
    svg: str
    legend: tuple[tuple[str, int], ...] = ()


def distributions(runs: Sequence[Run]) -> list[Plot]:
    """TTFT, TPOT and end to end of the runs of one load, all seeds of a policy together."""
    return [
        _distribution("Time to first token", "TTFT", runs, lambda run: run.requests.ttft_s),
        _distribution("Time per output token", "TPOT", runs, lambda run: run.requests.tpot_s),
        _distribution("End to end", "time", runs, lambda run: run.requests.duration_s),
        _by_length(runs),
    ]


def over_loads(runs: Sequence[Run], load_unit: str) -> list[Plot]:
    """Latency against throughput, and what the load does to either; none without several loads."""
    rows = [row for row in compare(runs) if row.load is not None]
    if len({row.load for row in rows}) < 2:
        return []
    policies = list(dict.fromkeys(row.policy for row in rows))
    by_policy = {policy: [row for row in rows if row.policy == policy] for policy in policies}
    throughput = Axis("output tokens/s", lambda value: f"{value:,.0f}", low=0.0)
    load = Axis(load_unit, lambda value: f"{value:g}", low=0.0)
    ttft = Axis("TTFT p95", seconds, is_log=True)
    hit = Axis("hit ratio", percent, low=0.0, high=1.0)

    def drawn(x: Callable[[Row], float], key: str, factor: float = 1.0, *, is_labelled: bool = False) -> list[Line]:
        made = []
        for colour, (policy, own) in enumerate(by_policy.items()):
            labels = tuple(f"{row.load:g}" for row in own) if is_labelled and len(policies) <= 3 else ()
            cells = [row.cells[key] for row in own]
            means, halves = [cell.mean * factor for cell in cells], [cell.half * factor for cell in cells]
            made.append(Line(policy, [x(row) for row in own], means, colour, "dots", labels, halves))
        return made

    def at(row: Row) -> float:
        return row.load or 0.0

    return [
        Plot(
            "Throughput against latency",
            f"A point per load ({load_unit}): mean over seeds, with its 95 % interval. Right and low is better.",
            lines("Throughput against latency",
                  drawn(lambda row: row.cells["tokens"].mean, "ttft_p95", 1e-3, is_labelled=True),
                  throughput, ttft, hover=""),
        ),
        Plot(
            "Latency over load",
            "95 of 100 requests had their first token by then.",
            lines("TTFT p95 over load", drawn(at, "ttft_p95", 1e-3), load, ttft),
        ),
        Plot(
            "Throughput over load",
            "Where the curve goes flat the fleet is full.",
            lines("Output tokens per second over load", drawn(at, "tokens"), load, throughput),
        ),
        Plot(
            "Hit ratio over load",
            "Share of prompt tokens that were found in a cache.",
            lines("Hit ratio over load", drawn(at, "hit", 0.01), load, hit),
        ),
    ]  # fmt: skip


def over_time(runs: Sequence[Run]) -> list[Plot]:
    """Queues, hit ratio and throughput of the first seed of each policy."""
    shown = _first_seeds(runs)
    end_s = max((run.result.duration_s for run in shown), default=0.0)
    if end_s <= 0 or not any(len(run.timeline.times_s) > 1 for run in shown):
        return []
    grid = np.linspace(0.0, end_s, _POINTS)
    time = Axis("time", lambda value: f"{value:,.0f} s", low=0.0, high=end_s)
    whole = Axis("requests", lambda value: f"{value:,.0f}", low=0.0, is_whole=True)
    waiting = Plot(
        "Requests that wait",
        "In the queues of all engines." if len(shown) > 1 else "In the queues of all engines, and in the router.",
        lines("Requests waiting over time", _waiting(shown, grid), time, whole),
        () if len(shown) > 1 else (("engines", 0), ("router", 1)),
    )
    hit_lines = [Line(run.policy, grid.tolist(), _hit_over(run, grid), n) for n, run in enumerate(shown)]
    hit = Plot(
        "Hit ratio over time",
        "Share of prompt tokens found in a cache, of the requests that came near that time.",
        lines("Hit ratio over time", hit_lines, time, Axis("hit ratio", percent, low=0.0, high=1.0)),
    )
    rate = Plot(
        "Throughput over time",
        "Output tokens of the requests that ended near that time, per second.",
        lines(
            "Output tokens per second over time",
            [Line(run.policy, grid.tolist(), _rate_over(run, grid), n) for n, run in enumerate(shown)],
            time,
            Axis("output tokens/s", _count, low=0.0),
        ),
    )
    return [waiting, hit, rate]


def tenants(runs: Sequence[Run]) -> list[Plot]:
    """Who got how much, and waited how long; none with a single tenant."""
    shown = _first_seeds(runs)
    parts: dict[str, list[tuple[int, str, Part]]] = {}
    for colour, run in enumerate(shown):
        for name, part in run.result.tenants.items():
            parts.setdefault(name or "(none)", []).append((colour, run.policy, part))
    if len(parts) < 2:
        return []
    most = sorted(parts, key=lambda name: -max(part.token_share for _, _, part in parts[name]))[:_MAX_TENANTS]
    more = f" The {_MAX_TENANTS} with the largest share of {len(parts)}." if len(parts) > _MAX_TENANTS else ""

    def groups(read: Callable[[Part], float], show: Callable[[float], str]) -> list[tuple[str, list[Bar]]]:
        return [
            (name, [Bar(policy, read(part), colour, show(read(part))) for colour, policy, part in parts[name]])
            for name in most
        ]

    share = groups(lambda part: part.token_share, percent)
    wait = groups(lambda part: part.ttft_p95_s, seconds)
    made = [
        Plot("Share of the work", f"Tokens computed for each tenant: prompts less what was cached, and answers.{more}",
             bars("Share of the work by tenant", share)),
        Plot("TTFT p95 by tenant", f"Nineteen of twenty requests had their first token by then.{more}",
             bars("TTFT p95 by tenant", wait)),
    ]  # fmt: skip
    if any(part.slo_requests for each in parts.values() for _, _, part in each):
        met = groups(lambda part: part.slo_ratio, percent)
        made.append(Plot("SLO met by tenant", f"Of the requests that have one.{more}", bars("SLO met by tenant", met)))
    if len(shown) == 1:
        made.append(_tenants_over_time(shown[0], [name if name != "(none)" else "" for name in most]))
    return made


def endpoints(runs: Sequence[Run]) -> list[Plot]:
    """Each endpoint's load over time, and its requests for fleets that fit on a page."""
    shown = _first_seeds(runs)
    over = [_endpoints(run) for run in shown if len(run.timeline.times_s) > 1]
    names = list(dict.fromkeys(name for run in shown for name in run.result.served))
    if not 1 < len(names) <= _MAX_ROWS // max(1, len(shown)) + 4:
        return over
    groups = [
        (name, [_served(run.policy, run.result, name, colour) for colour, run in enumerate(shown)]) for name in names
    ]
    return [*over, Plot("Requests per endpoint", "With its own hit ratio.", bars("Requests per endpoint", groups))]


def seconds(value: float) -> str:
    """Return a time as people say it: 35 ms, 1.2 s, 140 s."""
    if value != value:
        return "–"
    if value < 0.9995:
        return f"{value * 1e3:.3g} ms" if value * 1e3 < 1000 else "1 s"
    return f"{value:.3g} s" if value < 100 else f"{value:,.0f} s"


def percent(value: float) -> str:
    """Return a share as percent."""
    return "–" if value != value else f"{value * 100:.0f} %"


def _distribution(title: str, axis: str, runs: Sequence[Run], read: Callable[[Run], Floats]) -> Plot:
    policies = list(dict.fromkeys(run.policy for run in runs))
    drawn: list[Line] = []
    # Long tails are a few requests; the axis ends where they begin.
    low, high = math.inf, 0.0
    for colour, policy in enumerate(policies):
        each = [read(run)[~run.requests.is_failed] for run in runs if run.policy == policy]
        each = [values[~np.isnan(values)] for values in each]
        together = np.concatenate(each)
        if not len(together):
            continue
        low, high = min(low, float(np.quantile(together, 0.005))), max(high, float(np.quantile(together, 0.999)))
        if len(policies) == 1 and len(each) > 1:
            drawn += [_cumulative(policy, values, colour, "thin") for values in each if len(values)]
        drawn.append(_cumulative(policy, together, colour))
    x = Axis(axis, seconds, is_log=True, low=max(low, 1e-4) if low < math.inf else None, high=high or None)
    y = Axis("requests", percent, low=0.0, high=1.0, ticks=(0.0, 0.25, 0.5, 0.75, 0.95, 1.0))
    seeds = len({run.seed for run in runs})
    note = "Share of requests that were as fast or faster" + (f"; {seeds} seeds together." if seeds > 1 else ".")
    return Plot(title, note, lines(f"Distribution of {axis}", drawn, x, y, hover="y"))


def _by_length(runs: Sequence[Run]) -> Plot:
    """Median TTFT of prompts of about one length."""
    longest = max((int(run.requests.prompt_tokens.max(initial=1)) for run in runs), default=1)
    edges = _edges(longest)
    drawn = []
    for colour, policy in enumerate(dict.fromkeys(run.policy for run in runs)):
        own = [run.requests for run in runs if run.policy == policy]
        good = [~np.isnan(each.ttft_s) & ~each.is_failed for each in own]
        tokens = np.concatenate([each.prompt_tokens[keep] for each, keep in zip(own, good, strict=True)])
        ttft = np.concatenate([each.ttft_s[keep] for each, keep in zip(own, good, strict=True)])
        places = np.searchsorted(edges, tokens, side="right")
        medians = [
            float(np.median(ttft[places == n])) if (places == n).any() else math.nan for n in range(1, len(edges))
        ]
        drawn.append(Line(policy, np.sqrt(edges[1:] * edges[:-1]).tolist(), medians, colour, "dots"))
    used = [n for n in range(len(edges) - 1) if any(line.ys[n] == line.ys[n] for line in drawn)]
    drawn = [line._replace(xs=[line.xs[n] for n in used], ys=[line.ys[n] for n in used]) for line in drawn]
    x = Axis("tokens of the prompt", _count, is_log=True)
    y = Axis("TTFT p50", seconds, is_log=True)
    return Plot(
        "TTFT by length of the prompt",
        "Median of prompts of about that length, cached parts included.",
        lines("Median TTFT by length of the prompt", drawn, x, y),
    )


def _edges(longest: int) -> Floats:
    """Half octaves up to the longest prompt, the last twelve of them."""
    last = math.floor(2 * math.log2(longest)) + 1
    return 2.0 ** (np.arange(max(0, last - 12), last + 1) / 2)


def _count(value: float) -> str:
    return f"{value:,.0f}" if value < 10_000 else f"{value / 1000:,.0f}k"


def _cumulative(name: str, values: Floats, colour: int, style: str = "") -> Line:
    return Line(name, np.quantile(values, _SHARES).tolist(), _SHARES.tolist(), colour, style)


def _first_seeds(runs: Sequence[Run]) -> list[Run]:
    first: dict[str, Run] = {}
    for run in runs:
        first.setdefault(run.policy, run)
    return list(first.values())


def _waiting(shown: Sequence[Run], grid: Floats) -> list[Line]:
    if len(shown) == 1:
        seen = shown[0].timeline
        engines = _on_grid(grid, seen.times_s, np.nansum(seen.waiting, axis=1))
        router = _on_grid(grid, seen.times_s, seen.held.astype(np.float64))
        return [Line("engines", grid.tolist(), engines, 0, "area"), Line("router", grid.tolist(), router, 1)]
    return [
        Line(
            run.policy, grid.tolist(), _on_grid(grid, run.timeline.times_s, np.nansum(run.timeline.waiting, axis=1)), n
        )
        for n, run in enumerate(shown)
    ]


def _on_grid(grid: Floats, times_s: Floats, values: Floats) -> list[float]:
    """Return the values at the times of the grid; NaN behind the last one."""
    if not len(times_s):
        return [math.nan] * len(grid)
    return list(np.interp(grid, times_s, values, right=math.nan))


def _hit_over(run: Run, grid: Floats) -> list[float]:
    """Return the hit ratio of the requests that came within two steps of each time."""
    done = run.requests
    order = np.argsort(done.arrived_s, kind="stable")
    at = done.arrived_s[order]
    step = grid[1] - grid[0]
    first, last = np.searchsorted(at, grid - 2 * step), np.searchsorted(at, grid + 2 * step)
    prompt = np.concatenate(([0], np.cumsum(done.prompt_tokens[order])))
    cached = np.concatenate(([0], np.cumsum(done.cached_tokens[order])))
    asked = (prompt[last] - prompt[first]).astype(np.float64)
    found = (cached[last] - cached[first]).astype(np.float64)
    return list(np.divide(found, asked, out=np.full(len(grid), math.nan), where=asked > 0))


def _rate_over(run: Run, grid: Floats) -> list[float]:
    """Return the output tokens per second of requests that ended within a step of each time; NaN behind the last."""
    done = run.requests
    ended = done.arrived_s + done.duration_s
    order = np.argsort(ended, kind="stable")
    total = np.concatenate(([0], np.cumsum(done.output_tokens[order])))
    step = grid[1] - grid[0]
    first, last = np.searchsorted(ended[order], grid - step), np.searchsorted(ended[order], grid + step)
    rate = (total[last] - total[first]) / (2 * step)
    return list(np.where(grid <= run.result.duration_s, rate, math.nan))


def _endpoints(run: Run) -> Plot:
    """Requests in each endpoint over time; large fleets in groups of neighbours."""
    seen = run.timeline
    load = seen.running + seen.waiting
    step = max(1, math.ceil(len(seen.times_s) / _COLUMNS))
    group = max(1, math.ceil(len(seen.endpoints) / _MAX_ROWS))
    with np.errstate(invalid="ignore"):
        thinned = np.stack([_mean_of(load[n : n + step], 0) for n in range(0, len(load), step)])
        rows = [_mean_of(thinned[:, n : n + group], 1) for n in range(0, load.shape[1], group)]
    names = seen.endpoints
    if group > 1:
        grouped = [names[n : n + group] for n in range(0, len(names), group)]
        names = [f"{each[0]}–{each[-1]}" for each in grouped]
    note = f"{run.policy}, seed {run.seed}: requests running and waiting"
    note += f", mean of {group} neighbours" if group > 1 else ""
    svg = heatmap(
        f"Requests in each endpoint over time, {run.policy}",
        names,
        seen.times_s[::step].tolist(),
        [[round(value, 1) for value in row.tolist()] for row in rows],
    )
    return Plot("Load of each endpoint", f"{note}. Hatched: down.", svg)


def _mean_of(values: Floats, axis: int) -> Floats:
    """Return the mean of what is known, NaN where nothing is."""
    known = ~np.isnan(values)
    count = known.sum(axis=axis)
    total = np.where(known, values, 0.0).sum(axis=axis)
    mean: Floats = np.divide(total, count, out=np.full(count.shape, math.nan), where=count > 0)
    return mean


def _tenants_over_time(run: Run, names: Sequence[str]) -> Plot:
    """Tokens of each tenant over time, by when its requests ended."""
    done = run.requests
    ended = done.arrived_s + done.duration_s
    work = np.where(done.is_failed, 0, done.prompt_tokens - done.cached_tokens + done.output_tokens)
    edges = np.linspace(0.0, max(float(ended.max(initial=0.0)), 1e-9), 61)
    middle = ((edges[1:] + edges[:-1]) / 2).tolist()
    drawn = []
    for colour, name in enumerate(names):
        mine = done.tenant.codes == done.tenant.names.index(name)
        sums, _ = np.histogram(ended[mine], edges, weights=work[mine])
        drawn.append(Line(name or "(none)", middle, (sums / (edges[1] - edges[0])).tolist(), colour))
    x = Axis("time", lambda value: f"{value:,.0f} s", low=0.0, high=float(edges[-1]))
    y = Axis("tokens/s", lambda value: f"{value:,.0f}", low=0.0)
    legend = tuple((line.name, line.colour) for line in drawn)
    return Plot(
        "Work over time", "Tokens computed per second for each tenant.", lines("Work over time", drawn, x, y), legend
    )


def _served(policy: str, result: Result, name: str, colour: int) -> Bar:
    part = result.endpoints.get(name)
    hit = f" · {part.hit_ratio * 100:.0f} %" if part is not None else ""
    count = result.served.get(name, 0)
    return Bar(policy, float(count), colour, f"{count:,}{hit}")
