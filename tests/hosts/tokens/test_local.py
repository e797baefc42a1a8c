import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from shoal.hosts.tokens.local import LocalTokenizer
from shoal.hosts.tokens.prompts import NoTokens, read_prompt
from shoal.kernel import ConfigError
from shoal.pool import Api
from tests.hosts.tokens.tiny_model import CHATML, tokenizer, write

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "é": "<"}}}

# As vLLM's models write it.
TOOL_WRITTEN_OUT = {
    "type": "function",
    "function": {"name": "look", "description": None, "parameters": {"type": "object", "é": "<"}},
}


def local(path: Path, **config: Any) -> LocalTokenizer:
    return LocalTokenizer(write(path, **config), 1 << 20, 7)


def ids(made: LocalTokenizer, api: Api, **body: Any) -> list[list[int]]:
    prompt = read_prompt(api, json.dumps({"model": "m", **body}).encode())
    return [np.frombuffer(each, "<u4").tolist() for each in made.tokenise(prompt)]


def text(made: LocalTokenizer, path: Path, **body: Any) -> str:
    (found,) = ids(made, Api.CHAT, **body)
    plain = Tokenizer.from_file(str(path / "tokenizer.json"))
    decoded: str = plain.decode(found, skip_special_tokens=False)
    return decoded


def refused(made: LocalTokenizer, api: Api = Api.CHAT, **body: Any) -> str:
    with pytest.raises(NoTokens) as raised:
        ids(made, api, **body)
    return raised.value.reason


def says(content: Any, role: str = "user", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def test_a_whole_chat_is_rendered_system_history_and_tools(tmp_path: Path) -> None:
    made = local(tmp_path)
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "é"}'}}
    messages = [
        says("be kind", "system"),
        says("hello"),
        says(None, "assistant", tool_calls=[call]),
        says([{"type": "text", "text": "found"}], "tool", tool_call_id="c1"),
        says("and?"),
    ]
    assert text(made, tmp_path, messages=messages, tools=[TOOL]) == (
        '<|im_start|>system{"type": "function", "function": {"name": "look", "description": null, '
        '"parameters": {"type": "object", "é": "<"}}}<|im_end|>\n'
        "<|im_start|>system\nbe kind<|im_end|>\n"
        "<|im_start|>user\nhello<|im_end|>\n"
        '<|im_start|>assistant\nlook({"at": "é"})<|im_end|>\n'
        "<|im_start|>tool\nfound<|im_end|>\n"
        "<|im_start|>user\nand?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_content_parts_become_one_text_where_the_template_takes_no_parts(tmp_path: Path) -> None:
    made = local(tmp_path)
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": ""}, "two", {"type": "input_text", "text": "3"}]
    assert "user\none\ntwo\n3<|im_end|>" in text(made, tmp_path, messages=[says(parts)])


def test_a_tool_call_is_written_out_whole_in_the_order_of_vllm(tmp_path: Path) -> None:
    made = local(tmp_path, chat_template="{% for m in messages %}{{ m.tool_calls | tojson }}{% endfor %}")
    function = {"name": "look", "strict": True, "arguments": "{}"}
    call = {"index": 0, "type": "function", "function": function, "id": "c"}
    assert text(made, tmp_path, messages=[says(None, "assistant", tool_calls=[call])]).endswith(
        '[{"id": "c", "function": {"arguments": {}, "name": "look", "strict": true}, "type": "function", "index": 0}]'
    )


DEVELOPERS = "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ m.tools }};{% endfor %}"


def test_developers_speak_as_the_system_where_the_template_does_not_know_them(tmp_path: Path) -> None:
    made = local(tmp_path, chat_template=DEVELOPERS)
    alone = [says("d", "developer", tools=[TOOL]), says("u")]
    assert text(made, tmp_path, messages=alone).endswith("system:d;user:u;")
    several = [says("s", "system"), says("d", "developer"), says("u"), says("", "developer"), says("e", "developer")]
    assert text(made, tmp_path, messages=several).endswith("system:s\n\nd\n\ne;user:u;")
    late = [says("u"), says("s", "system")]
    assert text(made, tmp_path, messages=late).endswith("user:u;system:s;")


def test_a_template_that_knows_developers_gets_them(tmp_path: Path) -> None:
    made = local(tmp_path, chat_template="{# 'developer' #}" + DEVELOPERS)
    assert text(made, tmp_path, messages=[says("u"), says("d", "developer")]).endswith("user:u;developer:dNone;")


PARTS = (
    "{% set loop_messages = messages %}{% for m in loop_messages %}{{ m['role'] }}:"
    "{% for part in m['content'] %}[{{ part.text }}]{% endfor %}{% endfor %}"
)


def test_a_template_that_loops_over_content_gets_parts(tmp_path: Path) -> None:
    made = local(tmp_path, chat_template=PARTS)
    messages = [says("a"), says(["b", {"type": "text", "text": ""}]), says(["x", "y"], "tool")]
    assert text(made, tmp_path, messages=messages) == "user:[a]user:[b][]tool:[x][][\n][y]".replace(
        "[x][][\n][y]", "[]" * 3
    )


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ eos_token }}{{ unk_token }}", "<|bos|><|im_end|>"),
        ("{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}{{ m.role }}{% endfor %}", "system"),
        ("  {%- if true %}\n    x\n    {%- endif %}\n", "    x"),
        ("{{ [1, {'a': '<é>'}] | tojson }}", '[1, {"a": "<é>"}]'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=2) }}", '{\n  "b": 1,\n  "a": 2\n}'),
        ("{% generation %}x{% endgeneration %}", "x"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ documents[0].title }}", "paper"),
        ("{{ enable_thinking }}", "False"),
        ("{{ messages[0].content.__class__ }}", ""),
        ("{{ messages.append(1) }}", "refused"),
        ("{{ raise_exception('no') }}", "refused"),
    ],
)
def test_templates_are_rendered_as_transformers_does(tmp_path: Path, source: str, expected: str) -> None:
    made = local(tmp_path, chat_template=source)
    body = {
        "messages": [says("s", "system"), says("u")],
        "documents": [{"title": "paper"}],
        "chat_template_kwargs": {"enable_thinking": False, "other": 1},
    }
    if expected == "refused":
        assert refused(made, **body) == "refused"
    else:
        assert text(made, tmp_path, **body) == expected


