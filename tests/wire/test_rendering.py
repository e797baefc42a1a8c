"""What stands in the canonical bytes of a prompt, seen through `decode`."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from shoal.wire import decode

CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"


def prompt(document: dict[str, Any], path: str = CHAT) -> bytes:
    (only,) = decode("r", "POST", path, {}, json.dumps(document).encode()).prompts
    return only


def chat(*messages: dict[str, Any], **fields: Any) -> bytes:
    return prompt({"messages": list(messages), **fields})


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


_TEXT = st.text(max_size=20)
_PART = st.one_of(
    st.builds(lambda text: {"type": "text", "text": text}, _TEXT),
    st.builds(lambda url: {"type": "image_url", "image_url": {"url": url}}, _TEXT),
    st.builds(lambda data: {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}, _TEXT),
)
_CALL = st.builds(
    lambda name, a: {"id": "c", "type": "function", "function": {"name": name, "arguments": a}}, _TEXT, _TEXT
)
_MESSAGE = st.one_of(
    st.builds(
        lambda role, text: {"role": role, "content": text}, st.sampled_from(("system", "user", "assistant")), _TEXT
    ),
    st.builds(lambda parts: {"role": "user", "content": parts}, st.lists(_PART, max_size=3)),
    st.builds(
        lambda calls, text: {"role": "assistant", "content": text, "tool_calls": calls},
        st.lists(_CALL, min_size=1, max_size=2),
        st.none() | _TEXT,
    ),
    st.builds(lambda text: {"role": "tool", "tool_call_id": "c", "content": text}, _TEXT),
)


@given(st.lists(_MESSAGE, max_size=6), st.lists(_MESSAGE, max_size=3), st.booleans())
def test_a_growing_chat_only_appends(history: list[Any], more: list[Any], has_tools: bool) -> None:
    fields = {"tools": [{"type": "function", "function": {"name": "f"}}]} if has_tools else {}
    assert chat(*history, *more, **fields).startswith(chat(*history, **fields))


_BLOCK = st.one_of(
    st.builds(lambda text: {"type": "text", "text": text}, _TEXT),
    st.builds(lambda text: {"type": "thinking", "thinking": text, "signature": "s"}, _TEXT),
    st.builds(lambda text: {"type": "tool_use", "id": "t", "name": "f", "input": {"a": text}}, _TEXT),
    st.builds(lambda text: {"type": "tool_result", "tool_use_id": "t", "content": text}, _TEXT),
    st.builds(
        lambda data: {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}, _TEXT
    ),
)
_TURN = st.builds(
    lambda role, content: {"role": role, "content": content},
    st.sampled_from(("user", "assistant")),
    _TEXT | st.lists(_BLOCK, max_size=3),
)


@given(st.lists(_TURN, max_size=5), st.lists(_TURN, max_size=3), _TEXT)
def test_a_growing_anthropic_conversation_only_appends(history: list[Any], more: list[Any], system: str) -> None:
    def one(turns: list[Any]) -> bytes:
        return prompt({"system": system, "messages": turns, "max_tokens": 1}, MESSAGES)

    assert one(history + more).startswith(one(history))


_ITEM = st.one_of(
    st.builds(lambda text: {"role": "user", "content": text}, _TEXT),
    st.builds(
        lambda text: {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}, _TEXT
    ),
    st.builds(lambda text: {"type": "function_call", "call_id": "c", "name": "f", "arguments": text}, _TEXT),
    st.builds(lambda text: {"type": "function_call_output", "call_id": "c", "output": text}, _TEXT),
    st.builds(
        lambda text: {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": text}]}, _TEXT
    ),
)


@given(st.lists(_ITEM, max_size=5), st.lists(_ITEM, max_size=3), _TEXT)
def test_a_growing_responses_input_only_appends(history: list[Any], more: list[Any], instructions: str) -> None:
    def one(items: list[Any]) -> bytes:
        return prompt({"instructions": instructions, "input": items}, RESPONSES)

    assert one(history + more).startswith(one(history))


@given(st.lists(st.tuples(st.sampled_from(("user", "assistant")), _TEXT), max_size=4))
def test_different_conversations_give_different_bytes(turns: list[tuple[str, str]]) -> None:
    def one(pairs: list[tuple[str, str]]) -> bytes:
        return chat(*({"role": role, "content": text} for role, text in pairs))

    glued = [("user", "".join(role + text for role, text in turns))]
    assert (one(turns) == one(glued)) == (turns == glued)


def test_a_shared_start_of_one_message_is_a_shared_prefix() -> None:
    one, two = chat(user("the same long document. question 1")), chat(user("the same long document. question 2"))
    assert one[:-1] == two[:-1]
    assert one != two


def test_a_string_and_its_text_part_are_the_same_prompt_in_every_api() -> None:
    plain = chat({"role": "system", "content": "be kind"}, user("hi"))
    assert plain == chat(
        {"role": "system", "content": [{"type": "text", "text": "be kind"}]}, user([{"type": "text", "text": "hi"}])
    )
    blocks = [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]
    assert plain == prompt({"system": "be kind", "messages": [user(blocks)]}, MESSAGES)
    assert plain == prompt({"system": [{"type": "text", "text": "be kind"}], "messages": [user("hi")]}, MESSAGES)
    assert plain == prompt({"instructions": "be kind", "input": "hi"}, RESPONSES)
    assert plain == prompt(
        {"instructions": "be kind", "input": [user([{"type": "input_text", "text": "hi"}])]}, RESPONSES
    )
    assert plain == prompt({"messages": [{"role": "system", "content": "be kind"}, user("hi")]}, "/tokenize")


def test_the_model_and_sampling_are_no_part_of_the_prompt() -> None:
    assert chat(user("hi")) == chat(user("hi"), model="x", temperature=1, max_tokens=5, user="u", tools=[], stream=True)


def test_escapes_and_white_space_of_json_make_no_difference() -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "é\n"}}]
    document = {"messages": [user("é \n 世界")], "tools": tools, "chat_template_kwargs": {"a": True}}
    wide = json.dumps({**document, "tools": None}, indent=3, ensure_ascii=False).encode()
    tight = json.dumps({**document, "tools": None}, separators=(",", ":")).encode()
    assert decode("r", "POST", CHAT, {}, wide).prompts == decode("r", "POST", CHAT, {}, tight).prompts
    assert prompt(document) == decode("r", "POST", CHAT, {}, json.dumps(document, indent=1).encode()).prompts[0]


def test_what_a_template_renders_tells_prompts_apart_from_the_start() -> None:
    plain = chat(user("hi"))
    tool = {"type": "function", "function": {"name": "f"}}
    variants = [
        chat(user("hi"), tools=[tool]),
        chat(user("hi"), chat_template_kwargs={"enable_thinking": False}),
        chat(user("hi"), chat_template="{{ messages }}"),
        chat(user("hi"), documents=[{"text": "d"}]),
        chat(user("hi"), reasoning_effort="high"),
        plain,
    ]
    assert len(set(variants)) == len(variants)
    assert all(variant.endswith(plain) for variant in variants)


def test_names_calls_and_results_are_part_of_the_prompt() -> None:
    def call(name: str, arguments: Any, number: str = "c") -> dict[str, Any]:
        calls = [{"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}]
        return {"role": "assistant", "content": None, "tool_calls": calls}

    assert chat(call("f", "{}")) != chat(call("g", "{}"))
    assert chat(call("f", "{}")) != chat(call("f", '{"a":1}'))
    assert chat(call("f", "{}", "c1")) == chat(call("f", "{}", "c2"))
    assert chat(call("f", {"a": 1})) == chat(call("f", '{"a":1}'))
    assert chat({**user("hi"), "name": "ann"}) != chat({**user("hi"), "name": "bob"})
    assert chat({"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}) == chat(call("f", "{}"))
    assert chat({"role": "assistant", "reasoning_content": "so"}) == chat({"role": "assistant", "reasoning": "so"})


def test_media_are_sixteen_bytes_of_hash_keyed_by_kind() -> None:
    def image(url: str) -> bytes:
        return chat(user([{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": url}}]))

    data = "data:image/png;base64," + "QUJD" * 1000
    assert len(image(data)) == len(chat(user("see"))) + 17
    assert image(data) == image(data)
    assert image(data) != image(data + "A")
    assert image("x") == chat(user([{"type": "text", "text": "see"}, {"type": "image_url", "image_url": "x"}]))
    assert image("x") != chat(user([{"type": "text", "text": "see"}, {"type": "video_url", "video_url": {"url": "x"}}]))
    assert prompt(
        {"input": [user([{"type": "input_text", "text": "see"}, {"type": "input_image", "image_url": "x"}])]}, RESPONSES
    ) == image("x")


def test_an_unknown_part_is_hashed_whole_but_for_its_cache_mark() -> None:
    def part(**fields: Any) -> bytes:
        return chat(user([{"type": "hologram", "shape": {"a": 1}, **fields}]))

    assert part() == part(cache_control={"type": "ephemeral"})
    assert part() != part(shape={"a": 2})


def test_the_billing_text_of_claude_code_is_dropped() -> None:
    def system(*texts: str) -> bytes:
        blocks = [{"type": "text", "text": text} for text in texts]
        return prompt({"system": blocks, "messages": [user("hi")]}, MESSAGES)

    billing = "x-anthropic-billing-header: cc_version=1; cch=4f2a9"
    assert system(billing, "You are Claude Code.") == system("You are Claude Code.")
    assert prompt({"system": billing, "messages": [user("hi")]}, MESSAGES) == prompt(
        {"messages": [user("hi")]}, MESSAGES
    )
    inline = {"role": "system", "content": [{"type": "text", "text": billing}, {"type": "text", "text": "a"}]}
    assert prompt({"messages": [inline]}, MESSAGES) == prompt(
        {"messages": [{"role": "system", "content": "a"}]}, MESSAGES
    )
