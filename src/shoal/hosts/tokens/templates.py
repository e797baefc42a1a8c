"""The chat template of a model, rendered as transformers renders it.

Owns the sandbox, which form of content a template takes, and which arguments reach it.  A template comes from the
operator's own model directory; what clients send is only data to it.
"""

import json
from collections.abc import Iterator
from datetime import datetime
from types import BuiltinMethodType
from typing import Any

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shoal.hosts.tokens.messages import conversation, tools, without_developers
from shoal.hosts.tokens.prompts import Chat, NoTokens
from shoal.kernel import ConfigError

MAX_RENDERED_CHARS = 16 << 20
_CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "
# Parameters of `apply_chat_template` that change what is rendered in ways of their own.
_UNSUPPORTED_KWARGS = frozenset(
    ("chat_template", "conversation", "messages", "tokenize", "padding", "truncation", "max_length", "return_dict",
     "return_tensors", "return_assistant_tokens_mask", "tokenizer_kwargs", "sanitize_special_tokens",
     "tools", "documents", "add_generation_prompt", "continue_final_message")
)  # fmt: skip


class _Generation(Extension):
    """`{% generation %}` marks what an assistant wrote, for training; here its body is only rendered."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """Return a block that renders its body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    @staticmethod
    def _render(caller: Any) -> str:
        return str(caller())


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


class _Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox, with a short way for what templates do most: it gives what the long way gives.

    A long conversation reads thousands of fields, and the long way to each raises and catches an exception.
    """

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return a field of a message, or a method of a text."""
        if type(obj) is dict and attribute not in _DICT_NAMES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if type(obj) is str and attribute in _STR_METHODS:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a method of a text, or what the sandbox lets pass."""
        if type(__obj) is BuiltinMethodType and type(__obj.__self__) is str:
            kwargs.pop("_block_vars", None)
            kwargs.pop("_loop_vars", None)
            return __obj(*args, **kwargs)
        return super().call(__context, __obj, *args, **kwargs)


_DICT_NAMES = frozenset(dir(dict))
# Public, and without `format`, which the sandbox has its own of.
_STR_METHODS = frozenset(name for name in dir(str) if name[0] != "_" and name not in ("format", "format_map"))


def _environment() -> ImmutableSandboxedEnvironment:
    made = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    made.filters["tojson"] = _tojson
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made


class ChatTemplate:
    """One template.  special_tokens: names as `bos_token` and their texts.  Raises ConfigError for bad Jinja."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        environment = _environment()
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ConfigError(f"the chat template is not valid Jinja: {error}", source="chat_template") from None
        self._special_tokens = special_tokens
        self._variables = frozenset(meta.find_undeclared_variables(tree))
        self._names_content = "content" in source
        self._knows_developers = "'developer'" in source or '"developer"' in source
        self.has_parts = any(True for _ in _loops_over_content(tree))

    def render(self, chat: Chat) -> str:
        """Return the prompt of a chat completion.  Raises NoTokens where the engine would refuse, or is not known."""
        body = chat.body
        arguments = self._arguments(body)
        messages = conversation(chat.messages, has_parts=self.has_parts)
        if not self._knows_developers:
            messages = without_developers(messages)
        continues = body.get("continue_final_message") is True
        generates = body.get("add_generation_prompt", True) is True
        if continues:
            if generates or not messages or not self._names_content:
                raise NoTokens("refused")
            text = _continue(messages[-1])
        try:
            rendered = self._template.render(
                messages=messages,
                tools=tools(body.get("tools")),
                documents=_documents(body.get("documents")),
                add_generation_prompt=generates,
                **arguments,
            )
        except NoTokens:
            raise
        except Exception:
            # Whatever a template does with what clients sent: the engine's template does the same, and refuses.
            raise NoTokens("refused") from None
        if len(rendered) > MAX_RENDERED_CHARS:
            raise NoTokens("too-large")
        return _cut(rendered, text) if continues else rendered

    def _arguments(self, body: dict[str, Any]) -> dict[str, Any]:
        given = body.get("chat_template_kwargs")
        out: dict[str, Any] = {**self._special_tokens}
        if isinstance(given, dict):
            if _UNSUPPORTED_KWARGS & given.keys():
                raise NoTokens("unsupported")
            out.update((name, value) for name, value in given.items() if name in self._variables)
        effort = body.get("reasoning_effort")
        if effort is not None:
            if "enable_thinking" in self._variables and "enable_thinking" not in out:
                # Newer engines derive one from the other, older ones do not.
                raise NoTokens("unsupported")
            if "reasoning_effort" in self._variables:
                out["reasoning_effort"] = effort
        if body.get("tool_choice") == "none" and body.get("tools"):
            # Whether tools are left out then is a flag of the engine.
            raise NoTokens("unsupported")
        return out


def _documents(given: Any) -> list[dict[str, Any]] | None:
    if given is None:
        return None
    if not isinstance(given, list) or not all(isinstance(each, dict) for each in given):
        raise NoTokens("unreadable")
    return given


def _continue(message: dict[str, Any]) -> str:
    """Mark the end of the last message's text; returns the text."""
    content = message["content"]
    if isinstance(content, str):
        message["content"] = content + _CONTINUED
        return content
    if not content:
        raise NoTokens("refused")
    text = str(content[-1]["text"])
    content[-1]["text"] = text + _CONTINUED
    return text


def _cut(rendered: str, text: str) -> str:
    """Return what stands before the mark; a template that trimmed it has trimmed the text's end as well."""
    if text.strip() not in rendered or _CONTINUED.strip() not in rendered:
        raise NoTokens("refused")
    place = rendered.rindex(_CONTINUED.strip())
    if rendered.startswith(_CONTINUED, place):
        return rendered[:place]
    return rendered[:place].rstrip()


# ---------------------------------------------------------------------- does it take content as parts?


def _loops_over_content(tree: nodes.Template) -> Iterator[nodes.For]:
    """Loops over a message's content: a template that has one takes parts.

    As vLLM finds it: loops over `messages`, or over what was assigned from it, name messages; a loop over the `content`
    of such a name is one.
    """
    lists = {"messages"}
    assigned = list(tree.find_all(nodes.Assign))
    while True:
        found = {
            assign.target.name
            for assign in assigned
            if isinstance(assign.target, nodes.Name) and any(_reads(assign.node, name) for name in lists)
        }
        if found <= lists:
            break
        lists |= found
    loops = list(tree.find_all(nodes.For))
    names = {
        loop.target.name
        for loop in loops
        if isinstance(loop.target, nodes.Name) and any(_reads(loop.iter, name) for name in lists)
    }
    for loop in loops:
        if any(_reads(loop.iter, name, "content") for name in names):
            yield loop


def _reads(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Whether an expression is the variable, or its `key`: filtered, tested or sliced."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    if key is None:
        return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name
    if isinstance(node, nodes.Getitem):
        is_key = isinstance(node.arg, nodes.Const) and node.arg.value == key
    else:
        is_key = isinstance(node, nodes.Getattr) and node.attr == key
    return is_key and isinstance(node, nodes.Getitem | nodes.Getattr) and _reads(node.node, name)
