"""A chat's prefix grows by the pool's own replies."""

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.workload import Chat, chat_body, multi_turn


def decoded(body: bytes) -> dict[str, object]:
    made: dict[str, object] = msgspec.json.decode(body)
    return made


def test_a_turn_carries_the_system_prompt_and_every_turn_before_it() -> None:
    chat = Chat(id="c", system="be kind", says=("one", "two", "three"), reply_tokens=(1, 2, 3))
    body = decoded(chat_body(chat, ["uno", "dos"], model="m"))
    assert body["messages"] == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "uno"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "dos"},
        {"role": "user", "content": "three"},
    ]
    assert (body["model"], body["max_tokens"]) == ("m", 3)


def test_a_stream_asks_for_its_usage_and_a_plain_answer_does_not() -> None:
    chat = Chat(id="c", says=("one",), reply_tokens=(5,))
    streaming = decoded(chat_body(chat, [], model="m"))
    plain = decoded(chat_body(chat, [], model="m", stream=False))
    assert (streaming["stream"], streaming["stream_options"]) == (True, {"include_usage": True})
    assert plain == {"model": "m", "messages": [{"role": "user", "content": "one"}], "max_tokens": 5}


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32), reply=st.text(max_size=40))
def test_every_turn_extends_the_one_before(seed: int, reply: str) -> None:
    plan = multi_turn(np.random.default_rng(seed), chats=2, turns=4, systems=1, system_chars=100)
    chat = plan.chats[0]
    before: list[object] = []
    for turn in range(4):
        messages = decoded(chat_body(chat, [reply] * turn, model="m"))["messages"]
        assert isinstance(messages, list)
        assert messages[: len(before)] == before
        assert len(messages) == len(before) + 2
        before = messages
