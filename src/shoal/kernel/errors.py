"""The error tree.

    ShoalError
    ├── ClockWentBack     a host fed a machine an older time: a bug in the host
    ├── ConfigError       a file or flag is wrong; says where and what to do
    └── InvalidInput      bytes from outside that cannot be read; says why, holds no prompt text

Refusals of a request are values (`pool.Refusal`), not exceptions.
"""

import msgspec

UNREADABLE = (msgspec.MsgspecError, RecursionError)
"""What reading bytes from outside raises: nested too deep for the interpreter, they raise no error of msgspec's own."""


class ShoalError(Exception):
    """Root of every error that Shoal raises on purpose."""


class ClockWentBack(ShoalError):
    """A machine was given a time before the last one."""

    def __init__(self, now: float, last: float) -> None:
        super().__init__(f"time went back: {now} after {last}")


class ConfigError(ShoalError):
    """A configuration cannot be used.

    source: file name or flag.  line: 1-based, 0 when unknown.  path: where in the document, as
    `plugins[2].parameters.weight`, "" for the whole document.
    """

    def __init__(self, message: str, *, source: str = "", line: int = 0, path: str = "") -> None:
        self.message = message
        self.source = source
        self.line = line
        self.path = path
        place = f"{source}:{line}" if source and line else source or (f"line {line}" if line else "")
        super().__init__(": ".join(part for part in (place, path, message) if part))


class InvalidInput(ShoalError):
    """Bytes from a client, an engine or a file that cannot be read as what they claim to be."""
