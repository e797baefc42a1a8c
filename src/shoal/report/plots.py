"""Plots as SVG text: lines, heat maps and bars, with axes that a person can read.

Owns geometry and ticks.  Colours are classes (`c0` to `c7`) that the page gives values for light and dark; what a plot
shows is `figures`'.  Every plot of lines carries its values, so that the page can name them under the pointer.
"""

import json
import math
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

COLOURS = 8
WIDTH, HEIGHT = 520, 290
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 16, 10, 44
_ROW, _GAP = 15, 5
_LEVELS = 8


class Axis(NamedTuple):
    """One axis.  show: a value as its label.  low, high: ends, taken from the values where None.

    is_whole: of a count, so that no tick lies between two whole numbers.
    """

    title: str
    show: Callable[[float], str]
    is_log: bool = False
    low: float | None = None
    high: float | None = None
    ticks: tuple[float, ...] = ()
    is_whole: bool = False


class Line(NamedTuple):
    """Points in order.  colour: place in the palette.  style: "", "thin", "area" or "dots".  labels: at points.

    halves: half the height of a bar through each point, NaN for none.
    """

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    colour: int
    style: str = ""
    labels: Sequence[str] = ()
    halves: Sequence[float] = ()


class Bar(NamedTuple):
    """One bar of a group.  shown: its value as text."""

    name: str
    value: float
    colour: int
    shown: str


def lines(about: str, drawn: Sequence[Line], x: Axis, y: Axis, *, hover: str = "x") -> str:
    """Return a plot of lines.

    about: what it shows, for those who hear it.  hover: the axis whose values all lines share ("x" or "y") and along
    which the pointer reads them; "" for none.
    """
    across = _Scale(x, [value for line in drawn for value in line.xs], _LEFT, WIDTH - _RIGHT)
    ends = [
        end
        for line in drawn
        for value, half in zip(line.ys, line.halves, strict=False)
        for end in (value - half, value + half)
    ]
    up = _Scale(y, [value for line in drawn for value in line.ys] + ends, HEIGHT - _BOTTOM, _TOP)
    parts = [_grid(x, y, across, up)]
    parts += [_drawn(line, across, up) for line in drawn]
    read = [line for line in drawn if line.style != "thin"]
    data = _readable(read, x, y, across, up, hover) if hover and read else ""
    return _svg(about, HEIGHT, parts, data)


def heatmap(about: str, rows: Sequence[str], times: Sequence[float], values: Sequence[Sequence[float]]) -> str:
    """Return rows of cells, the darker the larger; values: row by row, NaN for nothing known (hatched).

    times: of the columns, seconds, evenly apart.
    """
    height = max(100, min(232, 26 * len(rows)))
    cell_h, cell_w = height / max(1, len(rows)), (WIDTH - _LEFT - _RIGHT) / max(1, len(times))
    most = max((value for row in values for value in row if value == value), default=0.0) or 1.0
    paths: list[list[str]] = [[] for _ in range(_LEVELS + 2)]
    for number, row in enumerate(values):
        top, start = _TOP + number * cell_h, 0
        levels = [_level(value, most) for value in row]
        for place in range(1, len(levels) + 1):
            if place == len(levels) or levels[place] != levels[start]:
                left, width = _LEFT + start * cell_w, (place - start) * cell_w
                paths[levels[start]].append(f"M{left:.1f} {top:.1f}h{width:.1f}v{cell_h:.1f}h{-width:.1f}z")
                start = place
    parts = [
        f'<path class="heat{level}" d="{"".join(cells)}"/>' for level, cells in enumerate(paths) if cells and level
    ]
    every = math.ceil(len(rows) / (height / 13))
    parts += [
        _text(_LEFT - 6, _TOP + (number + 0.5) * cell_h + 4, rows[number], "end")
        for number in range(0, len(rows), every)
    ]
    axis = Axis("time s", lambda value: f"{value:g}", low=0.0, high=max(times, default=1.0))
    across = _Scale(axis, [], _LEFT, WIDTH - _RIGHT)
    parts += [_text(across.at(tick), _TOP + height + 16, axis.show(tick), "middle") for tick in across.ticks]
    parts.append(_text((_LEFT + WIDTH - _RIGHT) / 2, _TOP + height + 34, axis.title, "middle", "title"))
    parts.append(_text(WIDTH - _RIGHT, _TOP + height + 34, f"darkest: {most:g}", "end"))
    return _svg(about, int(_TOP + height + 42), parts, "")


