"""The ground a measurement stands on: cheap backends, a pool or a plain Envoy before them, and their processes."""

import asyncio
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import NamedTuple

from bench.processes import command_of, descendants, name_of
from shoal.hosts.load import Client, Stage
from shoal.hosts.supervisor.leash import leash
from shoal.hosts.supervisor.warm import IDLE

MODEL = "bench-model"
DIRECT = ("--data-plane", "direct")
"""The flags of `shoal up` that choose the direct data plane."""

_WORKERS = ("shoal.hosts.extproc", "shoal.hosts.extproc.worker", "shoal.hosts.direct", "shoal.hosts.direct.worker")


class Backend(NamedTuple):
    """One process of cheap endpoints."""

    pid: int
    addresses: list[str]


@contextmanager
def backends(count: int) -> Iterator[list[str]]:
    """Run `count` cheap endpoints in one process; yields their addresses."""
    with backend(count) as running:
        yield running.addresses


@contextmanager
def backend(count: int) -> Iterator[Backend]:
    """Run `count` cheap endpoints in one process, which may be killed."""
    child = subprocess.Popen(
        [sys.executable, "-m", "bench.backend", "--count", str(count), "--model", MODEL],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[1],
        preexec_fn=leash(),
    )
    assert child.stdout is not None
    try:
        yield Backend(child.pid, json.loads(child.stdout.readline())["addresses"])
    finally:
        child.terminate()
        child.wait(10)
        child.stdout.close()


@asynccontextmanager
async def pool_of(addresses: Sequence[str], flags: Sequence[str] = (), *, config: str = "") -> AsyncIterator["Pool"]:
    """Run a pool with one worker over `addresses`; yields it when every endpoint is ready.

    config: text of a configuration file, "" for the defaults.
    """
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as directory:
        listing = Path(directory) / "backends.yaml"
        listing.write_text(backends_file(addresses))
        if config:
            (Path(directory) / "config.yaml").write_text(config)
            flags = (*flags, "--config", str(Path(directory) / "config.yaml"))
        async with Stage(["--backends-file", str(listing), "--workers", "1", *flags]) as stage:
            pool = Pool(stage)
            await pool.wait_ready(len(addresses))
            yield pool


@asynccontextmanager
async def pool_of_engines(count: int, flags: Sequence[str] = ()) -> AsyncIterator["Pool"]:
    """Run a pool of embedded engines with one worker; yields it when every engine is ready."""
    async with Stage(["--engines", str(count), "--workers", "1", *flags]) as stage:
        pool = Pool(stage)
        await pool.wait_ready(count)
        yield pool


def backends_file(addresses: Sequence[str]) -> str:
    """The text of a backends file that names them all."""
    return "".join(f"- url: http://{address}\n" for address in addresses)


class Pool:
    """A running pool and the processes in it, told apart by their command lines."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    @property
    def url(self) -> str:
        """The public endpoint."""
        return self.stage.url

    @property
    def pickers(self) -> list[int]:
        """Process ids of the workers at work, of either data plane; the spare is none of them."""
        return [pid for pid in self._of(*_WORKERS) if name_of(pid) != IDLE]

    @property
    def routers(self) -> list[int]:
        """Process ids of all that a request passes through: the workers, and Envoy where there is one."""
        return self.pickers + self.envoys

    @property
    def everything(self) -> list[int]:
        """Process ids of the whole pool: supervisor, workers, spare, Envoy, engines."""
        return [self.stage.pid, *descendants(self.stage.pid)]

    @property
    def envoys(self) -> list[int]:
        """Process ids of Envoy."""
        return [pid for pid in descendants(self.stage.pid) if Path((command_of(pid) or [""])[0]).name == "envoy"]

    @property
    def engines(self) -> list[int]:
        """Process ids of the embedded engines."""
        return self._of("engine", "shoal.hosts.engine")

    async def wait_ready(self, endpoints: int, wait_s: float = 30.0) -> None:
        """Wait until as many endpoints are ready.  Raises TimeoutError."""
        async with asyncio.timeout(wait_s):
            while True:
                picture = await self.stage.picture()
                if sum(each.state == "ready" for each in picture.endpoints) >= endpoints:
                    return
                await asyncio.sleep(0.1)

    async def metrics(self) -> str:
        """The metrics page of the whole pool."""
        return await page(self.stage.metrics_url)

    async def served(self) -> dict[str, int]:
        """Requests per endpoint as the router counted them."""
        return {each.id: int(each.requests_total) for each in (await self.stage.picture()).endpoints}

    def _of(self, *words: str) -> list[int]:
        return [pid for pid in descendants(self.stage.pid) if not set(words).isdisjoint(command_of(pid)[:5])]


def lift_file_limit(wanted: int) -> int:
    """Let this process and its children open `wanted` files, or as many as it may; returns how many that is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted if soft == resource.RLIM_INFINITY else soft


async def page(url: str) -> str:
    """Fetch a page of text.  Raises ConnectionError when it is not to be had."""
    base, _, path = url.partition("//")[2].partition("/")
    client = Client(f"http://{base}", timeout_s=10.0)
    try:
        answer = await client.get(f"/{path}")
    finally:
        await client.close()
    if answer.status != 200:
        raise ConnectionError(f"{url}: {answer.failure or answer.status}")
    return answer.body.decode()


def sum_of(text: str, name: str) -> float:
    """Sum of all samples of a family, or of one of its samples' names, on a metrics page."""
    total = 0.0
    for line in text.splitlines():
        if line.startswith((f"{name} ", f"{name}{{")):
            total += float(line.rpartition(" ")[2] if "# {" not in line else line.split(" # ")[0].rpartition(" ")[2])
    return total
