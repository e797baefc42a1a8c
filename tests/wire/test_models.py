import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.kernel import InvalidInput
from shoal.pool import ServedModel
from shoal.wire import near_names, parse_models, render_models

VLLM = (
    b'{"object":"list","data":[{"id":"tiny","object":"model","created":1796035542,"owned_by":"vllm","root":"/models/tiny",'
    b'"parent":null,"max_model_len":2048,"permission":[{"id":"modelperm-9cd95511ac14206f","object":"model_permission"}]},'
    b'{"id":"sql-lora","object":"model","root":"/loras/sql","parent":"tiny","max_model_len":null}]}'
)


def test_a_vllm_list_has_base_models_and_adapters() -> None:
    assert parse_models(VLLM) == (
        ServedModel(id="tiny", root="/models/tiny", max_model_len=2048),
        ServedModel(id="sql-lora", root="/loras/sql", parent="tiny"),
    )


def test_a_plain_openai_list_is_enough() -> None:
    assert parse_models(b'{"data":[{"id":"a"},{"id":"a","root":"x"},{"id":5},{"root":"y"}]}') == (ServedModel(id="a"),)


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"data":5}', b'{"data":["a"]}', b"<html>", b"[" * 100_000])
def test_what_is_no_model_list_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidInput, match="/v1/models"):
        parse_models(body)


def test_the_merged_list_shows_each_name_once_with_its_largest_context() -> None:
    small, large = ServedModel(id="b", max_model_len=10), ServedModel(id="b", max_model_len=20, root="r")
    listed = json.loads(render_models([small, large, ServedModel(id="a", parent="b")], created=7))
    assert listed["object"] == "list"
    assert [(entry["id"], entry["max_model_len"], entry["parent"]) for entry in listed["data"]] == [
        ("a", None, "b"),
        ("b", 20, None),
    ]
    assert all(entry["object"] == "model" and entry["created"] == 7 for entry in listed["data"])


@given(st.lists(st.builds(ServedModel, id=st.text(min_size=1), parent=st.text(), max_model_len=st.integers(0, 10))))
def test_a_rendered_list_reads_back(models: list[ServedModel]) -> None:
    again = parse_models(render_models(models))
    assert {model.id for model in again} == {model.id for model in models}


def test_near_names_forgive_case_organisation_and_typos() -> None:
    known = ["meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen3-8B", "sql-lora"]
    assert near_names("llama-3.1-8b-instruct", known)[0] == known[0]
    assert near_names("Qwen3-8b", known)[0] == known[1]
    assert near_names("qwen/qwen3-8B-Instruct", known)[0] == known[1]
    assert near_names("sqllora", known) == ("sql-lora",)
    assert near_names("gpt-4o", known) == ()
    assert near_names("", known) == ()


def test_near_names_are_few_and_bounded() -> None:
    known = [f"model-{number:04d}" for number in range(5000)]
    assert near_names("model-0003" * 10_000, known[:3]) is not None
    assert near_names("model-0003", known, limit=2)[0] == "model-0003"
    assert len(near_names("model-0003", known, limit=2)) == 2
