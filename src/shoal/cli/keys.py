"""`shoal keys`: make API keys, and check a keys file.

A new key is printed once and kept nowhere; the file holds only its hash.
"""

import argparse
import os
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.hosts.keys import new_key, parse_keys
from shoal.kernel import ConfigError

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parser(subparsers: "Subparsers") -> None:
    """Add the verb and its two actions."""
    parser = subparsers.add_parser("keys", help="make API keys and check a keys file")
    actions = parser.add_subparsers(dest="action", required=True)
    new = actions.add_parser("new", help="print a new random key once, and the line for the keys file")
    new.add_argument("name", help="who the key is for; shown in logs and metrics")
    new.add_argument("--file", type=Path, help="append the line to this keys file (made if missing, mode 600)")
    new.set_defaults(run=run_new)
    check = actions.add_parser("check", help="validate a keys file and list its names")
    check.add_argument("file", type=Path)
    check.set_defaults(run=run_check)


def run_new(args: argparse.Namespace) -> int:
    """Print a key and its line; with --file, append the line there."""
    try:
        key, line = new_key(args.name)
        if args.file is not None:
            _append(args.file, line)
    except ConfigError as error:
        print(f"shoal keys: {error}", file=sys.stderr)
        return 2
    print(f"key (shown only now): {key}")
    print(f"appended to {args.file}" if args.file is not None else f"line for the keys file: {line}")
    return 0


def run_check(args: argparse.Namespace) -> int:
    """Say which names a keys file lets in, or which line is wrong."""
    try:
        data = args.file.read_bytes()
        entries = parse_keys(data, str(args.file))
    except OSError as error:
        print(f"shoal keys: {args.file}: {error.strerror}", file=sys.stderr)
        return 2
    except ConfigError as error:
        print(f"shoal keys: {error}", file=sys.stderr)
        return 2
    for name, count in sorted(Counter(name for _, name in entries).items()):
        print(f"{name}: {count} {'key' if count == 1 else 'keys'}")
    if not entries:
        print("no key: every request would be refused")
    return 0


def _append(path: Path, line: str) -> None:
    """Append `line` with one write, on a line of its own.  Raises ConfigError."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            size = os.fstat(handle).st_size
            is_open_line = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
            os.write(handle, (("\n" if is_open_line else "") + line + "\n").encode())
        finally:
            os.close(handle)
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror}", source=str(path)) from None
