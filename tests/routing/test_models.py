from collections import Counter
from typing import NamedTuple

import numpy as np

from shoal.pool import ServedModel
from shoal.routing.models import ModelTable, Resolved


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
    assert not made.is_known("lama")
    assert "llama" in made.near("lama")


def test_an_engine_that_lists_nothing_serves_every_name() -> None:
    made = table()
    made.update("c", [])
    assert made.is_known("anything")
    assert [made.is_served_by("anything", name) for name in "abc"] == [False, False, True]
    made.remove("c")
    assert not made.is_known("anything")


def test_a_removed_endpoint_takes_its_names_along() -> None:
    made = table()
    made.remove("a")
    assert not made.is_known("sql")
    assert made.names_at("a") == []
    assert made.names_at("b") == ["llama"]
