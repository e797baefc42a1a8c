"""YAML from files, read strictly and within bounds, so that no file costs more than it is long.

Owns what all readers of YAML have in common: size, depth, what aliases unfold to, duplicate keys, and plain values of
nodes.  What a document means is its reader's.
"""

import math
from typing import Any

import yaml

from shoal.kernel import ConfigError

MAX_CHARS = 4 * 1024 * 1024
MAX_DEPTH = 64
MAX_NODES = 1_000_000
"""Values of a document, each as often as it is named: nine lines of aliases can stand for a billion."""

Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_MERGE = "tag:yaml.org,2002:merge"
_NULL = "tag:yaml.org,2002:null"
# What PyYAML's constructors raise for texts that are none of what their tag says.
_NO_VALUE = (yaml.YAMLError, ValueError, LookupError, ArithmeticError, AttributeError, TypeError)


def compose(text: str, source: str, *, has_merges: bool = False) -> list[yaml.MappingNode]:
    """Return the documents of a file, empty ones left out.  Raises ConfigError for what is not YAML mappings.

    has_merges: merge keys (<<) may stand in it, and are as they were written.
    """
    if len(text) > MAX_CHARS:
        raise ConfigError(f"is longer than {MAX_CHARS} characters", source=source)
    try:
        roots = list(yaml.compose_all(text, Loader=Loader))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = str(getattr(error, "problem", None) or error).partition("\n")[0]
        raise ConfigError(f"is not YAML: {problem}", source=source, line=mark.line + 1 if mark else 0) from None
    except RecursionError:
        raise ConfigError("is nested too deep", source=source) from None
    documents = []
    for root in roots:
        if is_null(root):
            continue
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError("a document must be a mapping", source=source, line=root.start_mark.line + 1)
        check_bounds(root, source)
        check_keys(root, source, has_merges=has_merges)
        documents.append(root)
    return documents


def read_document(text: str, source: str) -> dict[str, Any]:
    """Return the one document of a file as plain values, with its merges; an empty file is an empty one.

    Raises ConfigError, with the line where there is one, also for numbers that are infinite or none.
    """
    roots = compose(text, source, has_merges=True)
    if len(roots) > 1:
        line = roots[1].start_mark.line + 1
        raise ConfigError(f"holds {len(roots)} documents; it may be one", source=source, line=line)
    try:
        value = plain(roots[0]) if roots else {}
    except Unreadable as error:
        raise ConfigError(str(error), source=source, line=error.line) from None
    if not isinstance(value, dict):
        # A tag can make anything of a mapping: !!set, !!str.
        raise ConfigError("a document must be a mapping", source=source, line=roots[0].start_mark.line + 1)
    _check_finite(value, source, "")
    return value


def _check_finite(value: Any, source: str, path: str) -> None:
    if isinstance(value, dict):
        for key, each in value.items():
            _check_finite(each, source, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple | set):
        for at, each in enumerate(value):
            _check_finite(each, source, f"{path}[{at}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"must be a finite number, got {value}", source=source, path=path)


class Unreadable(ValueError):
    """A text that has no value.  line: where it stands, 1-based."""

    def __init__(self, node: yaml.Node, error: Exception) -> None:
        problem = str(getattr(error, "problem", None) or error).partition("\n")[0]
        super().__init__(f"cannot be read: {problem}")
        self.line = node.start_mark.line + 1


class _Constructor(yaml.constructor.SafeConstructor):
    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)
        except Unreadable:
            raise
        except _NO_VALUE as error:
            raise Unreadable(node, error) from None


def plain(node: yaml.Node) -> Any:
    """Return the value of a node.  Raises Unreadable for a text that has none: 2026-13-40, `!!bool maybe`."""
    try:
        return _Constructor().construct_document(node)
    except Unreadable:
        raise
    except _NO_VALUE as error:
        raise Unreadable(node, error) from None


def is_null(node: yaml.Node) -> bool:
    """Whether a node is nothing."""
    return isinstance(node, yaml.ScalarNode) and node.tag == _NULL


def check_bounds(root: yaml.Node, source: str) -> None:
    """Raise ConfigError for a tree that is too deep, contains itself, or unfolds to too much, and for NUL characters.

    No name or path may have these, and those who open files answer them with a fault.
    """
    left = MAX_NODES

    def walk(node: yaml.Node, depth: int) -> None:
        nonlocal left
        left -= 1
        line = node.start_mark.line + 1
        if left < 0:
            raise ConfigError(f"stands for more than {MAX_NODES:,} values", source=source, line=line)
        if depth > MAX_DEPTH:
            raise ConfigError("is nested too deep, or contains itself", source=source, line=line)
        if isinstance(node, yaml.ScalarNode) and "\0" in node.value:
            raise ConfigError("a text must have no NUL character", source=source, line=line)
        if isinstance(node, yaml.SequenceNode):
            for item in node.value:
                walk(item, depth + 1)
        elif isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                walk(key, depth + 1)
                walk(value, depth + 1)

    walk(root, 0)


def check_keys(node: yaml.Node, source: str, path: str = "", *, has_merges: bool = False) -> None:
    """Refuse duplicate, compound and merge keys, which YAML loaders drop or join without a word."""
    if isinstance(node, yaml.SequenceNode):
        for at, item in enumerate(node.value):
            check_keys(item, source, f"{path}[{at}]", has_merges=has_merges)
    elif isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError("a key must be a plain string", source=source, line=line, path=path)
            here = f"{path}.{key.value}" if path else key.value
            if key.tag == _MERGE and not has_merges:
                raise ConfigError("merge keys (<<) are not read; write the fields out", source=source, line=line)
            if key.value in seen:
                first = seen[key.value]
                raise ConfigError(f"duplicate key, first in line {first}", source=source, line=line, path=here)
            seen[key.value] = line
            check_keys(value, source, here, has_merges=has_merges)
