"""`shoal picker`: the picker alone, for somebody else's Envoy or gateway.

Owns the flags; those of llm-d's picker that mean something here keep their names.  The work is `hosts.supervisor`.
"""

import argparse
from pathlib import Path

from shoal.cli import flags
from shoal.cli.up import add_log_flags
from shoal.kernel import ConfigError

_EXAMPLES = """examples:
  shoal picker --backend http://10.0.0.1:8000 --backend http://10.0.0.2:8000
  shoal picker --endpoints endpoints.yaml --config-file epp.yaml --host 0.0.0.0
  shoal picker --endpoints endpoints.yaml --cert-path /etc/tls     with tls.crt and tls.key in it
  shoal status --port 9002                                         the verbs find it by its gRPC port

Envoy's side: an ext_proc filter to the gRPC port (FULL_DUPLEX_STREAMED or BUFFERED request bodies), and a cluster that
takes its address from the header x-gateway-destination-endpoint.
"""

_ACCEPTED = ("pool-name", "pool-namespace", "pool-group")


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "picker",
        help="run the picker alone",
        description="Run the endpoint picker (ext_proc over gRPC) for an Envoy or gateway that is not ours.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--backend", action="append", default=[], metavar="URL", help="an engine (repeatable)")
    parser.add_argument(
        *("--endpoints", "--backends-file"),
        dest="backends_file",
        type=Path,
        metavar="FILE",
        help="list of engines, ours or llm-d's file-discovery form; followed while it runs",
    )
    parser.add_argument(
        *("--config-file", "--config"),
        dest="config",
        type=Path,
        metavar="FILE",
        help="EndpointPickerConfig; followed while it runs",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address of the gRPC ports (127.0.0.1)")
    parser.add_argument("--grpc-port", type=int, default=9002, metavar="PORT", help="ext_proc and access log (9002)")
    parser.add_argument(
        "--grpc-health-port", type=int, default=9003, metavar="PORT", help="gRPC health (9003; 0 for none)"
    )
    parser.add_argument("--metrics-host", default="127.0.0.1", help="address of the metrics page (127.0.0.1)")
    parser.add_argument(
        "--metrics-port", type=int, default=9090, metavar="PORT", help="Prometheus page (9090; 0 for none)"
    )
    parser.add_argument("--cert-path", type=Path, metavar="DIR", help="directory with tls.crt and tls.key for gRPC")
    parser.add_argument(
        "--secure-serving",
        type=_boolean,
        metavar="BOOL",
        help="TLS on the gRPC port; true needs --cert-path, and is the default with it",
    )
    parser.add_argument("--drain-timeout", type=flags.seconds, default=30.0, metavar="S", help="longest drain (30s)")
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="sockets ($XDG_RUNTIME_DIR/shoal/GRPC_PORT)")
    parser.add_argument("--seed", type=flags.seed, default=0, metavar="N", help="seed of every random choice (0)")
    for flag in _ACCEPTED:
        parser.add_argument(f"--{flag}", help=argparse.SUPPRESS)
    for flag in ("tracing", "metrics-endpoint-auth"):
        parser.add_argument(f"--{flag}", type=_boolean, help=argparse.SUPPRESS)
    add_log_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the picker; returns the exit status."""
    if args.secure_serving and args.cert_path is None:
        raise ConfigError("needs --cert-path DIR with tls.crt and tls.key", source="--secure-serving")
    if args.metrics_endpoint_auth:
        raise ConfigError(
            "is not there; the metrics page is bound to 127.0.0.1 unless --metrics-host says otherwise",
            source="--metrics-endpoint-auth",
        )

    import uvloop

    from shoal.hosts import logs
    from shoal.hosts.supervisor.standalone import PickerOptions, run_picker

    options = PickerOptions(
        backends=tuple(args.backend),
        backends_file=args.backends_file,
        config=args.config,
        host=args.host,
        grpc_port=args.grpc_port,
        health_port=args.grpc_health_port,
        metrics_host=args.metrics_host,
        metrics_port=args.metrics_port,
        cert_dir=None if args.secure_serving is False else args.cert_path,
        run_dir=args.run_dir,
        seed=args.seed,
        drain_s=args.drain_timeout,
    )
    logs.setup(args.log_format, args.log_level)
    for flag in (*_ACCEPTED, "tracing"):
        if value := getattr(args, flag.replace("-", "_")):
            logs.get("picker").warning("this flag changes nothing here", flag=f"--{flag}", value=value)
    return uvloop.run(run_picker(options))


def _boolean(text: str) -> bool:
    known = {"true": True, "1": True, "false": False, "0": False}
    if text.lower() not in known:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return known[text.lower()]
