"""`shoal up`: run a pool in the foreground until Ctrl-C.

Owns the flags.  The work is `hosts.supervisor`.
"""

import argparse
import sys
from pathlib import Path

from shoal.cli import flags

_EXAMPLES = """examples:
  shoal up --engines 4                                four embedded engines, no GPU needed
  shoal up --backend http://10.0.0.1:8000 --backend http://10.0.0.2:8000
  shoal up --backends-file backends.yaml --config epp.yaml --workers 2
  shoal up --engines 2 --model my-model --engine-arg=--profile=h100-8b
  shoal up --backend http://engines.internal:8000     a name with several addresses is several endpoints
  shoal up --upgrade                                  replace the workers of the running pool, one by one

signals: SIGTERM or Ctrl-C drains (a second one stops at once), SIGHUP reloads the configuration, SIGUSR2 replaces
the workers.  While it runs: shoal status, shoal explain ID, shoal endpoint add|drain|remove.
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "up",
        help="run a pool in the foreground",
        description="Run a pool in the foreground: engines or backends, picker workers, Envoy on one public port.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_argument_group("what is served")
    what.add_argument("--engines", type=int, default=0, metavar="N", help="embedded engines to start")
    what.add_argument("--backend", action="append", default=[], metavar="URL", help="a running engine (repeatable)")
    what.add_argument("--backends-file", type=Path, metavar="FILE", help="list of engines, followed while it runs")
    what.add_argument("--model", default="", metavar="NAME", help="model name of the embedded engines")
    what.add_argument(
        "--engine-arg",
        action="append",
        default=[],
        metavar="ARG",
        help="passed to each embedded engine, as --engine-arg=--slow-factor=2 (repeatable; see shoal engine --help)",
    )
    where = parser.add_argument_group("where")
    where.add_argument("--host", help="address to listen on (127.0.0.1, or what the configuration says)")
    where.add_argument("--port", type=int, help="public port (8080; 0 takes a free one)")
    where.add_argument(
        "--metrics-port", type=int, metavar="PORT", help="Prometheus page on 127.0.0.1 (9090; 0 for none)"
    )
    where.add_argument("--run-dir", type=Path, metavar="DIR", help="sockets and files ($XDG_RUNTIME_DIR/shoal/PORT)")
    how = parser.add_argument_group("how")
    how.add_argument("--config", type=Path, metavar="FILE", help="EndpointPickerConfig; followed while it runs")
    how.add_argument("--workers", type=int, default=1, metavar="N", help="picker processes (1; at most 128)")
    how.add_argument(
        "--data-plane",
        choices=("envoy", "direct"),
        help="what carries the bytes: Envoy, or the workers themselves (envoy, or what the configuration says)",
    )
    how.add_argument("--seed", type=flags.seed, default=0, metavar="N", help="seed of every random choice (0)")
    how.add_argument("--drain-timeout", type=flags.seconds, metavar="S", help="longest drain at the end (30)")
    add_log_flags(how)
    parser.add_argument("--upgrade", action="store_true", help="replace the workers of the pool that runs on --port")
    parser.set_defaults(run=run)


def add_log_flags(parser: "argparse._ArgumentGroup | argparse.ArgumentParser") -> None:
    """Add the flags for log lines."""
    parser.add_argument("--log-format", choices=("text", "json"), default="text", help="of the lines on stderr (text)")
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info", help="(info)")


def run(args: argparse.Namespace) -> int:
    """Run the pool, or upgrade the one that runs; returns the exit status."""
    if args.upgrade:
        return _upgrade(args)
    from shoal.hosts.supervisor import Options

    options = Options(
        engines=args.engines,
        backends=tuple(args.backend),
        backends_file=args.backends_file,
        config=args.config,
        host=args.host,
        port=args.port,
        data_plane=args.data_plane,
        workers=args.workers,
        run_dir=args.run_dir,
        metrics_port=args.metrics_port,
        model=args.model,
        engine_args=tuple(args.engine_arg),
        log_format=args.log_format,
        log_level=args.log_level,
        seed=args.seed,
        drain_s=args.drain_timeout,
    )
    options.check()  # before the slow imports: a forgotten flag is answered at once

    import uvloop

    from shoal.hosts import logs
    from shoal.hosts.supervisor import run_pool

    logs.setup(args.log_format, args.log_level)
    return uvloop.run(run_pool(options))


def _upgrade(args: argparse.Namespace) -> int:
    from shoal.hosts.admin import find_pool

    pool = find_pool(str(args.run_dir) if args.run_dir else None, 8080 if args.port is None else args.port)
    print("replacing the workers one by one ...", file=sys.stderr)
    done = pool.upgrade()
    print(done)
    return 0 if "replaced" in done else 1
