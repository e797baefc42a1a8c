"""The engines that the configuration file names, as a source of the fleet that a reload can change.

Owns the list.  What an engine is, is `hosts.fleet`.
"""

from collections.abc import Callable, Sequence

from shoal.hosts.fleet import Target


class ConfiguredBackends:
    """A `Source` whose targets are replaced as a whole."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self._targets = tuple(targets)
        self._changed: Callable[[], None] = lambda: None

    def targets(self) -> Sequence[Target]:
        """The list of the accepted configuration."""
        return self._targets

    async def watch(self, changed: Callable[[], None]) -> None:
        """Call `changed` from now on, and return."""
        self._changed = changed

    def replace(self, targets: Sequence[Target]) -> None:
        """Take over the list of a reload."""
        if tuple(targets) != self._targets:
            self._targets = tuple(targets)
            self._changed()
