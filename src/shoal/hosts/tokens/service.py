"""The tokens of requests, fetched off the event loop, as the router asks for them.

Owns the threads, the bounds on what waits, and that every fetch ends in one event or is cancelled: whatever goes wrong
is a FetchFailed with a word for the metrics, and the request goes by the estimate.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp

from shoal.hosts.backends import Backend as Dialled
from shoal.hosts.backends import BackendsFile
from shoal.hosts.picker import CLIENT_KEY_HEADERS
from shoal.hosts.tokens import embedded
from shoal.hosts.tokens.engines import EMBEDDED, EngineList
from shoal.hosts.tokens.keys import make_keys
from shoal.hosts.tokens.prompts import Chat, NoTokens, Prompt, inflated, read_prompt
from shoal.hosts.tokens.remote import RemoteTokenizer, Rendered, Server
from shoal.hosts.tokens.settings import Backend, TokenSettings
from shoal.hosts.waiting import Asked
from shoal.kernel import ConfigError
from shoal.measures import Counter, Family, Gauge, Histogram
from shoal.prefix.tokens import TokenHasher
from shoal.routing.commands import Fetch
from shoal.routing.events import Fetched, FetchFailed

if TYPE_CHECKING:
    from shoal.hosts.tokens.local import LocalTokenizer

log = logging.getLogger("shoal.tokens")

SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 30.0)
CONNECTIONS = 64
# Engines that have no render endpoints of vLLM's.
_WITHOUT_RENDER = ("sglang", EMBEDDED)
# Hands tools and their calls to a chat template in another order and with other fields than vLLM.
_OTHER_TOOLS = "sglang"

Done = Callable[[Fetched | FetchFailed], None]


class Job:
    """One fetch.  `cancel` it when nobody waits any more; what has begun in a thread still warms its memory.

    has_other_tools: whether an engine that may serve it writes tools into a prompt otherwise than vLLM.
    """

    __slots__ = ("asked", "began_at", "command", "done", "has_other_tools", "task")

    def __init__(self, command: Fetch, asked: Asked, done: Done) -> None:
        self.command = command
        self.asked = asked
        self.done: Done | None = done
        self.began_at = time.monotonic()
        self.task: asyncio.Task[None] | None = None
        self.has_other_tools = False

    def cancel(self) -> None:
        """Tell nobody."""
        self.done = None
        if self.task is not None:
            self.task.cancel()


class Tokenizers:
    """The source of tokens of one worker, on the running loop.  `close` it.

    maker: makes keys of token ids.  engines: those that may be asked; the caller tells it of events.  dialling: their
    keys and TLS.  Raises ConfigError when a local tokenizer cannot be read.
    """

    def __init__(
        self, maker: TokenHasher, settings: TokenSettings, engines: EngineList, dialling: BackendsFile | None = None
    ) -> None:
        self._maker = maker
        self._dialling = dialling or BackendsFile(None)
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(max_workers=settings.threads, thread_name_prefix="tokens")
        self._session: aiohttp.ClientSession | None = None
        self._jobs: set[Job] = set()
        self._waiting_bytes = 0
        self._local: dict[Path, LocalTokenizer] = {}
        self._remotes: dict[Backend, RemoteTokenizer] = {}
        self._reload: asyncio.Task[None] | None = None
        self._engines = engines
        self._fetches = Counter("shoal_token_fetches", "Prompts tokenised for the router.", ("source", "outcome"))
        self._seconds = Histogram("shoal_token_fetch_seconds", "From the question to the tokens.", SECONDS, ("source",))
        self._waiting = Gauge("shoal_token_fetches_waiting", "Prompts that are being tokenised or wait for it.")
        self._memory = Gauge("shoal_token_memory_bytes", "What local tokenizers remember of prompts, as token ids.")
        self._settings = settings
        self._take(settings, self._load(settings))

    def _load(self, settings: TokenSettings) -> "dict[Path, LocalTokenizer]":
        paths = [backend.path for backend in settings.backends if backend.path is not None]
        if not paths:
            return {}
        from shoal.hosts.tokens.local import LocalTokenizer

        seed, budget_bytes = secrets.randbits(63), settings.budget_bytes
        return {path: self._local.get(path) or LocalTokenizer(path, budget_bytes, seed) for path in paths}

    def _take(self, settings: TokenSettings, local: "dict[Path, LocalTokenizer]") -> None:
        self._settings = settings
        self._local = local
        self._remotes = {}

    def configure(self, settings: TokenSettings) -> None:
        """Take other settings as soon as their tokenizers are read; ones that cannot be read change nothing.

        The number of threads stays, and what known tokenizers remember.
        """
        if settings == self._settings:
            return
        if self._reload is not None:
            self._reload.cancel()
        self._reload = self._loop.create_task(self._configure(settings))

    async def _configure(self, settings: TokenSettings) -> None:
        try:
            self._take(settings, await asyncio.to_thread(self._load, settings))
        except ConfigError as error:
            log.error("the tokenizers stay as they were: %s", error)

    async def close(self) -> None:
        """Stop; what is under way is told to nobody."""
        if self._reload is not None:
            self._reload.cancel()
        for job in list(self._jobs):
            job.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._session is not None:
            await self._session.close()

    def families(self) -> list[Family]:
        """Its metrics."""
        self._waiting.set(len(self._jobs))
        self._memory.set(sum(each.used_bytes for each in self._local.values()))
        return [metric.family() for metric in (self._fetches, self._seconds, self._waiting, self._memory)]

    # ------------------------------------------------------------------ one fetch

    def fetch(self, command: Fetch, asked: Asked, done: Done) -> Job:
        """Begin; see `hosts.waiting.TokenSource`."""
        job = Job(command, asked, done)
        settings = self._settings
        size = len(asked.body)
        is_full = len(self._jobs) >= settings.max_waiting or self._waiting_bytes + size > settings.max_waiting_bytes
        self._jobs.add(job)
        self._waiting_bytes += size
        if is_full:
            self._fail_soon(job, "none", "overloaded")
            return job
        backend = settings.backend_of(command.model)
        if backend is None:
            self._fail_soon(job, "none", "unconfigured")
        elif backend.path is not None:
            job.has_other_tools = self._engines.has(_OTHER_TOOLS, command.model)
            self._in_thread(job, "local", self._local[backend.path])
        elif backend.url:
            self._ask(job, Server(backend.url.rstrip("/"), Dialled(authorization=backend.authorization)), backend)
        else:
            self._by_engine(job, backend)
        return job

    def _by_engine(self, job: Job, backend: Backend) -> None:
        command = job.command
        engine = self._engines.serving(command.adapter or command.model) or self._engines.serving(command.model)
        if engine is None:
            self._fail_soon(job, "engine", "no-engine")
        elif engine.kind == EMBEDDED:
            self._in_thread(job, "embedded", None)
        else:
            self._dialling.look()
            server = Server(
                f"{'https' if engine.is_tls else 'http'}://{engine.address}",
                self._dialling.of(engine.address),
                self._client_key(job.asked),
                engine.kind not in _WITHOUT_RENDER,
            )
            self._ask(job, server, backend)

    def _client_key(self, asked: Asked) -> dict[str, str] | None:
        if not self._settings.forwards_client_key:
            return None
        return {name: asked.headers[name] for name in CLIENT_KEY_HEADERS if name in asked.headers}

    def _fail_soon(self, job: Job, source: str, reason: str) -> None:
        failed = FetchFailed(job.command.request_id, reason)
        self._loop.call_soon(self._finish, job, source, failed)

    # ------------------------------------------------------------------ in a thread

    def _in_thread(self, job: Job, source: str, tokenizer: "LocalTokenizer | None") -> None:
        self._threads.submit(self._work, job, source, tokenizer)

    def _work(self, job: Job, source: str, tokenizer: "LocalTokenizer | None") -> None:
        """Tokenise.  In a thread; raises nothing."""
        event: Fetched | FetchFailed = FetchFailed(job.command.request_id, "cancelled")
        if job.done is not None:
            try:
                ids, salt = self._tokenise(job, tokenizer)
                event = self._event(job.command, Rendered(ids, []), salt)
            except NoTokens as error:
                event = FetchFailed(job.command.request_id, error.reason)
            except Exception as error:
                event = _fault(job.command, error)
        self._to_loop(job, source, event)

    def _tokenise(self, job: Job, tokenizer: "LocalTokenizer | None") -> tuple[list[bytes], str]:
        asked = job.asked
        api = asked.request.api
        body = inflated(asked.headers, asked.body, self._settings.max_body_bytes)
        if tokenizer is None:
            return embedded.tokenise(api, body)
        prompt = read_prompt(api, body)
        if job.has_other_tools and _has_tools(prompt):
            raise NoTokens("unsupported")
        return tokenizer.tokenise(prompt), prompt.salt

    def _to_loop(self, job: Job, source: str, event: Fetched | FetchFailed) -> None:
        try:
            self._loop.call_soon_threadsafe(self._finish, job, source, event)
        except RuntimeError:
            # The loop is closed: nobody waits.
            return

    # ------------------------------------------------------------------ by HTTP

    def _ask(self, job: Job, server: Server, backend: Backend) -> None:
        job.task = self._loop.create_task(self._ask_engine(job, server, backend))
        # A task that is cancelled before its first step runs nothing of its own, its end neither.
        cancelled = FetchFailed(job.command.request_id, "cancelled")
        job.task.add_done_callback(lambda _: self._finish(job, "remote", cancelled))

    async def _ask_engine(self, job: Job, server: Server, backend: Backend) -> None:
        command = job.command
        event: Fetched | FetchFailed = FetchFailed(command.request_id, "cancelled")
        try:
            prompt = await self._loop.run_in_executor(self._threads, self._read, job.asked)
            remote = self._remote(backend)
            rendered = await remote.tokenise(server, prompt, command.adapter or command.model)
            event = await self._loop.run_in_executor(self._threads, self._event, command, rendered, prompt.salt)
        except NoTokens as error:
            event = FetchFailed(command.request_id, error.reason)
        except Exception as error:
            event = _fault(command, error)
        finally:
            self._finish(job, "remote", event)

    def _read(self, asked: Asked) -> Prompt:
        return read_prompt(asked.request.api, inflated(asked.headers, asked.body, self._settings.max_body_bytes))

    def _remote(self, backend: Backend) -> RemoteTokenizer:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=CONNECTIONS)
            self._session = aiohttp.ClientSession(connector=connector, auto_decompress=True)
        remote = self._remotes.get(backend)
        if remote is None:
            made = RemoteTokenizer(self._session, self._threads, backend.timeout_s, backend.media_timeout_s)
            remote = self._remotes[backend] = made
        return remote

    # ------------------------------------------------------------------ the end

    def _event(self, command: Fetch, rendered: Rendered, salt: str) -> Fetched:
        """Make keys of the first prompt; the others count as tokens only."""
        ids = rendered.ids
        if not ids or not ids[0]:
            raise NoTokens("empty")
        keys = make_keys(
            self._maker,
            ids[0],
            model=command.model,
            adapter=command.adapter,
            salt=salt,
            block_sizes=command.block_sizes,
            media=rendered.media,
        )
        return Fetched(command.request_id, sum(map(len, ids)) // 4, keys)

    def _finish(self, job: Job, source: str, event: Fetched | FetchFailed) -> None:
        if job not in self._jobs:
            return
        self._jobs.discard(job)
        self._waiting_bytes -= len(job.asked.body)
        done, job.done = job.done, None
        is_good = isinstance(event, Fetched)
        outcome = "ok" if isinstance(event, Fetched) else event.reason
        self._fetches.add((source, outcome if done is not None else "late"))
        if is_good:
            self._seconds.observe(time.monotonic() - job.began_at, (source,))
        if done is not None:
            done(event)


def _has_tools(prompt: Prompt) -> bool:
    content = prompt.content
    if not isinstance(content, Chat):
        return False
    return bool(content.body.get("tools")) or any(message.get("tool_calls") for message in content.messages)


def _fault(command: Fetch, error: Exception) -> FetchFailed:
    """A bug, here or in a library.  What it says may hold text of the prompt: only where it happened is told."""
    trace, place = error.__traceback__, "?"
    while trace is not None:
        place = f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}"
        trace = trace.tb_next
    log.error("a prompt could not be tokenised: %s at %s", type(error).__name__, place)
    return FetchFailed(command.request_id, "fault")
