"""What every worker process of a pool is: a router with its books, admin pages, keys, journal and traces.

Owns start-up and shutdown of the process.  How requests come in is for those who build on it (`extproc.worker`,
`direct.worker`).  Its parent feeds it the fleet over the admin socket; when the parent dies it stops.
"""

import argparse
import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import secrets
import signal
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop
from aiohttp import web

from shoal.hosts import bequest
from shoal.hosts.backends import BackendsFile
from shoal.hosts.driver import Driver
from shoal.hosts.journal import JournalWriter
from shoal.hosts.journals import Allowance, stem_of
from shoal.hosts.keys import KeyRing
from shoal.hosts.picker import Picker
from shoal.hosts.sharing import Sharing, read_secret
from shoal.hosts.signals import KvSubscriber, sources_of
from shoal.hosts.tokens import EngineList, settings_of
from shoal.hosts.tracing import Tracer
from shoal.hosts.workerpages import WorkerAdmin
from shoal.kernel import Chance, ConfigError, ShoalError
from shoal.measures import Fold
from shoal.prefix import BLOCK_TOKENS, MAX_BLOCKS, BlockHasher
from shoal.prefix.ledger import Ledger
from shoal.prefix.tokens import TokenHasher
from shoal.routing import Account, Configured, Event, Router
from shoal.routing.commands import Cut
from shoal.routing.config import RouterConfig, load
from shoal.routing.journal import Opening
from shoal.scheduling.producers import ApproxPrefixCacheProducer

if TYPE_CHECKING:
    from shoal.hosts.tokens.service import Tokenizers

log = logging.getLogger("shoal.worker")

PARENT_CHECK_S = 1.0
# mallopt(3): M_MMAP_THRESHOLD (larger buffers go back to the kernel at once), M_TRIM_THRESHOLD (freed memory that stays
# with the process), M_TOP_PAD.
MALLOC_OPTIONS = ((-3, 8 << 20), (-1, 64 << 20), (-2, 1 << 20))


