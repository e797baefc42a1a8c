"""What values of flags may be, files that a verb writes its figures to, and the examples of a part of a verb.

Owns what several verbs share; which flags there are stands in each verb's own module.
"""

import argparse
import math
from pathlib import Path

from shoal.kernel import ConfigError

__all__ = ["check_report", "examples_of", "seconds", "seed", "write_report"]

_LARGEST_SEED = 2**63 - 1


def examples_of(text: str, command: str) -> str:
    """Return those of a verb's examples that begin with a command, for the help of that part alone."""
    return "\n".join(["examples:", *(line for line in text.splitlines() if line.startswith(f"  {command} "))])


def seed(text: str) -> int:
    """Read the seed of random choices, 0 to 2**63 - 1.  Raises ArgumentTypeError."""
    try:
        number = int(text)
    except ValueError:
        number = -1
    if not 0 <= number <= _LARGEST_SEED:
        raise argparse.ArgumentTypeError(f"must be a whole number of 0 to 2**63 - 1, not {text!r}")
    return number


def seconds(text: str) -> float:
    """Read a duration as `30`, `30s`, `500ms` or `2m` and return seconds, 0 or more.  Raises ArgumentTypeError."""
    for unit, factor in (("ms", 0.001), ("s", 1.0), ("m", 60.0), ("", 1.0)):
        if text.endswith(unit):
            try:
                number = float(text.removesuffix(unit)) * factor
            except ValueError:
                break
            if not 0 <= number < math.inf:
                raise argparse.ArgumentTypeError(f"must be 0 or more and finite, not {text!r}")
            return number
    raise argparse.ArgumentTypeError(f"{text!r} is no duration; write 30s, 500ms or 2m")


def check_report(path: Path | None) -> None:
    """Raise ConfigError when no file can be made at `path`, so that a long run does not end in nothing."""
    if path is None:
        return
    if path.is_dir():
        raise ConfigError("is a directory; name a file", source=str(path))
    if not path.parent.is_dir():
        raise ConfigError(f"cannot be written: there is no directory {path.parent}", source=str(path))


def write_report(path: Path, data: bytes) -> None:
    """Write the figures of a run.  Raises ConfigError when the file cannot be written."""
    try:
        path.write_bytes(data)
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror}", source=str(path)) from None
