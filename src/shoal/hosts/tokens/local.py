"""Exact tokens from a model's own tokenizer files, as vLLM makes them with the same files.

Owns the reading of a model directory.  Nothing is downloaded, and no code of a model is run.
"""

from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken, Tokenizer, processors

from shoal.hosts.tokens.prefixes import PrefixedTokenizer
from shoal.hosts.tokens.prompts import Chat, Ids, NoTokens, Prompt, Texts
from shoal.hosts.tokens.templates import ChatTemplate
from shoal.kernel import UNREADABLE, ConfigError

MAX_FILE_BYTES = 256 << 20
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Their prompts are not made by a chat template, or not from these files.
_OWN_RENDERERS = ("gpt_oss", "deepseek_v32", "deepseek_v4", "kimi_k3", "inkling", "cohere")
# transformers writes the special tokens around a text anew for these, whatever tokenizer.json says.
_FLAGGED_CLASSES = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "CohereTokenizer")


class LocalTokenizer:
    """One model's tokenizer and template.  Safe to use from several threads.

    path: directory with tokenizer.json and tokenizer_config.json, as a model is published.  Raises ConfigError when
    they cannot be used.
    """

    def __init__(self, path: Path, budget_bytes: int, seed: int) -> None:
        config = _read_json(path / "tokenizer_config.json")
        tokenizer = _load(path / "tokenizer.json")
        special_tokens = _special_tokens(config)
        _complete(tokenizer, config, special_tokens)
        self._tokenizer = PrefixedTokenizer(tokenizer, budget_bytes, seed)
        self._templates = {
            name: ChatTemplate(source, special_tokens) for name, source in _templates(path, config).items()
        }

    @property
    def used_bytes(self) -> int:
        """What it remembers of texts."""
        return self._tokenizer.used_bytes

    def tokenise(self, prompt: Prompt) -> list[bytes]:
        """Return the ids of each prompt of a request, little-endian uint32.  Raises NoTokens."""
        content = prompt.content
        match content:
            case Ids():
                return content.prompts
            case Texts():
                around = content.has_special_tokens
                return [self._tokenizer.encode(text, has_special_tokens=around) for text in content.texts]
            case Chat():
                text = self._template(content).render(content)
                around = content.body.get("add_special_tokens") is True
                return [self._tokenizer.encode(text, has_special_tokens=around)]
        raise NoTokens("unsupported")

    def _template(self, chat: Chat) -> ChatTemplate:
        templates = self._templates
        template = templates.get("tool_use") if chat.body.get("tools") is not None else None
        template = template or templates.get("default")
        if template is None:
            raise NoTokens("no-template")
        return template


def _load(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_buffer(_read(path))
    except ConfigError:
        raise
    except Exception as error:
        # `tokenizers` raises plain Exceptions.
        raise ConfigError(f"not a tokenizer: {str(error)[:200]}", source=str(path)) from None


def _read(path: Path) -> bytes:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"larger than {MAX_FILE_BYTES} bytes", source=str(path))
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", source=str(path)) from None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return msgspec.json.decode(_read(path), type=dict[str, Any])
    except UNREADABLE as error:
        raise ConfigError(f"not a JSON object: {error}", source=str(path)) from None


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """The texts of the tokens that have a name, which templates use."""
    out = {}
    for name in _SPECIAL_NAMES:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            out[name] = text
    return out


def _complete(tokenizer: Tokenizer, config: dict[str, Any], special_tokens: dict[str, str]) -> None:
    """Do to a tokenizer what transformers does when it loads one beside its configuration."""
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    listed = config.get("added_tokens_decoder")
    added: dict[str, Any] = listed if isinstance(listed, dict) else {}
    for number in sorted(filter(str.isdecimal, added), key=int):
        fields = added[number]
        content = fields.get("content") if isinstance(fields, dict) else None
        if not isinstance(content, str) or content in known:
            continue
        flags = {name: bool(fields.get(name)) for name in ("single_word", "lstrip", "rstrip", "normalized", "special")}
        token = AddedToken(content, **flags)
        (tokenizer.add_special_tokens if flags["special"] else tokenizer.add_tokens)([token])
    if not str(config.get("tokenizer_class", "")).startswith(_FLAGGED_CLASSES):
        return
    before = special_tokens.get("bos_token") if config.get("add_bos_token", True) else None
    after = special_tokens.get("eos_token") if config.get("add_eos_token", False) else None
    pieces = [f"{before}:0"] * bool(before) + ["$A:0"] + [f"{after}:0"] * bool(after)
    used = [(token, tokenizer.token_to_id(token)) for token in (before, after) if token]
    if all(number is not None for _, number in used):
        tokenizer.post_processor = processors.TemplateProcessing(single=" ".join(pieces), special_tokens=used)


def _templates(path: Path, config: dict[str, Any]) -> dict[str, str]:
    """The chat templates by name; a file of its own goes before what the configuration holds."""
    if str(_read_json(path / "config.json").get("model_type", "")).startswith(_OWN_RENDERERS):
        return {}
    own = path / "chat_template.jinja"
    if own.exists():
        return {"default": _read(own).decode(errors="replace")}
    given = config.get("chat_template")
    if isinstance(given, str):
        return {"default": given}
    if isinstance(given, list):
        return {
            str(each["name"]): str(each["template"])
            for each in given
            if isinstance(each, dict) and "name" in each and "template" in each
        }
    return {}
