"""The configuration file of a running pool: the last text that was good, and how it is replaced.

Workers are given a copy of the accepted text, so one that restarts while the file is being edited starts with what
the others run.  What the text means is `routing.config`.
"""

from collections.abc import AsyncIterator
from pathlib import Path

from shoal.hosts.filewatch import WatchedFile
from shoal.kernel import ConfigError
from shoal.routing.config import RouterConfig, load

ACCEPTED = "config.yaml"
"""Name of the copy in the run directory."""


class Configuration:
    """The accepted configuration.  Raises ConfigError when the file is bad at the start.

    path: None for the defaults.  at_start: what the pool was started with.
    """

    def __init__(self, path: Path | None) -> None:
        self._file = WatchedFile(path) if path is not None else None
        self.text, self.config = self._read()
        self.at_start = self.config

    @property
    def source(self) -> str:
        """Where it comes from, for log lines."""
        return str(self._file.path) if self._file is not None else "built-in defaults"

    def accept_into(self, run_dir: Path) -> Path:
        """Write the accepted text where workers read it; returns the path."""
        path = run_dir / ACCEPTED
        fresh = path.with_suffix(".new")
        fresh.write_text(self.text)
        fresh.replace(path)
        return path

    def candidate(self) -> tuple[str, RouterConfig]:
        """Read and validate the file without accepting it.  Raises ConfigError."""
        return self._read()

    def accept(self, text: str, config: RouterConfig) -> None:
        """Make a candidate the accepted configuration."""
        self.text, self.config = text, config

    async def changes(self) -> AsyncIterator[None]:
        """Yield after each change of the file, until cancelled; never without a file."""
        if self._file is not None:
            async for _ in self._file.changes():
                yield

    def _read(self) -> tuple[str, RouterConfig]:
        if self._file is None:
            return "", load("", "default")
        raw = self._file.read()
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            raise ConfigError("is not UTF-8 text", source=str(self._file.path)) from None
        return text, load(text, str(self._file.path))
