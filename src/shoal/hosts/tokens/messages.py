"""Chat messages as vLLM hands them to a chat template.

Owns the flattening of content parts, the arguments of tool calls, and the shape of tools; after vLLM's chat parsing of
versions 0.26 to 0.33.  What these versions treat differently is not guessed: NoTokens.
"""

import json
from typing import Any

from shoal.hosts.tokens.prompts import NoTokens

_TEXT_FIELDS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
_BILLING_HEADER = "x-anthropic-billing-header"


def conversation(messages: list[dict[str, Any]], *, has_parts: bool) -> list[dict[str, Any]]:
    """Return the messages for a template that takes content as parts (`has_parts`) or as one string.

    Raises NoTokens for images and sounds, and for what an engine refuses.
    """
    return [_message(message, has_parts) for message in messages]


def _message(message: dict[str, Any], has_parts: bool) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str):
        raise NoTokens("unreadable")
    texts = _texts(message.get("content"))
    if role == "system" and any(text.startswith(_BILLING_HEADER) for text in texts):
        raise NoTokens("unsupported")
    out: dict[str, Any] = {"role": role}
    if has_parts and role != "tool":
        out["content"] = [{"type": "text", "text": text} for text in texts]
    else:
        out["content"] = "\n".join(texts if has_parts else filter(None, texts))
    if role == "assistant":
        _take_assistant(out, message)
    elif role == "tool" and "tool_call_id" in message:
        out["tool_call_id"] = message["tool_call_id"]
    elif role == "developer":
        out["tools"] = message.get("tools")
    for name in ("name", "task"):
        if isinstance(message.get(name), str):
            out[name] = message[name]
    return out


def _texts(content: Any) -> list[str]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise NoTokens("unreadable")
    texts = []
    for part in content:
        text = part
        if isinstance(part, dict):
            kind = part.get("type")
            field = _TEXT_FIELDS.get(kind) if isinstance(kind, str) else None
            if field is None:
                raise NoTokens("media")
            text = part.get(field)
            if text is None and kind in ("text", "refusal"):
                continue
        if not isinstance(text, str):
            raise NoTokens("unreadable")
        texts.append(text)
    return texts


def _take_assistant(out: dict[str, Any], message: dict[str, Any]) -> None:
    calls = message.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, list):
            raise NoTokens("unreadable")
        if calls:
            out["tool_calls"] = [_call(call) for call in calls]
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if reasoning is not None:
        out["reasoning"] = out["reasoning_content"] = reasoning


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise NoTokens("unreadable")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (json.JSONDecodeError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        # Some versions refuse them, others take an empty object instead.
        raise NoTokens("unsupported")
    # Known fields come first, in the order of vLLM's models, then the others: a template may write a whole call out.
    written = {"arguments": None, "name": None, **function}
    written["arguments"] = arguments
    return {"id": None, "function": None, "type": "function", **call} | {"function": written}


def without_developers(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the conversation for a template that does not know the developer role.

    As vLLM does it: developers speak as the system, and all that the system says stands at the beginning.  Without a
    developer nothing changes.
    """
    if not any(message["role"] == "developer" for message in messages):
        return messages
    roles = ("developer", "system")
    spoken = [message["content"] for message in messages if message["role"] in roles]
    others = [message for message in messages if message["role"] not in roles]
    if len(spoken) == 1 and messages[0]["role"] in roles:
        first = {name: value for name, value in messages[0].items() if name != "tools"}
        return [first | {"role": "system"}, *others]
    texts = ["\n".join(part["text"] for part in each) if isinstance(each, list) else each for each in spoken]
    return [{"role": "system", "content": "\n\n".join(filter(None, texts))}, *others]


def tools(given: Any) -> list[dict[str, Any]] | None:
    """Return the tools of a request as vLLM's models write them out again: known fields in a fixed order."""
    if given is None:
        return None
    if not isinstance(given, list):
        raise NoTokens("unreadable")
    return [_tool(tool) for tool in given]


def _tool(tool: Any) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise NoTokens("unreadable")
    if tool.get("type", "function") != "function" or tool.keys() - {"type", "function"}:
        raise NoTokens("unsupported")
    if function.keys() - {"name", "description", "parameters", "strict"}:
        raise NoTokens("unsupported")
    out = {
        "name": function["name"],
        "description": function.get("description"),
        "parameters": function.get("parameters"),
    }
    if function.get("strict") is not None:
        out["strict"] = function["strict"]
    return {"type": "function", "function": out}
