"""`shoal engine`: run one embedded engine in the foreground."""

import argparse
import asyncio
import gc
import signal

import uvloop

from shoal.engine import PROFILES
from shoal.hosts.engine import EngineServer, EngineServerConfig, Faults
from shoal.kernel import ConfigError

_EXAMPLES = """examples:
  shoal engine                                    vLLM-compatible server on http://127.0.0.1:8000, no GPU needed
  shoal engine --port 0 --profile h100-8b         a free port, the pace of an H100 with an 8B model
  shoal engine --model llama --lora sql --lora es one base model with two adapters
  shoal engine --blocks 400 --max-num-seqs 8      a small cache and batch, to see evictions and queues
  shoal engine --fail-rate 0.1 --slow-factor 3    an unwell engine
  curl -s localhost:8000/faults -d '{"stall_after": 5}'   change faults while it runs
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "engine",
        help="run one embedded engine",
        description="Run a model of an inference engine behind vLLM's HTTP API: real timing, caching and metrics, "
        "answers without meaning, no GPU.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_serving(parser)
    _add_shape(parser)
    _add_faults(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM; returns 0."""
    uvloop.run(_serve(_config(args)))
    return 0


def _add_serving(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("serving")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    group.add_argument("--port", type=int, default=8000, help="port; 0 takes a free one (8000)")
    group.add_argument(
        "--model", action="append", metavar="NAME", help="served model name; repeat it for aliases (tiny)"
    )
    group.add_argument("--lora", action="append", metavar="NAME", default=[], help="loaded adapter; may be repeated")
    group.add_argument("--api-key", default="", metavar="KEY", help="want this bearer token on /v1 paths")
    group.add_argument("--tls-cert", default="", metavar="FILE", help="speak TLS with this certificate (PEM)")
    group.add_argument("--tls-key", default="", metavar="FILE", help="key of the certificate (PEM)")
    group.add_argument("--no-cached-tokens", action="store_true", help="leave cached tokens out of usage")
    group.add_argument("--no-metrics", action="store_true", help="have no /metrics")


def _add_shape(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine (defaults are the profile's)")
    group.add_argument("--profile", default="tiny", choices=sorted(PROFILES), help="hardware and model (tiny)")
    group.add_argument("--blocks", type=int, default=0, metavar="N", help="KV blocks")
    group.add_argument("--block-size", type=int, default=0, metavar="TOKENS", help="tokens a KV block")
    group.add_argument("--max-num-seqs", type=int, default=0, metavar="N", help="sequences in one step")
    group.add_argument("--max-num-batched-tokens", type=int, default=0, metavar="N", help="new tokens in one step")
    group.add_argument("--max-model-len", type=int, default=0, metavar="TOKENS", help="context limit")
    group.add_argument("--max-loras", type=int, default=4, metavar="N", help="different adapters in one step (4)")
    group.add_argument(
        "--scheduling-policy", choices=("fcfs", "priority"), default="fcfs", help="order of the queue (fcfs)"
    )
    group.add_argument("--seed", type=int, default=0, help="decides answer texts and which requests fail (0)")


def _add_faults(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("faults")
    group.add_argument("--fail-rate", type=float, default=0.0, metavar="RATIO", help="share of requests that get a 500")
    group.add_argument("--stall-after", type=int, metavar="N", help="streams go silent after N tokens")
    group.add_argument("--cut-after", type=int, metavar="N", help="streams are reset after N tokens; 0: all requests")
    group.add_argument("--slow-factor", type=float, default=1.0, metavar="X", help="every step takes X times as long")
    group.add_argument("--startup-delay", type=float, default=0.0, metavar="S", help="seconds of answering 503 first")
    group.add_argument(
        "--record", type=int, default=0, metavar="N", help="GET /requests tells the headers of the last N requests"
    )


def _config(args: argparse.Namespace) -> EngineServerConfig:
    try:
        faults = Faults(
            fail_rate=args.fail_rate,
            stall_after=args.stall_after,
            cut_after=args.cut_after,
            slow_factor=args.slow_factor,
        )
    except ValueError as error:
        raise ConfigError(str(error), source="faults") from None
    return EngineServerConfig(
        host=args.host,
        port=args.port,
        models=tuple(args.model or ("tiny",)),
        loras=tuple(args.lora),
        profile=args.profile,
        num_blocks=args.blocks,
        block_size=args.block_size,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_model_len=args.max_model_len,
        max_loras=args.max_loras,
        is_priority_scheduling=args.scheduling_policy == "priority",
        is_reporting_cached_tokens=not args.no_cached_tokens,
        has_metrics=not args.no_metrics,
        api_key=args.api_key,
        tls_cert=args.tls_cert,
        tls_key=args.tls_key,
        seed=args.seed,
        startup_delay_s=args.startup_delay,
        record_last=args.record,
        faults=faults,
    )


async def _serve(config: EngineServerConfig) -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    server = EngineServer()
    port = await server.start(config)
    gc.freeze()  # what is loaded by now lives as long as the process; collecting it again only costs pauses
    scheme = "https" if config.tls_cert else "http"
    host = f"[{config.host}]" if ":" in config.host else config.host
    print(f"listening on {scheme}://{host}:{port}", flush=True)
    try:
        await ended.wait()
    finally:
        await server.stop()
