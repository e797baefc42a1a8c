"""`shoal endpoint add|drain|remove`: change the fleet of a running pool.

Owns the waiting for a drain.  The pool itself does the work.
"""

import argparse
import sys
import time

from shoal.cli.status import add_pool_flags
from shoal.hosts.admin import PoolClient, find_pool

_EXAMPLES = """examples:
  shoal endpoint add http://10.0.0.7:8000        joins when it is ready; a name with several addresses is several
  shoal endpoint drain 10.0.0.7:8000             no new requests; leaves when those in flight have ended
  shoal endpoint drain 10.0.0.7:8000 --no-wait   says it and returns
  shoal endpoint remove 10.0.0.7:8000            leaves now, whatever it is doing
  shoal endpoint --port 9000 add http://gpu:8000 another pool; --port and --run-dir may also stand at the end

`add` takes back one that was drained or removed.
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "endpoint",
        help="add, drain or remove an endpoint",
        description="Change the fleet of a running pool.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_pool_flags(parser)
    operations = parser.add_subparsers(metavar="OPERATION", required=True)
    add = operations.add_parser("add", help="add an engine by its URL; it joins when it is ready")
    add.add_argument("name", metavar="URL", help="as http://10.0.0.7:8000 or https://engine.example")
    drain = operations.add_parser("drain", help="send no new requests, wait for those in flight")
    drain.add_argument("name", metavar="ID|URL", help="as `shoal status` shows it")
    drain.add_argument("--no-wait", action="store_true", help="do not wait for requests in flight")
    drain.add_argument("--timeout", type=float, default=600.0, metavar="S", help="longest wait in seconds (600)")
    remove = operations.add_parser("remove", help="take an endpoint out of the pool at once")
    remove.add_argument("name", metavar="ID|URL", help="as `shoal status` shows it")
    for each, operation in (("add", add), ("drain", drain), ("remove", remove)):
        add_pool_flags(operation, is_again=True)
        operation.set_defaults(run=run, op=each)


def run(args: argparse.Namespace) -> int:
    """Do the operation; returns 0 when done, 1 when a drain did not end in time."""
    pool = find_pool(args.run_dir, args.port)
    touched, is_known = pool.endpoint(args.op, args.name)
    names = ", ".join(touched) or args.name
    if is_known:
        print(f"{args.name} is in the pool already, as {names}")
    elif args.op == "add":
        print(f"added {names}; it gets requests when it is ready (see shoal status)")
    elif args.op == "remove":
        print(f"removed {names}")
    elif args.no_wait:
        print(f"draining {names}: no new requests go there")
    else:
        return _wait_for_drain(pool, touched, args.timeout)
    return 0


def _wait_for_drain(pool: PoolClient, touched: list[str], timeout_s: float) -> int:
    from rich.console import Console

    names = ", ".join(touched)
    deadline = time.monotonic() + timeout_s
    with Console(stderr=True).status(f"draining {names}") as spinner:
        while (left := still_there(pool, touched)) is not None:
            if time.monotonic() >= deadline:
                break
            spinner.update(f"draining {names}: {left} request(s) in flight")
            time.sleep(0.2)
    if left is None:
        print(f"drained {names}: its requests have ended and it left the pool")
        return 0
    print(
        f"shoal: {names} still has {left} request(s) in flight after {timeout_s:g} s; it gets no new ones and leaves "
        "when they end",
        file=sys.stderr,
    )
    return 1


def still_there(pool: PoolClient, endpoint_ids: list[str]) -> int | None:
    """Return how many requests are in flight on the endpoints, None when all of them have left the pool."""
    picture = pool.picture()
    if picture.is_partial:
        return 0  # a picker that does not answer may still hold some
    left = [each for each in picture.endpoints if each.id in endpoint_ids]
    return int(sum(each.inflight_requests for each in left)) if left else None
