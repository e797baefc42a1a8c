"""The command line: one thin module per verb.

`main` knows the verbs by name and one line each, and imports only the one that was asked for.  A verb module has
`add_parser(subparsers)`, which sets `run`, a function from parsed arguments to the exit status.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence

from shoal import __version__

__all__ = ["VERBS", "main"]

VERBS = {
    "up": "run a pool in the foreground: engines or backends, picker workers, Envoy",
    "status": "show the fleet live: endpoints, load, cache hits, requests/s",
    "explain": "say why a request went where it went",
    "endpoint": "add, drain, remove, pause, resume or reset endpoints of the running pool",
    "abort": "end the requests of a session, at the clients and at the engines",
    "check": "validate a configuration and print it with its defaults",
    "engine": "run one embedded engine (no GPU needed)",
    "picker": "run the picker alone, for somebody else's Envoy or gateway",
    "replay": "run a journal again and compare every decision",
    "twin": "try policies, fleets and recorded days in virtual time",
    "keys": "make API keys and the hashes that the pool keeps",
    "demo": "see the main job work: round-robin against cache-aware routing",
    "docs": "write the reference of plugins, or of settings, from the code",
}

_INTERRUPTED = 130
_WRONG_USE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit status: 0 done, 1 found wanting, 2 cannot be done, 130 interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if not words:
            _parser(words).print_help()
            return _WRONG_USE
        arguments = _parser(words).parse_args(words)
        return int(arguments.run(arguments))
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:  # `shoal status --json | head -1`
        sys.stderr.close()
        return 0
    except Exception as error:
        from shoal.kernel import ShoalError

        if not isinstance(error, ShoalError):
            raise
        print(f"shoal: {error}", file=sys.stderr)
        return _WRONG_USE


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shoal",
        description="One OpenAI-compatible endpoint in front of many vLLM or SGLang engines, with cache-aware routing.",
        epilog="`shoal VERB --help` shows flags and examples.  First try: shoal up --engines 4",
    )
    parser.add_argument("--version", action="version", version=f"shoal {__version__}")
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    asked = next((word for word in words if not word.startswith("-")), "")
    for verb, line in VERBS.items():
        if verb == asked:
            importlib.import_module(f"shoal.cli.{verb}").add_parser(verbs)
        else:
            verbs.add_parser(verb, help=line)
    return parser
