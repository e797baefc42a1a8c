"""Log lines of every Shoal process: readable `key=value` text, or one JSON object per line.

Owns the format, the level and the one handler on stderr.  What is worth a line is for the caller; prompt text
never is.  Records of other libraries that log through `logging` come out in the same shape.
"""

import json
import logging
import sys
import time
from typing import TextIO

TEXT = "text"
JSON = "json"
FORMATS = (TEXT, JSON)

_ROOT = "shoal"
_QUOTED = set(' "=\\') | {chr(code) for code in range(32)}


class Log:
    """A named logger whose methods take fields: `log.info("worker started", picker="0", pid=12)`."""

    __slots__ = ("_logger",)

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(f"{_ROOT}.{name}")

    def debug(self, message: str, /, **fields: object) -> None:
        """Log what only somebody who looks for a fault wants to read."""
        self._emit(logging.DEBUG, message, fields)

    def info(self, message: str, /, **fields: object) -> None:
        """Log what an operator wants to know."""
        self._emit(logging.INFO, message, fields)

    def warning(self, message: str, /, **fields: object) -> None:
        """Log what an operator should look at."""
        self._emit(logging.WARNING, message, fields)

    def error(self, message: str, /, **fields: object) -> None:
        """Log what an operator must repair."""
        self._emit(logging.ERROR, message, fields)

    def exception(self, message: str, fault: BaseException | None = None, /, **fields: object) -> None:
        """Log a bug with the traceback of `fault`, or of the exception being handled."""
        self._emit(logging.ERROR, message, fields, fault or True)

    def _emit(
        self, level: int, message: str, fields: dict[str, object], fault: BaseException | bool | None = None
    ) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, "%s", message, extra={"fields": fields}, exc_info=fault)


class TextFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.123Z INFO  supervisor: worker started picker=0 pid=12`."""

    def format(self, record: logging.LogRecord) -> str:
        parts = [
            f"{_stamp(record.created)} {record.levelname:<7} {_short(record.name)}: {_one_line(record.getMessage())}"
        ]
        parts += [f"{key}={_value(value)}" for key, value in _fields(record).items()]
        line = " ".join(parts)
        if record.exc_info:
            line = f"{line}\n{self.formatException(record.exc_info)}"
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, message, then the fields."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": _stamp(record.created),
            "level": record.levelname.lower(),
            "logger": _short(record.name),
            "message": record.getMessage(),
        }
        for key, value in _fields(record).items():
            entry[key if key not in entry else f"{key}_"] = value
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def setup(log_format: str = TEXT, level: str = "info", stream: TextIO | None = None) -> None:
    """Send every log line of this process to `stream` (stderr) in the given format; safe to call again."""
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == JSON else TextFormatter())
    root = logging.getLogger()
    for old in list(root.handlers):
        if getattr(old, "is_shoal", False):
            root.removeHandler(old)
    handler.is_shoal = True  # type: ignore[attr-defined]
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger(_ROOT).setLevel(level.upper())


def get(name: str) -> Log:
    """Return the log of one part, as `get("supervisor")`."""
    return Log(name)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields = getattr(record, "fields", None)
    return fields if isinstance(fields, dict) else {}


def _short(name: str) -> str:
    return name.removeprefix(f"{_ROOT}.")


def _stamp(created: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(created)) + f".{int(created * 1000) % 1000:03d}Z"


def _one_line(text: str) -> str:
    return text.replace("\r", "\\r").replace("\n", "\\n")


def _value(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    if not text or not _QUOTED.isdisjoint(text):
        return json.dumps(text, ensure_ascii=False)
    return text
