"""Requests of every form whose tokens the picker has to know as the engine does."""

from typing import Any

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "enum": ["Łódź"]}}},
    },
}
CALL: dict[str, Any] = {
    "id": "c1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Łódź", "days": 1.0}'},
}
LONG = "def main():\n    return sum(range(10))\n" * 10


def says(content: Any, role: str = "user", **more: Any) -> dict[str, Any]:
    """One message."""
    return {"role": role, "content": content, **more}


def text(*parts: str) -> list[dict[str, str]]:
    """Content as parts."""
    return [{"type": "text", "text": part} for part in parts]


FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": [says(LONG)]}),
    "system": (CHAT, {"messages": [says("Be brief", "system"), says(LONG), says(" ok \n\n", "assistant"), says("?")]}),
    "developer": (
        CHAT,
        {"messages": [says("a", "system"), says("b", "developer"), says(LONG), says("c", "developer")]},
    ),
    "parts": (CHAT, {"messages": [says(text("one", "", LONG))]}),
    "unicode": (CHAT, {"messages": [says("Zażółć 日本語 e\u0301 🤖 <|im_end|> \u200b\x00" + LONG)]}),
    "tools": (CHAT, {"messages": [says(LONG)], "tools": [TOOL]}),
    "calls": (
        CHAT,
        {
            "messages": [
                says(LONG),
                says(None, "assistant", tool_calls=[CALL, {"index": 1, **CALL, "id": "c2"}]),
                says("rain", "tool", tool_call_id="c1"),
                says(text("sun", "shine"), "tool", tool_call_id="c2"),
            ],
            "tools": [TOOL],
        },
    ),
    "reasoning": (CHAT, {"messages": [says(LONG), says("b", "assistant", reasoning_content="why"), says("c")]}),
    "continued": (
        CHAT,
        {
            "messages": [says(LONG), says("The answer is", "assistant")],
            "add_generation_prompt": False,
            "continue_final_message": True,
        },
    ),
    "template-arguments": (CHAT, {"messages": [says(LONG)], "chat_template_kwargs": {"enable_thinking": False}}),
    "completion": (COMPLETIONS, {"prompt": LONG}),
    "ids": (COMPLETIONS, {"prompt": [(37 * place) % 1900 + 10 for place in range(200)]}),
    "salted": (COMPLETIONS, {"prompt": LONG, "cache_salt": "tenant-a"}),
    "adapter": (COMPLETIONS, {"prompt": LONG, "model": "tuned"}),
    "salted-adapter": (COMPLETIONS, {"prompt": LONG, "model": "tuned", "cache_salt": "tuned"}),
}
"""Name -> (path, body)."""
