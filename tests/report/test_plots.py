"""Plots: values land where they belong, ticks are round, and what is drawn is sound SVG."""

import json
import math
import re
from html import unescape
from xml.etree import ElementTree

import pytest

from shoal.report.plots import Axis, Bar, Line, bars, heatmap, lines


def plain(value: float) -> str:
    return f"{value:g}"


def texts(svg: str) -> list[str]:
    return [each.text or "" for each in ElementTree.fromstring(svg).iter("text")]


def places(path: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"([\d.]+) ([\d.]+)", path)]


def drawn(svg: str, class_: str) -> list[str]:
    return [e.get("d", "") for e in ElementTree.fromstring(svg).iter("path") if class_ in e.get("class", "").split()]


def test_a_line_goes_from_corner_to_corner_and_ticks_are_round() -> None:
    svg = lines("about", [Line("a", [0, 50, 100], [0, 5, 10], 0)], Axis("x", plain), Axis("y", plain))
    (first, middle, last) = places(drawn(svg, "line")[0])
    assert first[0] < middle[0] < last[0]
    assert middle[0] == pytest.approx((first[0] + last[0]) / 2)
    assert first[1] > middle[1] > last[1]
    assert {"0", "20", "100", "10", "x", "y"} <= set(texts(svg))


def test_decades_are_equally_far_on_a_log_axis_and_a_narrow_one_has_ticks_too() -> None:
    wide = lines("a", [Line("a", [1, 10, 100], [0, 1, 2], 0)], Axis("x", plain, is_log=True), Axis("y", plain))
    one, ten, hundred = (x for x, _ in places(drawn(wide, "line")[0]))
    assert hundred - ten == pytest.approx(ten - one, abs=0.2)
    narrow = lines("a", [Line("a", [23.0, 27.0], [0, 1], 0)], Axis("x", plain, is_log=True), Axis("y", plain))
    assert {"24", "25", "26"} <= set(texts(narrow))


def test_counts_have_no_ticks_between_whole_numbers() -> None:
    svg = lines("a", [Line("a", [0, 100], [0, 1.2], 0)], Axis("", plain), Axis("", plain, low=0.0, is_whole=True))
    assert [text for text in texts(svg) if "." in text] == []


def test_a_bar_through_a_point_is_as_high_as_its_interval() -> None:
    line = Line("a", [0, 1], [5, 6], 0, "dots", halves=[2.0, math.nan])
    svg = lines("a", [line], Axis("", plain), Axis("", plain, low=0.0, high=10.0))
    (bar,) = drawn(svg, "spread")
    _, low, high = (float(number) for number in re.findall(r"[\d.]+", bar))
    (point, _) = places(drawn(svg, "line")[0])
    assert low - point[1] == pytest.approx(point[1] - high, abs=0.2)
    assert low > point[1] > high


def test_gaps_and_empty_lines_are_left_out() -> None:
    svg = lines(
        "a", [Line("a", [0, 1, 2], [0, math.nan, 2], 0), Line("b", [], [], 1)], Axis("", plain), Axis("", plain)
    )
    assert [len(places(path)) for path in drawn(svg, "line")] == [2]
    assert lines("a", [], Axis("", plain), Axis("", plain)).startswith("<svg")


def test_what_the_pointer_reads_is_what_is_drawn() -> None:
    drawn_ = [Line("a<", [0, 1], [5, math.nan], 0), Line("b", [0, 1], [6, 7], 9)]
    svg = lines("a", drawn_, Axis("time", plain), Axis("y", plain))
    read = json.loads(ElementTree.fromstring(svg).get("data-read") or "")
    assert read["of"] == ["time 0", "time 1"]
    assert [line["shown"][0] for line in read["lines"]] == ["5", "6"]
    assert read["lines"][0]["at"][1] is None
    assert read["lines"][0]["name"] == "a<"
    assert "a<" not in unescape(svg).split("data-read")[0]


def test_a_heatmap_joins_equal_neighbours_and_shows_what_is_unknown() -> None:
    svg = heatmap("a", ["e0", "e1"], [0.0, 1.0, 2.0], [[4.0, 4.0, 0.0], [math.nan, 2.0, 2.0]])
    assert len(drawn(svg, "heat8")) == 1
    assert drawn(svg, "heat8")[0].count("M") == 1
    assert drawn(svg, "heat4")[0].count("M") == 1
    assert drawn(svg, "heat9")
    assert {"e0", "e1", "darkest: 4"} <= set(texts(svg))


def test_bars_are_as_long_as_their_values() -> None:
    svg = bars("a", [("x", [Bar("p", 10.0, 0, "ten"), Bar("q", 5.0, 1, "five")]), ("<y>", [Bar("p", 0.0, 0, "none")])])
    widths = [float(each.get("width", "0")) for each in ElementTree.fromstring(svg).iter("rect")]
    assert widths[0] == pytest.approx(2 * widths[1], abs=0.2)
    assert {"ten", "five", "<y>"} <= set(texts(svg))