class Worker:
    """Everything one worker process holds, whichever way its requests come."""

    def __init__(self, options: argparse.Namespace, config: RouterConfig, config_text: str) -> None:
        self._options = options
        self._config = config
        run = secrets.token_hex(4)
        sharing = config.pool.sharing
        shares_pool = options.workers > 1 or bool(sharing.listen or sharing.peers)
        router = Router(config, Chance(options.seed), shares_pool=shares_pool)
        journal = self._journal(config_text, shares_pool, run)
        self._tracer = Tracer.from_settings(config.pool.tracing)
        self.driver = Driver(router, Fold(), journal, self._on_account)
        self._keys = KeyRing(Path(config.pool.auth.keys_file)) if config.pool.auth.keys_file else None
        hasher = BlockHasher(int(options.hash_key, 16), _max_blocks(config))
        check_key = self._keys.check if self._keys else None
        self.picker = Picker(self.driver, config, hasher, options.picker_id, run, check_key)
        self._engines = EngineList()
        self._backends = BackendsFile(Path(options.backends) if options.backends else None)
        self._tokens: Tokenizers | None = None
        self._fetch_tokens()
        secret = read_secret(Path(sharing.secret_file)) if sharing.secret_file else None
        name = f"{socket.gethostname()}/{options.picker_id}"
        self.sharing = Sharing(self.driver, run, name, sharing, secret)
        tokens = TokenHasher(int(options.hash_key, 16))
        self.kv = KvSubscriber(self.driver.feed, lambda model: Ledger(tokens, model))
        self._follow_caches()
        asyncio.get_running_loop().call_soon(self._prepare)
        self._stopped = asyncio.Event()
        self._leaves = False

    # ------------------------------------------------------------------ for those who build on it

    async def _open(self) -> None:
        """Begin to take requests."""
        raise NotImplementedError

    async def _close(self) -> None:
        """Take no more requests and cut those that are left."""
        raise NotImplementedError

    async def _finish(self) -> None:
        """Take no more requests and wait until those under way have ended."""
        raise NotImplementedError

    def _cut(self, commands: Mapping[str, Cut]) -> int:
        """End these requests; returns how many there were."""
        raise NotImplementedError

    def _pages(self) -> WorkerAdmin:
        """The admin pages."""
        return WorkerAdmin(self.picker, self._drain, self._on_event, self.sharing, self._cut, self.kv)

    # ------------------------------------------------------------------ inside

    def _journal(self, config_text: str, shares_pool: bool, run: str) -> JournalWriter | None:
        settings = self._config.pool.journal
        if not settings.path:
            return None
        opening = Opening(self._options.seed, config_text, shares_pool, 0, run)
        return JournalWriter(
            Path(settings.path),
            stem_of(self._options.picker_id, run),
            opening,
            max_bytes=settings.max_bytes,
            max_files=settings.files,
            allowance=Allowance(settings.total_bytes, settings.runs),
        )

    def _on_account(self, account: Account) -> None:
        self._tracer.account(account)
        outcome = account.outcome
        if outcome.is_upstream_failure or outcome.is_cut:
            log.warning(
                "request %s failed: endpoint=%s status=%d attempts=%d cut=%s flags=%s",
                account.client_id or account.request_id,
                account.endpoint_id,
                outcome.status,
                outcome.attempts,
                outcome.is_cut,
                outcome.flags,
            )

    def _on_event(self, event: Event) -> None:
        if isinstance(event, Configured):
            self._config = load(event.text, "reload")
            self.picker.configure(self._config)
            self._follow_caches()
            asyncio.get_running_loop().call_soon(self._prepare)
            try:
                self._fetch_tokens()
            except ConfigError as error:
                log.error("prompts go by the estimate: %s", error)
        self._engines.on_event(event)
        self.kv.observe(event)

    def _follow_caches(self) -> None:
        """Read the KV events of engines where their exact caches are wanted."""
        precise = self._config.precise
        self.kv.configure(sources_of(precise.kv_events_config) if precise is not None else None)

    def _prepare(self) -> None:
        """Take the router's memory, a part in each turn of the loop."""
        if self.driver.router.prepare():
            asyncio.get_running_loop().call_soon(self._prepare)

    def _fetch_tokens(self) -> None:
        """Make what fetches tokens, or configure it.  Raises ConfigError when it cannot be made."""
        if self._config.precise is None:
            return
        settings = settings_of(self._config)
        if self._tokens is not None:
            self._tokens.configure(settings)
            return
        from shoal.hosts.tokens.service import Tokenizers

        hasher = TokenHasher(int(self._options.hash_key, 16))
        self._tokens = self.picker.tokens = Tokenizers(hasher, settings, self._engines, self._backends)

    async def run(self) -> None:
        """Serve until stopped: SIGTERM, a finished drain, or the parent's death."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopped.set)
        admin_path = self._options.admin
        Path(admin_path).unlink(missing_ok=True)
        admin = web.AppRunner(self._pages().app(), access_log=None)
        await admin.setup()
        await web.UnixSite(admin, admin_path).start()
        os.chmod(admin_path, 0o600)
        watches: list[asyncio.Task[None]] = []
        try:
            await self.sharing.start()
            await self._open()
            watches.append(asyncio.create_task(self._watch_parent(os.getppid())))
            if self._keys is not None:
                watches.append(asyncio.create_task(self._keys.watch()))
            await self._stopped.wait()
        finally:
            for watch in watches:
                watch.cancel()
            await self._close()
            if self._leaves:
                self._bequeath()
            if self._tokens is not None:
                await self._tokens.close()
            self.sharing.close()
            self.kv.close()
            await admin.cleanup()
            self.driver.close()
            self._tracer.close()

    def _bequeath(self) -> None:
        try:
            bequest.write(bequest.path_of(Path(self._options.admin)), self.driver.router.explanations.newest())
        except OSError as error:
            log.warning("what is known of requests is lost with this worker: %s", error)

    async def _watch_parent(self, parent: int) -> None:
        while os.getppid() == parent:
            await asyncio.sleep(PARENT_CHECK_S)
        log.warning("the supervisor is gone; stopping")
        self._stopped.set()

    async def _drain(self, leaves: bool) -> None:
        """Leave new requests to whoever takes over; end when those under way have ended.

        leaves: whether what is known of requests stays for those who ask later.
        """
        self._leaves = leaves
        self.picker.draining.set()
        self._drain_task = asyncio.create_task(self._end_when_idle())

    async def _end_when_idle(self) -> None:
        await self._finish()
        self._stopped.set()


def _max_blocks(config: RouterConfig) -> int:
    """Blocks to hash of one prompt: as much as a configured prefix producer looks up, else all that may be hashed."""
    is_configured = any(isinstance(plugin.plugin, ApproxPrefixCacheProducer) for plugin in config.plugins)
    tokens = config.prefix.max_prefix_tokens_to_match if is_configured else 0
    return min(MAX_BLOCKS, -(-tokens // BLOCK_TOKENS)) if tokens else MAX_BLOCKS


def worker_parser(prog: str, description: str | None) -> argparse.ArgumentParser:
    """The flags that all workers share."""
    flags = argparse.ArgumentParser(prog=prog, description=description)
    flags.add_argument("--admin", required=True, help="unix socket for the admin pages")
    flags.add_argument("--picker-id", default="0")
    flags.add_argument("--workers", type=int, default=1, help="workers that share the pool")
    flags.add_argument("--config", default="", help="configuration file; none means the default profile")
    flags.add_argument("--backends", default="", help="file with engines' keys and TLS, as `write_backends` writes it")
    flags.add_argument("--seed", type=int, default=0)
    # The environment of a process is its user's alone, its arguments are everybody's.
    key = os.environ.get("SHOAL_HASH_KEY", "0")
    flags.add_argument("--hash-key", default=key, help="hex key of the prompt hash, the same in all workers")
    flags.add_argument("--log-format", choices=("text", "json"), default="text")
    flags.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    return flags


def warm_up() -> None:
    """Do ahead what each start would have to do: finding the plugins that are installed reads many files."""
    load("", "default")


def settle_memory() -> None:
    """Have the process keep its memory: what a request leaves behind is freed by reference counts."""
    # Walking the index of recent decisions for cycles at the usual rate costs more than the decisions.
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    # By default glibc gives the pages of each long body back and faults them in again for the next, which costs more
    # than reading it.
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        for option, size in MALLOC_OPTIONS:
            libc.mallopt(option, size)


def run_worker(options: argparse.Namespace, make: Callable[[argparse.Namespace, RouterConfig, str], Worker]) -> int:
    """Run one worker; returns the exit status."""
    from shoal.hosts import logs

    logs.setup(options.log_format, options.log_level)
    settle_memory()

    async def serve_until_stopped() -> None:
        text = Path(options.config).read_text() if options.config else ""
        await make(options, load(text, options.config or "default"), text).run()

    try:
        uvloop.run(serve_until_stopped())
    except (ShoalError, OSError) as error:
        # A file that was good when it was accepted may be gone or bad when a worker starts anew.
        log.error("the picker worker cannot start: %s", error)
        return 2
    return 0
