"""Reading YAML documents strictly: every value checked against a type, every error with its path and line.

Owns the walk from YAML nodes to structs and plugin parameters.  What the documents mean is `config`; what fields
they have is `pickerfile` and `settings`.
"""

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

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_MAX_CHARS = 4 * 1024 * 1024
_MAX_DEPTH = 64
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)(Ki|Mi|Gi|Ti|Pi|k|M|G|T|P|)")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(h|ms|m|s|us|µs|ns)")
_SCALES = {"": 1, **{f"{unit}i": 1024**power for power, unit in enumerate("KMGTP", 1)}}
_SCALES |= {unit: 1000**power for power, unit in enumerate("kMGTP", 1)}
_SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}


class Raw:
    """Type of a field whose node is read later, when it is known what it is."""


def compose(text: str, source: str) -> list[yaml.MappingNode]:
    """Return the documents of a file, empty ones left out.  Raises ConfigError for what is not YAML mappings."""
    if len(text) > _MAX_CHARS:
        raise ConfigError(f"is longer than {_MAX_CHARS} characters", source=source)
    try:
        roots = list(yaml.compose_all(text, Loader=_Loader))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = str(getattr(error, "problem", None) or error).partition("\n")[0]
        raise ConfigError(f"is not YAML: {problem}", source=source, line=mark.line + 1 if mark else 0) from None
    except RecursionError:
        raise ConfigError("is nested too deep", source=source) from None
    documents = []
    for root in roots:
        if isinstance(root, yaml.ScalarNode) and root.tag == "tag:yaml.org,2002:null":
            continue
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError("a document must be a mapping", source=source, line=root.start_mark.line + 1)
        _check_keys(root, source, "", 0)
        documents.append(root)
    return documents


def _check_keys(node: yaml.Node, source: str, path: str, depth: int) -> None:
    """Refuse duplicate, compound and merge keys, which YAML loaders drop or join without a word."""
    if depth > _MAX_DEPTH:
        raise ConfigError("is nested too deep, or contains itself", source=source, line=node.start_mark.line + 1)
    if isinstance(node, yaml.SequenceNode):
        for at, item in enumerate(node.value):
            _check_keys(item, source, f"{path}[{at}]", depth + 1)
    elif isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError("a key must be a plain string", source=source, line=line, path=path)
            here = f"{path}.{key.value}" if path else key.value
            if key.tag == "tag:yaml.org,2002:merge":
                raise ConfigError("merge keys (<<) are not read; write the fields out", source=source, line=line)
            if key.value in seen:
                first = seen[key.value]
                raise ConfigError(f"duplicate key, first in line {first}", source=source, line=line, path=here)
            seen[key.value] = line
            _check_keys(value, source, here, depth + 1)


class Reader:
    """Reads the documents of one file.  warnings: what was accepted and should be changed.  stated: paths given."""

    __slots__ = ("_lines", "_scalars", "source", "warnings")

    def __init__(self, source: str) -> None:
        self.source = source
        self.warnings: list[str] = []
        self._lines: dict[str, int] = {}
        self._scalars = yaml.constructor.SafeConstructor()

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
            if _is_null(value):
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
            return self.value(node, next(kind for kind in inner if kind is not types.NoneType), path, marks)
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
            return int(float(match[1]) * _SCALES[match[2]])
        if Duration in kinds:
            return self._seconds(node, value, path)
        if hint is bool and isinstance(value, bool):
            return value
        if hint is int and isinstance(value, int) and not isinstance(value, bool):
            return value
        if hint is float:
            # YAML 1.1 reads 1e6 as a string, which no one means.
            if isinstance(value, str) and not getattr(node, "style", None) and _NUMBER.fullmatch(value):
                value = float(value)
            if isinstance(value, int | float) and not isinstance(value, bool) and value == value:
                return float(value)
        if hint is str and isinstance(value, str):
            return value
        wanted = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}.get(hint, str(hint))
        raise self._mismatch(node, wanted + (" such as 64Mi" if Quantity in kinds else ""), path)

    def _seconds(self, node: yaml.Node, value: Any, path: str) -> float:
        parts = _DURATION.findall(value) if isinstance(value, str) else []
        if parts and "".join(number + unit for number, unit in parts) == value:
            return float(sum(float(number) * _SECONDS[unit] for number, unit in parts))
        if value == 0 and not isinstance(value, bool):
            return 0.0
        raise self._mismatch(node, "a duration such as 500ms or 1m30s", path)

    def _plain(self, node: yaml.Node, path: str) -> Any:
        try:
            return self._scalars.construct_document(node)
        except (yaml.YAMLError, ValueError, OverflowError):
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


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"