def test_the_last_message_can_be_continued(tmp_path: Path) -> None:
    made = local(tmp_path)
    messages = [says("hi"), says("I think ", "assistant")]
    whole = text(made, tmp_path, messages=messages, continue_final_message=True, add_generation_prompt=False)
    assert whole.endswith("<|im_start|>assistant\nI think ")
    assert refused(made, messages=messages, continue_final_message=True) == "refused"


def test_a_template_of_its_own_file_and_one_for_tools_are_found(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    made = local(tmp_path / "named", chat_template=named)
    assert text(made, tmp_path / "named", messages=[says("x")]) == "plain"
    assert text(made, tmp_path / "named", messages=[says("x")], tools=[TOOL]) == "tools"
    path = write(tmp_path / "file")
    (path / "chat_template.jinja").write_text("own")
    assert text(LocalTokenizer(path, 1 << 20, 7), path, messages=[says("x")]) == "own"


def test_texts_get_the_tokenizers_special_tokens_and_chats_do_not(tmp_path: Path) -> None:
    made = local(tmp_path)
    plain = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    bos = plain.token_to_id("<|bos|>")
    assert ids(made, Api.COMPLETIONS, prompt="the fox") == [plain.encode("the fox").ids]
    assert ids(made, Api.COMPLETIONS, prompt=["a", "b"]) == [plain.encode("a").ids, plain.encode("b").ids]
    without = plain.encode("the fox", add_special_tokens=False).ids
    assert ids(made, Api.COMPLETIONS, prompt="the fox", add_special_tokens=False) == [without]
    (chat,) = ids(made, Api.CHAT, messages=[says("x")])
    assert bos not in chat
    (with_bos,) = ids(made, Api.CHAT, messages=[says("x")], add_special_tokens=True)
    assert with_bos == [bos, *chat]


def test_token_ids_are_taken_as_they_are(tmp_path: Path) -> None:
    made = local(tmp_path)
    assert ids(made, Api.COMPLETIONS, prompt=[1, 2, 3]) == [[1, 2, 3]]
    assert ids(made, Api.COMPLETIONS, prompt=[[1], [2, 3]]) == [[1], [2, 3]]
    assert ids(made, Api.GENERATE, token_ids=[5, 6]) == [[5, 6]]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"messages": [says([{"type": "image_url", "image_url": {"url": "x"}}])]}, "media"),
        ({"messages": [says("x")], "chat_template": "{{ 1 }}"}, "unsupported"),
        ({"messages": [says("x")], "truncate_prompt_tokens": 5}, "unsupported"),
        ({"messages": [says("x")], "tools": [TOOL], "tool_choice": "none"}, "unsupported"),
        ({"messages": [says("x")], "tools": [{"type": "custom"}]}, "unreadable"),
        ({"messages": [says("x")], "chat_template_kwargs": {"tools": []}}, "unsupported"),
        ({"messages": "x"}, "unreadable"),
        ({"messages": [says(3)]}, "unreadable"),
        ({"messages": [says("x-anthropic-billing-header: 1", "system")]}, "unsupported"),
        ({}, "unreadable"),
    ],
)
def test_what_is_not_known_exactly_is_left_to_the_estimate(tmp_path: Path, body: Any, reason: str) -> None:
    assert refused(local(tmp_path), **body) == reason


