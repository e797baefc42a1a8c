"""The sources of the fleet that flags and configuration name, for a pool and for a picker alone.

What a source does is `hosts.fleet`; the engines that the configuration lists itself are `configured`.
"""

from collections.abc import Sequence
from pathlib import Path

from shoal.hosts.fleet import FileSource, Source, StaticSource, parse_url
from shoal.routing.config import RouterConfig


def named_sources(backends: Sequence[str], backends_file: Path | None, config: RouterConfig) -> list[Source]:
    """Return them in the order in which they count.  Raises ConfigError for a URL that is none."""
    sources: list[Source] = []
    if backends:
        sources.append(StaticSource([parse_url(url) for url in backends]))
    if backends_file is not None:
        sources.append(FileSource(backends_file))
    if config.discovery is not None:
        sources.append(FileSource(Path(config.discovery.path)))
    return sources
