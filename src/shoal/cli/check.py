"""`shoal check`: validate a configuration and print it with every default filled in."""

import argparse
import sys
from pathlib import Path

import msgspec
import yaml

from shoal.hosts.supervisor.preflight import preflight
from shoal.kernel import ConfigError
from shoal.routing.config import effective, load
from shoal.routing.faults import faults
from shoal.wire.documents import compose

EXAMPLES = """\
examples:
  shoal check pool.yaml            # the effective configuration, or every error with its line
  shoal check pool.yaml --json     # the same for machines
  shoal check - < pool.yaml        # from standard input
"""

_BAD = 2


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the verb."""
    parser = subparsers.add_parser(
        "check",
        help="validate a configuration and print it with its defaults",
        description="Validate a configuration file and print the effective one, defaults included.  Exit status 2 and\n"
        "one line per error, with file, line and path, when it is wrong; warnings go to standard error.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", metavar="FILE", help="the configuration; - for standard input")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Check one file; 0 when it is good, 2 when it is not."""
    try:
        text, source = _text(arguments.file)
        errors = faults(text, source)
        if not errors:
            config = load(text, source)
            preflight(config.pool)
    except ConfigError as error:
        errors = [error]
    if errors:
        return _refuse(errors, arguments.json)
    warnings = list(config.warnings)
    if not compose(text, source):
        warnings.append(f"{source}: holds no document, so everything is as it is by default")
    if arguments.json:
        documents = list(yaml.safe_load_all(effective(config)))
        _print_json({"ok": True, "warnings": warnings, "documents": documents})
        return 0
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    sys.stdout.write(effective(config))
    return 0


def _refuse(errors: list[ConfigError], as_json: bool) -> int:
    if as_json:
        places = [
            {"source": each.source, "line": each.line, "path": each.path, "message": each.message} for each in errors
        ]
        _print_json({"ok": False, "errors": places})
    else:
        for error in errors:
            print(f"shoal: {error}", file=sys.stderr)
    return _BAD


def _text(file: str) -> tuple[str, str]:
    """Return the text and what to call it in errors."""
    try:
        if file == "-":
            return sys.stdin.read(), "stdin"
        return Path(file).read_text(encoding="utf-8"), file
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", source=file) from None
    except UnicodeDecodeError:
        raise ConfigError("is not UTF-8 text", source=file) from None


def _print_json(value: object) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")
