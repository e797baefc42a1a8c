"""The files that a running pool reads: whether each is still there and good, for the log and for status.

Owns looking at them now and then.  Each is read by its own reader (workers, sources, the data plane), which keeps what
it read last when a file is gone or bad; here the operator is told.
"""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from shoal.hosts import logs
from shoal.hosts.filewatch import WatchedFile
from shoal.hosts.fleet.backendsfile import parse_backends
from shoal.hosts.keys import parse_keys
from shoal.kernel import ConfigError
from shoal.routing.config import RouterConfig

LOOK_S = 1.0

Check = Callable[[bytes], object]


class Input(NamedTuple):
    """A file of a pool.  what: as an operator calls it.  check: raises ConfigError for bad content, None looks not."""

    what: str
    path: Path
    check: Check | None = None


class Inputs:
    """Looks at the files that `wanted` names, which may change with a reload."""

    def __init__(self, wanted: Callable[[], Sequence[Input]]) -> None:
        self._wanted = wanted
        self._files: dict[Path, WatchedFile] = {}
        self._problems: dict[Path, str] = {}
        self._log = logs.get("supervisor")

    @property
    def warnings(self) -> list[str]:
        """One line per file that cannot be read or used now."""
        return list(self._problems.values())

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.to_thread(self.look)
            await asyncio.sleep(LOOK_S)

    def look(self) -> None:
        """Look once, and log what changed."""
        wanted = {each.path: each for each in self._wanted()}
        self._files = {path: self._files.get(path) or WatchedFile(path) for path in wanted}
        problems = {path: problem for path, each in wanted.items() if (problem := self._problem(each))}
        before, self._problems = self._problems, problems
        for path, problem in problems.items():
            if before.get(path) != problem:
                self._log.warning(problem)
        for path in before.keys() - problems.keys():
            if path in wanted:
                self._log.info(f"the {wanted[path].what} {path} can be read again")

    def _problem(self, of: Input) -> str:
        file = self._files[of.path]
        if of.path.exists() and not file.is_changed():
            return self._problems.get(of.path, "")
        try:
            data = file.read()
            if of.check is not None:
                of.check(data)
        except ConfigError as error:
            kept = "what was read last stays in use, and what starts anew needs it"
            if not of.path.exists():
                return f"the {of.what} {of.path} is gone: {kept}"
            return f"the {of.what} cannot be used: {error}; what was read last stays in use"
        return ""


def inputs_of(config_path: Path | None, backends_path: Path | None, config: RouterConfig) -> list[Input]:
    """Return the files that flags and configuration name; what is wrong in a configuration is said by its reload."""
    found = []
    if config_path is not None:
        found.append(Input("configuration file", config_path))
    if backends_path is not None:
        found.append(Input("backends file", backends_path, lambda data: parse_backends(data, backends_path)))
    if config.discovery is not None:
        path = Path(config.discovery.path)
        found.append(Input("endpoints file", path, lambda data: parse_backends(data, path)))
    if config.pool.auth.keys_file:
        keys = Path(config.pool.auth.keys_file)
        found.append(Input("keys file", keys, lambda data: parse_keys(data, str(keys))))
    if config.pool.tls is not None:
        found.append(Input("certificate", Path(config.pool.tls.cert)))
        found.append(Input("private key", Path(config.pool.tls.key)))
    return found
