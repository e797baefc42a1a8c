"""Reading YAML documents strictly: every value checked against a type, every error with its path and line.

Owns the walk from YAML nodes to structs and plugin parameters.  What the documents mean is `config`; what fields
they have is `pickerfile` and `settings`.
"""

import contextlib
import difflib
import re
import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin

import msgspec
import yaml

from shoal.kernel import ConfigError
from shoal.kernel.marks import Duration, Quantity
from shoal.scheduling.plugin import Deprecated, Ignored
from shoal.scheduling.schema import Parameter, fields, parameters
from shoal.wire.documents import Unreadable, is_null, plain

MAX_INT = (1 << 63) - 1
MAX_FIGURE = 1e18
"""No setting is larger, whatever its unit: multiplied and added up, larger ones end as infinite, and as no number."""

_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)(Ki|Mi|Gi|Ti|Pi|k|M|G|T|P|)")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(h|ms|m|s|us|µs|ns)")
_SCALES = {"": 1, **{f"{unit}i": 1024**power for power, unit in enumerate("KMGTP", 1)}}
_SCALES |= {unit: 1000**power for power, unit in enumerate("kMGTP", 1)}
_SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}


class Raw:
    """Type of a field whose node is read later, when it is known what it is."""


class Reader:
    """Reads the documents of one file.  warnings: what was accepted and should be changed.  stated: paths given."""

    __slots__ = ("_lines", "source", "warnings")

    def __init__(self, source: str) -> None:
        self.source = source
        self.warnings: list[str] = []
        self._lines: dict[str, int] = {}

    def error(self, path: str, message: str) -> ConfigError:
        """Return the error for the value at `path`, with the line of it or of what it stands in."""
        place = path
        while place and place not in self._lines:
            place = place[: max(place.rfind("."), place.rfind("["), 0)]
        return ConfigError(message, source=self.source, line=self._lines.get(place, 0), path=path)

    def warn(self, path: str, message: str) -> None:
        """Note something that works and should be changed."""
        self.warnings.append(str(self.error(path, message)))

    def stated(self, prefix: str) -> tuple[str, ...]:
        """Return the paths below `prefix` that the file gives, without the prefix."""
        return tuple(path[len(prefix) :] for path in self._lines if path.startswith(prefix))

    def at(self, path: str, node: yaml.Node) -> None:
        """Remember the line of `path`."""
        self._lines[path] = node.start_mark.line + 1

    # ------------------------------------------------------------------ mappings

    def struct(self, node: yaml.Node, cls: type[msgspec.Struct], path: str) -> Any:
        """Read a mapping as a struct."""
        return self._made(cls, self._values(node, fields(cls), path), fields(cls), path)

    def plugin(self, node: yaml.Node | None, cls: type[Any], path: str) -> tuple[Any, dict[str, Any]]:
        """Make a plugin from its parameters.  Returns it and the value of each parameter by its key."""
        schema = parameters(cls)
        values = {} if node is None else self._values(node, schema, path)
        made = self._made(cls, values, schema, path)
        return made, {given.key: values.get(given.name, given.default) for given in schema}

    def _values(self, node: yaml.Node, schema: tuple[Parameter, ...], path: str) -> dict[str, Any]:
        if not isinstance(node, yaml.MappingNode):
            raise self._mismatch(node, "a mapping", path)
        known = {field.key: field for field in schema}
        values = {}
        for key, value in node.value:
            here = f"{path}.{key.value}" if path else key.value
            self.at(here, key)
            field = known.get(key.value)
            if field is None:
                near = difflib.get_close_matches(key.value, known, n=2)
                hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(known) or 'none'}"
                raise self.error(here, f"unknown field, {hint}")
            if is_null(value):
                continue
            values[field.name] = self.value(value, field.type, here, field.marks)
            for mark in field.marks:
                if isinstance(mark, Deprecated):
                    self.warn(here, f"is deprecated: {mark.instead}")
                elif isinstance(mark, Ignored) and values[field.name] not in mark.alike:
                    self.warn(here, f"has no effect: {mark.why}")
        return values

    def _made(self, cls: type[Any], values: dict[str, Any], schema: tuple[Parameter, ...], path: str) -> Any:
        for field in schema:
            if field.is_required and field.name not in values:
                raise self.error(path, f"{field.key} is missing")
        try:
            return cls(**values)
        except ValueError as error:
            message = str(error)
            # A message that begins with a field's name belongs to that field's line.
            word = re.match(r"[\w.\[\]]*", message)
            inner = f"{path}.{word[0]}" if word and path else (word[0] if word else "")
            raise self.error(inner if inner in self._lines else path, message) from None

    # ------------------------------------------------------------------ values

    def value(self, node: yaml.Node, hint: Any, path: str, marks: tuple[Any, ...] = ()) -> Any:
        """Read one value of type `hint`."""
        self._lines.setdefault(path, node.start_mark.line + 1)
        origin, inner = get_origin(hint), get_args(hint)
        if hint is Raw:
            return node
        if hint is object:
            return self._plain(node, path)
        if origin in (types.UnionType, Union):
            *others, last = (kind for kind in inner if kind is not types.NoneType)
            for kind in others:
                with contextlib.suppress(ConfigError):
                    return self.value(node, kind, path, marks)
            return self.value(node, last, path, marks)
        if origin is Literal:
            return self._choice(node, inner, path)
        if origin is tuple:
            if not isinstance(node, yaml.SequenceNode):
                raise self._mismatch(node, "a list", path)
            return tuple(self.value(item, inner[0], f"{path}[{at}]") for at, item in enumerate(node.value))
        if origin in (dict, Mapping):
            return self._mapping(node, inner[1], path)
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            return self.struct(node, hint, path)
        return self._scalar(node, hint, path, marks)

    def _mapping(self, node: yaml.Node, hint: Any, path: str) -> dict[str, Any]:
        if not isinstance(node, yaml.MappingNode):
            raise self._mismatch(node, "a mapping", path)
        return {key.value: self.value(value, hint, f"{path}.{key.value}") for key, value in node.value}

    def _choice(self, node: yaml.Node, choices: tuple[str, ...], path: str) -> str:
        value = node.value if isinstance(node, yaml.ScalarNode) else None
        if value not in choices:
            raise self._mismatch(node, f"one of {', '.join(choices)}", path)
        return str(value)

    def _scalar(self, node: yaml.Node, hint: Any, path: str, marks: tuple[Any, ...]) -> Any:
        value = self._plain(node, path) if isinstance(node, yaml.ScalarNode) else None
        kinds = {type(mark) for mark in marks}
        if Quantity in kinds and isinstance(value, str) and (match := _QUANTITY.fullmatch(value)):
            size = float(match[1]) * _SCALES[match[2]]
            value = int(size) if size <= MAX_FIGURE else value
        if Duration in kinds:
            return self._seconds(node, value, path)
        if hint is bool and isinstance(value, bool):
            return value
        if hint is int and isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MAX_INT:
            return value
        if hint is float:
            # YAML 1.1 reads 1e6 as a string, which no one means.
            if isinstance(value, str) and not getattr(node, "style", None) and _NUMBER.fullmatch(value):
                value = float(value)
            if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_FIGURE:
                return float(value)
        if hint is str and isinstance(value, str):
            return value
        wanted = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}.get(hint, str(hint))
        raise self._mismatch(node, wanted + (" such as 64Mi" if Quantity in kinds else ""), path)

    def _seconds(self, node: yaml.Node, value: Any, path: str) -> float:
        parts = _DURATION.findall(value) if isinstance(value, str) else []
        if parts and "".join(number + unit for number, unit in parts) == value:
            seconds = float(sum(float(number) * _SECONDS[unit] for number, unit in parts))
            if seconds <= MAX_FIGURE:
                return seconds
        if value == 0 and not isinstance(value, bool):
            return 0.0
        raise self._mismatch(node, "a duration such as 500ms or 1m30s", path)

    def _plain(self, node: yaml.Node, path: str) -> Any:
        try:
            return plain(node)
        except Unreadable:
            raise self.error(path, "cannot be read") from None

    def _mismatch(self, node: yaml.Node, wanted: str, path: str) -> ConfigError:
        self._lines[path] = node.start_mark.line + 1
        if isinstance(node, yaml.MappingNode):
            got = "a mapping"
        elif isinstance(node, yaml.SequenceNode):
            got = "a list"
        else:
            kind = node.tag.rpartition(":")[2]
            got = {"str": "the string", "int": "the number", "float": "the number", "bool": "the boolean"}.get(
                kind, kind
            )
            got = f"{got} {node.value[:80]!r}" if node.value else got
        return self.error(path, f"must be {wanted}, got {got}")