def bars(about: str, groups: Sequence[tuple[str, Sequence[Bar]]]) -> str:
    """Return bars from left to right, group below group."""
    most = max((bar.value for _, group in groups for bar in group), default=0.0) or 1.0
    left, right = 110, 70
    parts, top = [], float(_TOP)
    for name, group in groups:
        height = _ROW * len(group)
        parts.append(_text(left - 8, top + height / 2 + 4, name, "end"))
        for bar in group:
            width = max(1.0, bar.value / most * (WIDTH - left - right))
            about_bar = escape(f"{name}, {bar.name}: {bar.shown}" if bar.name else f"{name}: {bar.shown}")
            parts.append(
                f'<rect class="fill c{bar.colour % COLOURS}" x="{left}" y="{top + 1:.1f}" width="{width:.1f}" '
                f'height="{_ROW - 2}" rx="2"><title>{about_bar}</title></rect>'
            )
            parts.append(_text(left + width + 6, top + _ROW - 4, bar.shown, "start"))
            top += _ROW
        top += _GAP
    return _svg(about, int(top + 6), parts, "")


class _Scale:
    """From values of an axis to places on the paper."""

    def __init__(self, axis: Axis, values: Sequence[float], start: float, end: float) -> None:
        finite = [value for value in values if math.isfinite(value) and (value > 0 or not axis.is_log)]
        low = axis.low if axis.low is not None else min(finite, default=1.0 if axis.is_log else 0.0)
        high = axis.high if axis.high is not None else max(finite, default=1.0)
        if axis.is_log:
            low = max(low, high / 1e5)
        if high <= low:
            high = low * 2 if low > 0 else low + 1.0
        self._is_log, self._start, self._end = axis.is_log, start, end
        steps = axis.ticks or (
            _log_ticks(low, high) if axis.is_log else _ticks(low, high, 1.0 if axis.is_whole else 0.0)
        )
        if not axis.is_log and axis.high is None:
            high = max(high, steps[-1])
        self._low, self._high = self._of(low), self._of(high)
        self.ticks = [tick for tick in steps if low * 0.9999 <= tick <= high * 1.0001]

    def _of(self, value: float) -> float:
        return math.log10(value) if self._is_log else value

    def at(self, value: float) -> float:
        if self._is_log and value <= 0:
            return self._start
        share = (self._of(value) - self._low) / (self._high - self._low)
        return self._start + min(1.0, max(0.0, share)) * (self._end - self._start)


def _ticks(low: float, high: float, least: float = 0.0) -> list[float]:
    """Five or so round numbers from at or above `low` to at or above `high`, no closer than `least`."""
    rough = max((high - low) / 5, least)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    few = [10.0**decade for decade in decades]
    more = [factor * 10.0**decade for decade in decades for factor in (1, 2, 5)]
    inside = [tick for tick in more if low <= tick <= high]
    if len(inside) < 2:
        return _ticks(low, high)
    return inside if len(inside) <= 7 else [tick for tick in few if low <= tick <= high]


