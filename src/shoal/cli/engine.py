"""`shoal engine`: run one embedded engine in the foreground."""

import argparse
import asyncio
import gc
import signal

import uvloop

from shoal.cli import flags
from shoal.cli.profiles import profile_named
from shoal.engine import PROFILES
from shoal.engine.cache import HostPolicy
from shoal.hosts.engine import EngineServer, EngineServerConfig, Faults
from shoal.hosts.engine.kvevents import KvEvents, read_kv_events
from shoal.hosts.engine.kvforms import KvForm
from shoal.kernel import ConfigError

_EXAMPLES = """examples:
  shoal engine                                    vLLM-compatible server on http://127.0.0.1:8000, no GPU needed
  shoal engine --port 0 --profile h100-8b         a free port, the pace of an H100 with an 8B model
  shoal engine --profile our-gpu.yaml             an accelerator of yours (docs/howto-add-an-accelerator.md)
  shoal engine --model llama --lora sql --lora es one base model with two adapters
  shoal engine --blocks 400 --max-num-seqs 8      a small cache and batch, to see evictions and queues
  shoal engine --fail-rate 0.1 --slow-factor 3    an unwell engine
  shoal engine --kv-events-config '{"enable_kv_cache_events": true, "replay_endpoint": "tcp://*:5558"}'
                                                  KV events on port 5557, as vLLM sends them
  shoal engine --blocks 400 --host-blocks 4000    blocks that leave the GPU stay in host memory
  curl -s localhost:8000/faults -d '{"stall_after": 5}'   change faults while it runs
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "engine",
        help="run one embedded engine",
        description="Run a model of an inference engine behind vLLM's HTTP API: real timing, caching and metrics,\n"
        "answers without meaning, no GPU.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_serving(parser)
    _add_shape(parser)
    _add_cache(parser)
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
    group.add_argument(
        "--profile",
        default="tiny",
        metavar="NAME|FILE",
        help=f"hardware and model: {', '.join(PROFILES)}; with -tpN on N chips; or a .yaml file of your own (tiny)",
    )
    group.add_argument(
        "--data-parallel-size", type=int, default=1, metavar="N", help="ranks, each with a cache of its own (1)"
    )
    group.add_argument("--blocks", type=int, default=0, metavar="N", help="KV blocks")
    group.add_argument("--block-size", type=int, default=0, metavar="TOKENS", help="tokens a KV block")
    group.add_argument("--max-num-seqs", type=int, default=0, metavar="N", help="sequences in one step")
    group.add_argument("--max-num-batched-tokens", type=int, default=0, metavar="N", help="new tokens in one step")
    group.add_argument("--max-model-len", type=int, default=0, metavar="TOKENS", help="context limit")
    group.add_argument("--max-loras", type=int, default=4, metavar="N", help="different adapters in one step (4)")
    group.add_argument(
        "--scheduling-policy", choices=("fcfs", "priority"), default="fcfs", help="order of the queue (fcfs)"
    )
    group.add_argument(
        "--seed", type=flags.seed, default=0, metavar="N", help="decides answer texts and which requests fail (0)"
    )


def _add_cache(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("KV cache")
    group.add_argument("--host-blocks", type=int, default=0, metavar="N", help="blocks kept in host memory (0: none)")
    group.add_argument(
        "--host-bandwidth", type=float, default=0.0, metavar="GB_PER_S", help="speed of loading them back (50)"
    )
    group.add_argument(
        "--host-policy",
        choices=[str(each) for each in HostPolicy],
        default=str(HostPolicy.WRITE_THROUGH),
        help="copy blocks to the host once they are full, or when the GPU drops them (write_through)",
    )
    group.add_argument("--kv-events-config", metavar="JSON", help="publish KV events; the keys are vLLM's")
    group.add_argument(
        "--kv-events-format",
        choices=[str(each) for each in KvForm],
        default=str(KvForm.VLLM_MAP),
        help="whose events: vLLM since 0.24, up to 0.23, its first ones; SGLang now, before (vllm-map)",
    )
    group.add_argument(
        "--kv-events-replay",
        choices=("new", "old"),
        help="replies to a replay with the topic, as vLLM since 0.26, or without (what goes with the format)",
    )
    group.add_argument(
        "--kv-events-hashes",
        choices=("int", "bytes"),
        default="int",
        help="hashes as 64-bit numbers, or as 32 bytes as with VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0 (int)",
    )
    group.add_argument(
        "--self-describing-kv-events", action="store_true", help="events of host blocks carry their tokens"
    )
    group.add_argument(
        "--hash-seed", type=int, default=0, metavar="N", help="another one gives all blocks other hashes (0)"
    )


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
    if not 0 <= args.hash_seed < 2**64:
        raise ConfigError("must be a number of 0 to 2**64 - 1", source="--hash-seed")
    return EngineServerConfig(
        host=args.host,
        port=args.port,
        models=tuple(args.model or ("tiny",)),
        loras=tuple(args.lora),
        profile=profile_named(args.profile, "--profile"),
        data_parallel_size=args.data_parallel_size,
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
        kv_events=read_kv_events(args.kv_events_config) if args.kv_events_config else KvEvents(),
        kv_form=KvForm(args.kv_events_format),
        has_replay_topic=None if args.kv_events_replay is None else args.kv_events_replay == "new",
        has_bytes_hashes=args.kv_events_hashes == "bytes",
        hash_seed=args.hash_seed,
        host_blocks=args.host_blocks,
        host_bytes_per_s=args.host_bandwidth * 1e9,
        host_policy=HostPolicy(args.host_policy),
        is_describing_host_blocks=args.self_describing_kv_events,
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
