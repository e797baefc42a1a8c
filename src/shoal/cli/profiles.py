"""Profiles as users name them: by a name of the catalogue, or by the path of a file of their own."""

from pathlib import Path

from shoal.engine import Profile, find_profile
from shoal.engine.profilefile import parse_profile
from shoal.kernel import ConfigError

__all__ = ["profile_named"]

_MAX_BYTES = 64 << 10


def profile_named(name: str, source: str) -> Profile:
    """Return a profile.  source: the flag that names it.  Raises ConfigError."""
    path = Path(name)
    if path.suffix not in (".yaml", ".yml", ".json"):
        try:
            return find_profile(name)
        except ValueError as error:
            raise ConfigError(f"{error}; or name a .yaml file", source=source) from None
    try:
        with path.open() as file:
            return parse_profile(file.read(_MAX_BYTES), str(path))
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", source=str(path)) from None
    except UnicodeDecodeError:
        raise ConfigError("is no text in UTF-8", source=str(path)) from None
