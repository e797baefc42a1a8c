"""`shoal abort --session ID`: end every request of a session.

Owns what is said.  The pool itself does the work.
"""

import argparse
import sys

from shoal.cli.status import add_pool_flags
from shoal.hosts.admin import find_pool

_EXAMPLES = """examples:
  shoal abort --session agent-7                 all requests that carry this session id, running or waiting
  shoal abort --session agent-7 --tenant team-a only those of this tenant

The session id is what clients send as x-session-id, x-claude-code-session-id, x-session-affinity, session-id or
session_id.  A later request of the session is served like any other.  Exit status: 0 done, also when there was none; 1
when a picker did not answer.
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "abort",
        help="end the requests of a session",
        description="End every request of a session: its clients see the answer end or break off, its engines stop "
        "computing it.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--session", metavar="ID", required=True, help="the session's id")
    parser.add_argument(
        "--tenant", metavar="NAME", help="only requests of this tenant (its key's name where keys are on)"
    )
    add_pool_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Abort; returns 0 when done, 1 when a picker did not answer."""
    requests, silent = find_pool(args.run_dir, args.port).abort(args.session, args.tenant)
    print(f"ended {requests} request{'' if requests == 1 else 's'} of session {args.session}")
    if silent:
        print(f"shoal: picker {', '.join(silent)} did not answer: its requests may go on; try again", file=sys.stderr)
    return 1 if silent else 0
