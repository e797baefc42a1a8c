"""`shoal docs`: write the reference of plugins, or of settings, from the code."""

import argparse
import sys
import types
from collections.abc import Iterator, Mapping
from inspect import cleandoc
from typing import Any, Literal, Union, get_args, get_origin

import msgspec

from shoal.routing.catalog import FAMILIES, installed
from shoal.routing.settings import PoolSettings
from shoal.scheduling.plugin import Deprecated, Ignored, Ref
from shoal.scheduling.registry import DEPRECATED, DEPRECATED_TYPES, NOT_YET
from shoal.scheduling.schema import Parameter, fields, parameters

_HEAD = """\
# Plugins

Made by `shoal docs plugins` from the plugins themselves; do not edit.  How they are put together is in
[config.md](config.md), how to write one in [howto-scorer.md](howto-scorer.md).

Where a figure of an endpoint is unknown (no metrics, or stale ones) it counts as the worst known one of the
candidates, never as 0; where it is unknown everywhere, it decides nothing.
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the verb."""
    parser = subparsers.add_parser(
        "docs",
        help="write the reference of plugins, or of settings, from the code",
        description="Print a reference page in Markdown: every plugin, or every setting of `kind: Pool`.",
        epilog="examples:\n  shoal docs plugins > docs/plugins.md\n  shoal docs settings",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("page", choices=("plugins", "settings"), help="which page")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print one page."""
    sys.stdout.write(plugins_page() if arguments.page == "plugins" else settings_page())
    return 0


def plugins_page() -> str:
    """The page of all plugins: the built-in families, then those of installed packages."""
    built_in = {cls.type for family in FAMILIES.values() for cls in family}
    others = tuple(cls for name, cls in installed().classes.items() if name not in built_in)
    parts = [_HEAD]
    for family, classes in [*FAMILIES.items(), ("From installed packages", others)]:
        if classes:
            parts.append(f"## {family}\n")
            parts += [_plugin(cls) for cls in classes]
    parts.append("## Old names\n")
    names = DEPRECATED | DEPRECATED_TYPES
    parts.append("".join(f"- `{old}`: use `{new}`\n" for old, new in sorted(names.items())))
    parts.append("## Not in this version\n")
    parts.append("llm-d has these, Shoal not yet; see [config.md](config.md#not-yet).\n")
    parts.append("".join(f"- `{name}`\n" for name in NOT_YET))
    return "\n".join(parts)


def _plugin(cls: type[Any]) -> str:
    lines = [f"### {cls.type}\n", cleandoc(cls.__doc__ or "") + "\n"]
    if needs := getattr(cls, "needs", ()):
        lines.append(f"Reads: {', '.join(f'`{name}`' for name in needs)}.\n")
    rows = list(_rows(parameters(cls), ""))
    if rows:
        lines.append("| parameter | type | default | meaning |\n|---|---|---|---|\n" + "".join(rows))
    return "\n".join(lines)


def settings_page() -> str:
    """The table of the settings of `kind: Pool`."""
    rows = "".join(_rows(fields(PoolSettings), ""))
    return "| setting | type | default | meaning |\n|---|---|---|---|\n" + rows


def _rows(schema: tuple[Parameter, ...], prefix: str) -> Iterator[str]:
    for field in schema:
        notes = [field.doc] if field.doc else []
        for mark in field.marks:
            if isinstance(mark, Deprecated):
                notes.append(f"deprecated: {mark.instead}")
            elif isinstance(mark, Ignored):
                notes.append(f"no effect: {mark.why}")
            elif isinstance(mark, Ref):
                notes.append("name of a " + " or ".join(f"`{type}`" for type in mark.types))
        inner = _struct(field.type)
        default = "required" if field.is_required else "" if inner else f"`{_default(field.default)}`"
        yield f"| `{prefix}{field.key}` | {_type(field.type)} | {default} | {'; '.join(notes)} |\n"
        if inner is not None:
            suffix = {tuple: "[].", Mapping: ".NAME."}.get(get_origin(field.type), ".")
            yield from _rows(fields(inner), f"{prefix}{field.key}{suffix}")


def _struct(hint: Any) -> type[msgspec.Struct] | None:
    """The struct that a type holds, through `| None` and lists."""
    for kind in (hint, *get_args(hint)):
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            return kind
    return None


def _type(hint: Any) -> str:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (types.UnionType, Union):
        return " or ".join(_type(kind) for kind in inner if kind is not types.NoneType)
    if origin is Literal:
        return " or ".join(f"`{choice}`" for choice in inner)
    if origin is tuple:
        return f"list of {_type(inner[0])}"
    if origin in (dict, Mapping):
        return f"mapping to {_type(inner[1])}"
    names = {bool: "boolean", int: "whole number", float: "number", str: "string", object: "anything"}
    return names.get(hint, "mapping")


def _default(value: Any) -> str:
    if isinstance(value, float) and value == int(value):
        value = int(value)
    return msgspec.json.encode(value, enc_hook=dict).decode()
