"""The worker behind an Envoy: the router of `hosts.worker`, asked over gRPC on a unix socket."""

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from shoal.hosts.extproc.lean import LeanServer
from shoal.hosts.worker import Worker as AnyWorker
from shoal.hosts.worker import run_worker, warm_up, worker_parser
from shoal.routing.commands import Cut

__all__ = ["Worker", "main", "parser", "warm_up"]

# A replaced worker outlives its successor's start by at most the longest stream; the supervisor ends it earlier.
MAX_STREAM_S = 24 * 3600.0


class Worker(AnyWorker):
    """Everything one worker process holds."""

    async def _open(self) -> None:
        path = self._options.socket
        Path(path).unlink(missing_ok=True)
        self._server = LeanServer(self.picker, path)
        await self._server.start()
        os.chmod(path, 0o600)
        self._server.set_serving(True)

    def _cut(self, commands: Mapping[str, Cut]) -> int:
        return self._server.cut(commands)

    async def _close(self) -> None:
        self._server.set_serving(False)
        await self._server.stop(grace=1.0)

    async def _finish(self) -> None:
        await self._server.stop(grace=MAX_STREAM_S)


def parser() -> argparse.ArgumentParser:
    """The worker's own flags; people use `shoal up` or `shoal picker`."""
    flags = worker_parser("python -m shoal.hosts.extproc", __doc__)
    flags.add_argument("--socket", required=True, help="unix socket for Envoy (ext_proc and access log)")
    return flags


def main(argv: list[str] | None = None) -> int:
    """Run one worker; returns the exit status."""
    return run_worker(parser().parse_args(argv), Worker)


if __name__ == "__main__":
    sys.exit(main())
