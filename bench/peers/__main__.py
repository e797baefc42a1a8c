"""`make bench PEERS=1`: install, start and measure the other routers beside ours, print one table and write JSON."""

import argparse
import sys
from pathlib import Path

import msgspec
import uvloop
from rich.console import Console

from bench.machine import FOREIGN_CORES_LIMIT, Neighbours
from bench.peers.catalog import NGINX, PEERS
from bench.peers.install import NotInstalled, program_of
from bench.peers.rounds import survey
from bench.peers.table import table

_WIDTH = 200


def main(argv: list[str] | None = None) -> int:
    """Measure and print; 1 when one of our own rows failed."""
    parser = argparse.ArgumentParser(prog="bench.peers", description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the full load (1.0)")
    parser.add_argument("--json", type=Path, default=Path(".bench/peers.json"), help="where the figures go")
    parser.add_argument("--install", action="store_true", help="install them and end")
    arguments = parser.parse_args(argv)
    console = Console(width=max(_WIDTH, Console().width))  # cells do not wrap, in a pipe either
    for peer in (*PEERS, NGINX):  # before anything runs that an installation would disturb
        try:
            program_of(peer)
        except NotInstalled as error:
            console.print(f"{peer.name}: {error}")
    if arguments.install:
        return 0
    neighbours = Neighbours()
    rows = uvloop.run(survey(arguments.scale, say=lambda line: print(line, file=sys.stderr, flush=True)))
    cores = neighbours.cores()
    console.print(table(rows, cores))
    if cores > FOREIGN_CORES_LIMIT:
        console.print("[yellow]void: other processes were busy; use an idle machine")
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    written = {"rows": msgspec.to_builtins(rows), "foreign_cores": cores, "scale": arguments.scale}
    arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(written), indent=1) + b"\n")
    console.print(f"written to {arguments.json}")
    return 1 if any(row.failed for row in rows if row.name.startswith("shoal")) else 0


if __name__ == "__main__":
    sys.exit(main())
