"""The backends file: YAML that lists engines, in Shoal's own form or in llm-d's file-discovery form.

Ours is a list of `{url, name, engine, labels, api_key_file, ca_file, kv_events, kv_replay}`, bare or under `backends:`;
llm-d's is `endpoints: [{name, namespace, address, port, labels}]`.  Entries of both forms may stand in either place.
A bad entry is reported with its line and left out; only a file that is no such list at all is an error.
"""

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import yaml

from shoal.hosts.backends import read_api_key
from shoal.hosts.fleet.publishers import kv_addresses
from shoal.hosts.fleet.targets import Target, join_address, parse_url
from shoal.kernel import ConfigError
from shoal.wire.documents import Loader, check_bounds, check_keys, is_null, plain

_LISTS = ("backends", "endpoints")


class _OurEntry(msgspec.Struct, kw_only=True):
    url: str
    name: str = ""
    engine: str = ""
    labels: dict[str, str] | None = None
    api_key_file: str = ""
    ca_file: str = ""
    kv_events: int | str | list[int | str] | None = None
    kv_replay: int | str | list[int | str] | None = None


class _LlmdEntry(msgspec.Struct, kw_only=True):
    name: str
    address: str
    port: str | int
    namespace: str = "default"
    labels: dict[str, str] | None = None


def parse_backends(data: bytes, path: Path) -> tuple[list[Target], list[ConfigError]]:
    """Return the targets in order, and one error per entry that was left out.

    Raises ConfigError when the document is no list of backends.  Reads the key files that entries name.
    """
    loader = Loader(data)
    try:
        root = loader.get_single_node()
        if root is not None:
            check_bounds(root, str(path))
        items = _items(root, str(path))
        targets: list[Target] = []
        problems: list[ConfigError] = []
        lines: dict[str, int] = {}
        for position, node in enumerate(items):
            line = node.start_mark.line + 1
            try:
                check_keys(node, "", has_merges=True)
                target = _target(plain(node), path.parent)
                key = target.name or target.url
                if key in lines:
                    raise ConfigError(f"{key!r} is already named in line {lines[key]}")
            except (ConfigError, ValueError) as error:
                problems.append(ConfigError(_reason(error), source=str(path), line=line, path=f"entry {position + 1}"))
                continue
            lines[key] = line
            targets.append(target)
        return targets, problems
    except (yaml.YAMLError, UnicodeError) as error:
        mark = getattr(error, "problem_mark", None)
        raise ConfigError(
            f"is not YAML: {_reason(error)}", source=str(path), line=mark.line + 1 if mark else 0
        ) from None
    except RecursionError:
        raise ConfigError("is nested too deep", source=str(path)) from None
    finally:
        loader.dispose()


def _reason(error: Exception) -> str:
    """What is wrong, on one line."""
    if isinstance(error, ConfigError):
        return error.message
    return str(getattr(error, "problem", None) or error).partition("\n")[0]


def _items(root: yaml.Node | None, source: str) -> list[yaml.Node]:
    """The nodes of the entries; an empty file has none."""
    if root is None:
        return []
    if isinstance(root, yaml.MappingNode):
        found = {key.value: value for key, value in root.value if isinstance(key, yaml.ScalarNode)}
        if "kind" in found:
            raise ConfigError("has a `kind`: give a configuration with --config", source=source, line=1)
        if not found.keys() & set(_LISTS):
            hint = near(found, _LISTS)
            raise ConfigError(f"expected a list of backends, or one under `backends:`{hint}", source=source, line=1)
        return [item for name in _LISTS if name in found for item in _list(found[name], source)]
    return _list(root, source)


def _list(node: yaml.Node, source: str) -> list[yaml.Node]:
    if isinstance(node, yaml.SequenceNode):
        return list(node.value)
    if is_null(node):
        return []
    raise ConfigError("expected a list of backends", source=source, line=node.start_mark.line + 1)


def _target(entry: Any, folder: Path) -> Target:
    """Read one entry of either form.  Raises ConfigError or msgspec.ValidationError."""
    if isinstance(entry, dict) and "address" in entry and "url" not in entry:
        theirs = msgspec.convert(entry, _LlmdEntry)
        port = int(theirs.port) if str(theirs.port).isdecimal() else 0
        url = f"http://{join_address(theirs.address, port)}"
        return parse_url(url, name=f"{theirs.namespace}/{theirs.name}", labels=theirs.labels)
    if isinstance(entry, dict):
        known = _OurEntry.__struct_fields__
        for name in entry:
            if name not in known:
                hint = near([str(name)], known) or f"; known are {', '.join(known)}"
                raise ConfigError(f"unknown field {str(name)[:80]!r}{hint}")
    ours = msgspec.convert(entry, _OurEntry)
    kv_events, kv_replay = kv_addresses(ours.kv_events, ours.kv_replay)
    target = parse_url(
        ours.url,
        name=ours.name,
        engine=ours.engine,
        labels=ours.labels,
        api_key=read_api_key(folder / ours.api_key_file) if ours.api_key_file else "",
        ca_file=str(_existing(folder / ours.ca_file)) if ours.ca_file else "",
    )
    return msgspec.structs.replace(target, kv_events=kv_events, kv_replay=kv_replay)


def near(names: Iterable[str], known: Iterable[str]) -> str:
    """Return `; did you mean X?` for the first name that resembles a known one, "" when none does."""
    for name in names:
        if found := difflib.get_close_matches(name.lower(), known, n=1):
            return f"; did you mean {found[0]}?"
    return ""


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise ConfigError(f"CA file {path} does not exist")
    return path
