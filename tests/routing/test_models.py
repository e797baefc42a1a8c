from collections import Counter
from typing import NamedTuple

import numpy as np

from shoal.pool import ServedModel
from shoal.routing.models import GONE_S, MAX_GONE, ModelTable, Resolved


class Target(NamedTuple):
    model: str
    weight: int = 1


def table() -> ModelTable:
    made = ModelTable()
    made.update(
        "a", [ServedModel(id="llama", root="meta/llama-3"), ServedModel(id="sql", parent="llama", root="/lora/sql")]
    )
    made.update("b", [ServedModel(id="llama", root="meta/llama-3", max_model_len=8192)])
    return made


CHANCE = np.random.default_rng(1)


def test_an_adapter_is_served_only_where_it_is_loaded() -> None:
    made = table()
    assert [made.is_served_by("sql", name) for name in "ab"] == [True, False]
    assert [made.is_served_by("llama", name) for name in "ab"] == [True, True]


def test_a_base_models_own_name_stands_for_the_name_it_is_served_under() -> None:
    assert table().resolve("meta/llama-3", "", CHANCE) == Resolved("llama", True)
    assert table().resolve("llama", "", CHANCE) == Resolved("llama", False)


def test_an_alias_leads_through_a_base_models_name() -> None:
    made = table()
    made.configure({"gpt-4": "meta/llama-3"}, {})
    assert made.resolve("gpt-4", "", CHANCE) == Resolved("llama", True)
    assert [model.id for model in made.listed()] == ["gpt-4", "llama", "sql"]


def test_weighted_rewrites_split_the_traffic_by_their_weights() -> None:
    made = table()
    made.configure({}, {"llama": [Target("llama", 3), Target("sql", 1)]})
    chance = np.random.default_rng(2)
    split = Counter(made.resolve("llama", "", chance).target for _ in range(2000))
    assert 0.70 < split["llama"] / 2000 < 0.80


def test_a_generic_rewrite_applies_where_no_exact_one_does() -> None:
    made = table()
    made.configure({}, {"": [Target("llama")], "sql": [Target("sql")]})
    assert made.resolve("whatever", "", CHANCE).target == "llama"
    assert made.resolve("sql", "", CHANCE).target == "sql"


def test_an_unknown_name_is_known_as_such_and_near_names_are_offered() -> None:
    made = table()
    assert not made.is_known("lama", 0.0)
    assert "llama" in made.near("lama")


def test_an_engine_that_lists_nothing_serves_every_name() -> None:
    made = table()
    made.update("c", [])
    assert made.is_known("anything", 0.0)
    assert [made.is_served_by("anything", name) for name in "abc"] == [False, False, True]
    made.remove("c")
    assert not made.is_known("anything", 0.0)


def test_a_removed_endpoint_takes_its_names_along() -> None:
    made = table()
    made.remove("a")
    assert not made.is_known("sql", 0.0)
    assert made.names_at("a") == []
    assert made.names_at("b") == ["llama"]


def test_a_model_whose_endpoints_have_all_left_is_known_for_a_day() -> None:
    made = table()
    made.update("c", [ServedModel(id="other")])
    made.left("a", 10.0)
    assert not made.is_known("nobody", 10.0)
    made.left("b", 20.0)
    for name in ("llama", "sql"):
        assert made.is_known(name, 30.0)
        assert not made.is_known(name, 20.0 + GONE_S)
    assert made.resolve("meta/llama-3", "", CHANCE) == Resolved("llama", True)
    assert [model.id for model in made.listed()] == ["other"]


def test_what_an_endpoint_that_stays_lists_no_more_is_unknown_at_once() -> None:
    made = table()
    made.update("a", [ServedModel(id="llama")])
    assert not made.is_known("sql", 0.0)


def test_names_that_are_gone_are_bounded() -> None:
    made = table()
    for number in range(MAX_GONE + 5):
        made.update("x", [ServedModel(id=f"m{number}")])
        made.left("x", 1.0)
    assert not made.is_known("m4", 1.0)
    assert made.is_known("m5", 1.0)
