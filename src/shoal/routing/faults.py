"""Every error of a configuration file, for those who mend it: what `config.load` would say one at a time.

Reads, notes the error, cuts out what it is about, and reads again.  What is wrong only because of an earlier cut is
not told.
"""

import re
from collections.abc import Iterator

import yaml

from shoal.kernel import ConfigError
from shoal.routing.config import read
from shoal.scheduling import Registry
from shoal.wire.documents import compose

MAX_FAULTS = 50

_STEP = re.compile(r"\[(\d+)\]|([^.\[\]]+)")


def faults(text: str, source: str, registry: Registry | None = None) -> list[ConfigError]:
    """Return the errors by line, none for a good file.  Parameters are those of `load`."""
    return sorted(_found(text, source, registry), key=lambda error: error.line)


def _found(text: str, source: str, registry: Registry | None) -> list[ConfigError]:
    try:
        roots = compose(text, source)
    except ConfigError as error:
        return [error]
    cuts = _Cuts(roots)
    found: list[ConfigError] = []
    while len(found) < MAX_FAULTS:
        try:
            read(roots, source, registry)
        except ConfigError as error:
            place = cuts.place(error)
            if place is None:
                return [*found, error]
            if not cuts.explains(error, place):
                found.append(ConfigError(error.message, source=source, line=error.line, path=cuts.path_of(place)))
            cuts.cut(place if error.path not in ("kind", "apiVersion") else cuts.document_of(place))
            continue
        return found
    return found


class _Place:
    """Where an error is: a node, what holds it, and the key of a mapping's value."""

    __slots__ = ("holder", "key", "node")

    def __init__(self, node: yaml.Node, holder: yaml.Node | None, key: yaml.Node | None) -> None:
        self.node = node
        self.holder = holder
        self.key = key


class _Cuts:
    """The documents of a file, from which bad parts are taken.  made: paths of what was cut."""

    def __init__(self, roots: list[yaml.MappingNode]) -> None:
        self.made: list[str] = []
        self._roots = roots
        self._paths: dict[int, str] = {}
        self._names: set[str] = set()
        for root in roots:
            # Paths as they are in the file: those of errors shift when an item of a list is cut.
            self._paths.update((id(node), path) for path, node in _walk(root, ""))
        self._kept = list(roots)  # so that no id is used twice

    def place(self, error: ConfigError) -> _Place | None:
        """Find what an error is about, None when it is about nothing that could be cut."""
        for root in self._roots:
            found = _descend(root, error.path)
            if found is not None and error.line in (found.node.start_mark.line + 1, _line(found.key), 0):
                return found
        return None

    def path_of(self, place: _Place) -> str:
        """The path of a place in the whole file."""
        return self._paths[id(place.node)]

    def explains(self, error: ConfigError, place: _Place) -> bool:
        """Whether an error comes from an earlier cut: inside of it something is missing, or it names what is gone."""
        path = self.path_of(place)
        is_reference = path.endswith("luginRef") and isinstance(place.node, yaml.ScalarNode)
        if is_reference and place.node.value in self._names:
            return True
        inside = [made for made in self.made if made.startswith(path) and made != path]
        return bool(inside) and error.message.endswith("is missing")

    def document_of(self, place: _Place) -> _Place:
        """The document that a place directly in it belongs to: without its kind it means nothing."""
        return _Place(place.holder or place.node, None, None)

    def cut(self, place: _Place) -> None:
        """Take the place out of what is read."""
        self.made.append(self.path_of(place))
        holder = place.holder
        self._names.update(_names(place.node), _names(holder))
        if holder is None:
            self._roots.remove(place.node)  # type: ignore[arg-type]
        elif isinstance(holder, yaml.MappingNode):
            holder.value = [pair for pair in holder.value if pair[0] is not place.key]
        else:
            holder.value = [item for item in holder.value if item is not place.node]


def _descend(root: yaml.MappingNode, path: str) -> _Place | None:
    place = _Place(root, None, None)
    for step in _STEP.finditer(path):
        holder = place.node
        if step[1] is not None:
            if not isinstance(holder, yaml.SequenceNode) or int(step[1]) >= len(holder.value):
                return None
            place = _Place(holder.value[int(step[1])], holder, None)
        else:
            pairs = holder.value if isinstance(holder, yaml.MappingNode) else []
            found = next(((key, value) for key, value in pairs if key.value == step[2]), None)
            if found is None:
                return None
            place = _Place(found[1], holder, found[0])
    return place


def _walk(node: yaml.Node, path: str) -> Iterator[tuple[str, yaml.Node]]:
    yield path, node
    if isinstance(node, yaml.SequenceNode):
        for at, item in enumerate(node.value):
            yield from _walk(item, f"{path}[{at}]")
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from _walk(value, f"{path}.{key.value}" if path else str(key.value))


def _names(node: yaml.Node | None) -> set[str]:
    """By which name others may refer to a plugin."""
    if not isinstance(node, yaml.MappingNode):
        return set()
    return {value.value for key, value in node.value if key.value in ("type", "name") and value.id == "scalar"}


def _line(node: yaml.Node | None) -> int:
    return node.start_mark.line + 1 if node is not None else 0
