"""The dashboard that comes with Shoal asks only for what is exported, by labels that are there."""

import json
import re
from pathlib import Path
from typing import Any

from shoal.kernel import Chance
from shoal.measures import Fold
from shoal.measures.families import Counter, Gauge, Histogram
from shoal.routing import Router
from shoal.routing.config import load

DASHBOARD: dict[str, Any] = json.loads((Path(__file__).parents[2] / "deploy/grafana/shoal.json").read_text())
WORDS = re.compile(r"\b(?:shoal|llm_d_epp)_\w+")


def exported() -> dict[str, tuple[str, ...]]:
    """Every series that a picker exports -> its labels."""
    fold, found = Fold(), {}
    names = {family.name for family in fold.families(Router(load("", "test"), Chance(1)).status())}
    for metric in (*vars(fold).values(), *vars(fold._latency).values()):
        if not isinstance(metric, Counter | Gauge | Histogram):
            continue
        assert metric.name in names
        ends = {Counter: ("_total",), Gauge: ("",), Histogram: ("_bucket", "_sum", "_count")}[type(metric)]
        found.update({metric.name + end: metric.labels for end in ends})
    return found


def expressions() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def test_every_metric_of_the_dashboard_is_exported() -> None:
    assert expressions()
    known = exported()
    for expression in expressions():
        asked = WORDS.findall(expression)
        assert asked
        assert [name for name in asked if name not in known] == []


def test_every_label_that_it_groups_by_is_there() -> None:
    known = exported()
    for expression in expressions():
        labels = {label for name in WORDS.findall(expression) for label in (*known[name], "le")}
        for group in re.findall(r"by \(([^)]*)\)", expression):
            assert {each.strip() for each in group.split(",")} <= labels, expression


def test_every_panel_has_a_place_of_its_own() -> None:
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in DASHBOARD["panels"]]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(places)


def test_shares_and_waits_of_tenants_are_drawn() -> None:
    by_tenant = [each for each in expressions() if re.search(r"by \([^)]*fairness_id", each)]
    assert any("shoal_tenant_tokens_total" in each and 'kind="cached"' in each for each in by_tenant)
    assert any("request_queue_duration_seconds_bucket" in each for each in by_tenant)