def _grid(x: Axis, y: Axis, across: _Scale, up: _Scale) -> str:
    parts = []
    for tick in up.ticks:
        at = up.at(tick)
        parts.append(f'<path class="grid" d="M{_LEFT} {at:.1f}H{WIDTH - _RIGHT}"/>')
        parts.append(_text(_LEFT - 6, at + 4, y.show(tick), "end"))
    for tick in across.ticks:
        at = across.at(tick)
        parts.append(f'<path class="grid" d="M{at:.1f} {_TOP}V{HEIGHT - _BOTTOM}"/>')
        parts.append(_text(at, HEIGHT - _BOTTOM + 16, x.show(tick), "middle"))
    parts.append(_text((_LEFT + WIDTH - _RIGHT) / 2, HEIGHT - 8, x.title, "middle", "title"))
    middle = (_TOP + HEIGHT - _BOTTOM) / 2
    turned = f'transform="rotate(-90 12 {middle:.0f})"'
    parts.append(f'<text class="title" x="12" y="{middle:.0f}" text-anchor="middle" {turned}>{escape(y.title)}</text>')
    return "".join(parts)


def _drawn(line: Line, across: _Scale, up: _Scale) -> str:
    places = [
        (across.at(x), up.at(y)) for x, y in zip(line.xs, line.ys, strict=True) if math.isfinite(x) and math.isfinite(y)
    ]
    if not places:
        return ""
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    colour = f"c{line.colour % COLOURS}" + (" dashed" if line.colour >= COLOURS else "")
    parts = []
    if line.style == "area":
        floor = HEIGHT - _BOTTOM
        parts.append(
            f'<path class="area {colour}" d="{path}L{places[-1][0]:.1f} {floor}L{places[0][0]:.1f} {floor}z"/>'
        )
    parts.append(f'<path class="line {colour} {"thin" if line.style == "thin" else ""}" d="{path}"/>')
    for x, y, half in zip(line.xs, line.ys, line.halves, strict=False):
        if math.isfinite(half) and math.isfinite(y):
            bar = f"M{across.at(x):.1f} {up.at(y - half):.1f}V{up.at(y + half):.1f}"
            parts.append(f'<path class="line {colour} spread" d="{bar}"/>')
    if line.style == "dots":
        parts += [f'<circle class="fill {colour}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in places]
    for (x, y), label in zip(places, line.labels, strict=False):
        is_left = x > WIDTH - 60
        parts.append(_text(x - 7 if is_left else x + 7, max(y - 6, 14), label, "end" if is_left else "start"))
    return "".join(parts)


def _readable(drawn: Sequence[Line], x: Axis, y: Axis, across: _Scale, up: _Scale, hover: str) -> str:
    """Return what the page reads under the pointer: places along one axis, and of each line the place on the other."""
    along, other = (across, up) if hover == "x" else (up, across)
    shared = max(drawn, key=lambda line: len(line.xs))
    steps = shared.xs if hover == "x" else shared.ys
    named, axis = (x, y) if hover == "x" else (y, x)
    data = {
        "along": hover,
        "at": [round(along.at(value), 1) for value in steps],
        "of": [f"{named.title} {named.show(value)}" for value in steps],
        "lines": [
            {
                "name": line.name,
                "colour": line.colour % COLOURS,
                "at": [_or_none(value, round(other.at(value), 1)) for value in (line.ys if hover == "x" else line.xs)],
                "shown": [axis.show(value) for value in (line.ys if hover == "x" else line.xs)],
            }
            for line in drawn
        ],
    }
    return f' data-read="{escape(json.dumps(data, separators=(",", ":")))}"'


def _or_none(value: float, place: float) -> float | None:
    return place if math.isfinite(value) else None


def _level(value: float, most: float) -> int:
    """0 for nothing, 1 to _LEVELS by size, one more where nothing is known."""
    if value != value:
        return _LEVELS + 1
    return min(_LEVELS, math.ceil(value / most * _LEVELS)) if value > 0 else 0


def _text(x: float, y: float, text: str, anchor: str, class_: str = "") -> str:
    named = f' class="{class_}"' if class_ else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{named}>{escape(text)}</text>'


def _svg(about: str, height: int, parts: Sequence[str], data: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(about)}"{data}>{"".join(parts)}</svg>'