@pytest.mark.parametrize(
    "escape",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__ }}",
        "{{ messages[0].__class__ }}",
        "{{ ''.format.__globals__ }}",
        "{{ '{0.__class__}'.format('') }}",
        "{{ raise_exception.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{% set _ = messages.append(messages[0]) %}",
        "{{ range(1000000000) | list }}",
    ],
)
def test_a_template_stays_in_its_sandbox(tmp_path: Path, escape: str) -> None:
    plain = "{{ messages[0].content }}"
    prompt = read_prompt(Api.CHAT, json.dumps({"messages": [says("x")]}).encode())
    harmless = local(tmp_path / "plain", chat_template=plain).tokenise(prompt)
    try:
        found = local(tmp_path / "hostile", chat_template=plain + escape).tokenise(prompt)
    except NoTokens:
        found = harmless
    # What is out of reach is refused, or is nothing.
    assert found == harmless
    assert prompt.body["messages"] == [says("x")]


def test_apis_that_engines_render_in_their_own_way_are_left_to_the_estimate(tmp_path: Path) -> None:
    made = local(tmp_path)
    assert refused(made, Api.RESPONSES, input="x") == "unsupported"
    assert refused(made, Api.MESSAGES, messages=[says("x")]) == "unsupported"
    assert refused(made, Api.EMBEDDINGS, input="x") == "unsupported"
    path = write(tmp_path / "harmony")
    (path / "config.json").write_text('{"model_type": "gpt_oss"}')
    assert refused(LocalTokenizer(path, 1 << 20, 7), messages=[says("x")]) == "no-template"


def test_a_class_with_flags_gets_its_special_tokens_from_the_configuration(tmp_path: Path) -> None:
    flags = {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True, "add_eos_token": True}
    made = local(tmp_path, made=tokenizer(), **flags)
    plain = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    bos, eos = plain.token_to_id("<|bos|>"), plain.token_to_id("<|im_end|>")
    assert ids(made, Api.COMPLETIONS, prompt="a") == [[bos, *plain.encode("a", add_special_tokens=False).ids, eos]]


def test_added_tokens_that_only_the_configuration_names_are_added(tmp_path: Path) -> None:
    listed = {"900": {"content": "<tool>", "special": True}}
    made = local(tmp_path, added_tokens_decoder=listed, chat_template=CHATML)
    (found,) = ids(made, Api.COMPLETIONS, prompt="<tool>", add_special_tokens=False)
    assert len(found) == 1


def test_a_directory_that_cannot_be_used_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        LocalTokenizer(tmp_path / "none", 1 << 20, 7)
    write(tmp_path / "bad")
    (tmp_path / "bad" / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="not a tokenizer"):
        LocalTokenizer(tmp_path / "bad", 1 << 20, 7)
    with pytest.raises(ConfigError, match="not valid Jinja"):
        local(tmp_path / "jinja", chat_template="{% for %}")


@pytest.mark.parametrize("is_llama", [False, True])
@pytest.mark.parametrize("template", [CHATML, PARTS])
def test_transformers_gives_the_same(tmp_path: Path, template: str, is_llama: bool) -> None:
    transformers = pytest.importorskip("transformers")
    kind = "LlamaTokenizerFast" if is_llama else "PreTrainedTokenizerFast"
    path = write(tmp_path, tokenizer_class=kind, chat_template=template, eos_token="<|im_end|>")
    made = LocalTokenizer(path, 1 << 20, 7)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(path)
    messages = [says("be kind", "system"), says("the fox <|im_end|> é 你"), says("hm  ", "assistant")]
    shown = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in messages]
    for flags in (
        {"add_generation_prompt": True},
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
        {"add_generation_prompt": True, "tools": [TOOL_WRITTEN_OUT]},
    ):
        given = shown if template is PARTS else messages
        expected = theirs.apply_chat_template(given, tokenize=True, return_dict=False, **flags)
        asked = {**flags, "tools": [TOOL]} if "tools" in flags else flags
        assert ids(made, Api.CHAT, messages=messages, **asked) == [list(expected)]
    if not is_llama:
        assert ids(made, Api.COMPLETIONS, prompt="the fox") == [theirs("the fox")["input_ids"]]
