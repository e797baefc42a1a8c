"""`shoal endpoint add|drain|remove|pause|resume|reset`: change the fleet of a running pool, and order its engines.

Owns the waiting for a drain and what is said.  The pool itself does the work.
"""

import argparse
import sys
import time

from shoal.cli import flags
from shoal.cli.status import add_pool_flags
from shoal.hosts.admin import PoolClient, find_pool
from shoal.kernel import ConfigError

_EXAMPLES = """examples:
  shoal endpoint add http://10.0.0.7:8000        joins when it is ready; a name with several addresses is several
  shoal endpoint drain 10.0.0.7:8000             no new requests; leaves when those in flight have ended
  shoal endpoint drain 10.0.0.7:8000 --no-wait   says it and returns
  shoal endpoint remove 10.0.0.7:8000            leaves now, whatever it is doing
  shoal endpoint pause 10.0.0.7:8000             no new requests until `resume`; its engine is left alone
  shoal endpoint pause gpu-7 --mode wait         its engine stops as well, once its requests have ended
  shoal endpoint resume --all                    every engine goes on and gets requests again
  shoal endpoint reset --label role=decode       these drop their prefix cache, and the pool forgets what it held
  shoal endpoint --port 9000 add http://gpu:8000 another pool; --port and --run-dir may also stand at the end

`add` takes back one that was drained or removed.  `pause --mode`, `resume` after it and `reset` call the engine: vLLM
has these calls when it is started with VLLM_SERVER_DEV_MODE=1, SGLang as it is (docs/operations.md).
"""
_MODES = ("abort", "wait", "keep")
_DONE = {
    "pause": "paused {}: no new requests go there",
    "resume": "resumed {}: requests go there again",
    "reset": "reset {}: its prefix cache is empty",
}


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "endpoint",
        help="add, drain, remove, pause, resume or reset endpoints",
        description="Change the fleet of a running pool, and give orders to its engines.",
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
        _say_examples(operation, each)
        operation.set_defaults(run=run, op=each)
    _add_orders(operations)


def _add_orders(operations: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    pause = operations.add_parser("pause", help="send no new requests until `resume`; with --mode the engine stops too")
    pause.add_argument(
        "--mode",
        choices=_MODES,
        default="",
        help="have the engine stop: abort ends its requests, wait lets them end first, keep has them stand still",
    )
    resume = operations.add_parser("resume", help="have the engine go on, and send requests again")
    reset = operations.add_parser("reset", help="have the engine drop its prefix cache, and forget what it held")
    reset.add_argument("--running", action="store_true", help="also what running requests hold: vLLM computes it anew")
    reset.add_argument("--external", action="store_true", help="also caches behind the GPU's (vLLM's connectors)")
    for each, operation, timeout_s in (("pause", pause, 600.0), ("resume", resume, 30.0), ("reset", reset, 30.0)):
        operation.add_argument("name", metavar="ID|URL", nargs="?", default="", help="as `shoal status` shows it")
        operation.add_argument("--all", action="store_true", help="every endpoint")
        label = operation.add_argument("--label", action="append", default=[], metavar="K=V")
        label.help = "every endpoint with this label, or with all of several"
        operation.add_argument(
            "--timeout", type=float, default=timeout_s, metavar="S", help=f"longest wait for an engine ({timeout_s:g})"
        )
        add_pool_flags(operation, is_again=True)
        _say_examples(operation, each)
        operation.set_defaults(run=give_order, op=each)


def _say_examples(operation: argparse.ArgumentParser, name: str) -> None:
    operation.epilog = flags.examples_of(_EXAMPLES, f"shoal endpoint {name}")
    operation.formatter_class = argparse.RawDescriptionHelpFormatter


def give_order(args: argparse.Namespace) -> int:
    """Give an order to engines; returns 0 when all did it, 1 when one did not.  Raises ConfigError for no endpoint."""
    labels = dict(_pair(text) for text in args.label)
    if (bool(args.name), bool(labels), args.all).count(True) != 1:
        raise ConfigError(f"say which: `shoal endpoint {args.op} ID`, --label KEY=VALUE, or --all")
    more = {name: getattr(args, name) for name in ("mode", "running", "external") if hasattr(args, name)}
    pool = find_pool(args.run_dir, args.port)
    touched, problems = pool.control(
        args.op, name=args.name, labels=labels, is_all=args.all, timeout_s=args.timeout, **more
    )
    for name in touched:
        if name in problems:
            print(f"shoal: {name}: {problems[name]}", file=sys.stderr)
        else:
            print(_DONE[args.op].format(name))
    return 1 if problems else 0


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise ConfigError(f"{text!r} is not KEY=VALUE", source="--label")
    return key, value


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
