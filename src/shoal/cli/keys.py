"""`shoal keys`: make API keys, and check a keys file.

A new key is printed once and kept nowhere; the file holds only its hash.
"""

import argparse
import os
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli import flags
from shoal.hosts.keys import new_key, parse_keys
from shoal.hosts.sharing import new_secret
from shoal.kernel import ConfigError

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_EXAMPLES = """examples:
  shoal keys new alice --file keys.txt   make a key, add its hash to the file, print the key once
  shoal keys new alice --file keys.txt   once more: a second key of the same name, to replace the first without a gap
  shoal keys new alice                   print the line, for a file that is kept elsewhere
  shoal keys secret pool.secret          make the secret that pickers of several pools share (docs/sharing.md)
  shoal keys check keys.txt              validate the file and list its names

The pool reads the file that `auth: {keys_file: ...}` of its configuration names, and reads it again when it changes.
"""


def add_parser(subparsers: "Subparsers") -> None:
    """Add the verb and its actions."""
    parser = subparsers.add_parser(
        "keys",
        help="make API keys and check a keys file",
        description="Make API keys for the clients of a pool, and check the file that holds their hashes.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", required=True)
    new = actions.add_parser("new", help="print a new random key once, and the line for the keys file")
    new.add_argument("name", help="who the key is for; shown in logs and metrics")
    new.add_argument("--file", type=Path, help="append the line to this keys file (made if missing, mode 600)")
    new.set_defaults(run=run_new)
    secret = actions.add_parser("secret", help="make the secret that pickers of several pools share, in a new file")
    secret.add_argument("file", type=Path, help="the file; must not be there yet")
    secret.set_defaults(run=run_secret)
    check = actions.add_parser("check", help="validate a keys file and list its names")
    check.add_argument("file", type=Path, help="the keys file")
    check.set_defaults(run=run_check)
    for name, action in (("new", new), ("secret", secret), ("check", check)):
        action.epilog = flags.examples_of(_EXAMPLES, f"shoal keys {name}")
        action.formatter_class = argparse.RawDescriptionHelpFormatter


def run_new(args: argparse.Namespace) -> int:
    """Print a key and its line; with --file, append the line there."""
    path, count = args.file, 1
    try:
        key, line = new_key(args.name)
        if path is not None:
            count += _keys_of(args.name, path)
            _append(path, line)
    except ConfigError as error:
        print(f"shoal keys: {error}", file=sys.stderr)
        return 2
    print(f"key (shown only now): {key}")
    print(f"appended to {path}" if path is not None else f"line for the keys file: {line}")
    if count > 1:
        print(f"{args.name} has {count} keys now, and each lets in; delete the line of the one that is replaced")
    return 0


def run_secret(args: argparse.Namespace) -> int:
    """Write a new secret for `sharing.secret_file`."""
    try:
        new_secret(args.file)
    except ConfigError as error:
        print(f"shoal keys: {error}", file=sys.stderr)
        return 2
    print(f"wrote {args.file}; give it to every pool that shares, as sharing.secret_file")
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


def _keys_of(name: str, path: Path) -> int:
    """Return how many keys of that name a file holds, 0 when there is no file.  Raises ConfigError."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", source=str(path)) from None
    return sum(known == name for _, known in parse_keys(data, str(path)))


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
