"""Reading one engine's load from its metrics page, as often as its work makes worthwhile.

A reading that fails, or says nothing, is told once as a reading of unknowns and then not again: whether the
last good one is too old is the router's judgement.
"""

import asyncio
from collections.abc import Callable

from shoal.hosts.fleet.door import EngineDoor, Unreachable
from shoal.hosts.fleet.pace import Tempo
from shoal.hosts.fleet.readiness import MAX_METRICS_BYTES, NO_SUCH_PATH
from shoal.hosts.logs import Log
from shoal.kernel import InvalidInput
from shoal.pool import Signals
from shoal.wire import read_signals

log = Log("fleet")

_UNKNOWN = Signals()
_NO_PAGE = "start SGLang with --enable-metrics, llama.cpp with --metrics"
_NO_LOAD = "it names no known load metric; start vLLM without --disable-log-stats"
# A page that is costly to read is read so seldom that it takes at most this share of a core, and off the loop when
# it is larger than what one engine with many ranks writes.
_MAX_PARSE_RATIO = 0.02
_MAX_INLINE_BYTES = 128 << 10


class Scraper:
    """The scrape loop of one endpoint.

    engine: asked for at each reading with the page, so an engine can be recognised late.  seen: gets each reading.
    busy: whether the pool has requests there.  problem: why the last reading told no load, and what to do about it; ""
    when it did.
    """

    __slots__ = (
        "_busy",
        "_door",
        "_engine",
        "_name",
        "_parse_s",
        "_seen",
        "_tempo",
        "_wake",
        "last",
        "problem",
    )

    def __init__(
        self,
        name: str,
        door: EngineDoor,
        tempo: Tempo,
        *,
        engine: Callable[[bytes], str],
        busy: Callable[[], bool],
        seen: Callable[[Signals], None],
    ) -> None:
        self._name = name
        self._door = door
        self._tempo = tempo
        self._engine = engine
        self._busy = busy
        self._seen = seen
        self.problem = ""
        self._parse_s = 0.0
        self._wake = asyncio.Event()
        self.last: Signals | None = None

    async def run(self) -> None:
        """Scrape until cancelled."""
        pace = self._tempo.pace
        wait_s = pace.busy_scrape_s
        while True:
            is_read = await self.scrape()
            if self._busy() or (is_read and self._has_work()):
                wait_s = pace.busy_scrape_s if is_read else min(wait_s * 2, pace.idle_scrape_s)
            else:
                wait_s = min(wait_s * 2, pace.idle_scrape_s if is_read else pace.failed_scrape_s)
            is_idle = is_read and wait_s > pace.busy_scrape_s
            await self._sleep(self._tempo.scrape_wait_s(max(wait_s, self._parse_s / _MAX_PARSE_RATIO)), is_idle)

    def wake_if_busy(self) -> None:
        """End an idle wait when work has come."""
        if not self._wake.is_set() and self._busy():
            self._wake.set()

    async def scrape(self) -> bool:
        """Read once.  Returns whether the page said anything."""
        try:
            page = await self._door.get(
                "/metrics", limit_bytes=MAX_METRICS_BYTES, timeout_s=self._tempo.pace.scrape_timeout_s
            )
            began = asyncio.get_running_loop().time()
            engine = self._engine(page)
            is_small = len(page) <= _MAX_INLINE_BYTES
            signals = read_signals(engine, page) if is_small else await asyncio.to_thread(read_signals, engine, page)
            self._parse_s = asyncio.get_running_loop().time() - began
        except (Unreachable, InvalidInput) as error:
            self._tell_problem(_advised(error))
            signals = _UNKNOWN
        else:
            self._tell_problem(_NO_LOAD if signals == _UNKNOWN else "")
        if signals == _UNKNOWN and self.last == _UNKNOWN:
            return False
        self.last = signals
        self._seen(signals)
        return signals != _UNKNOWN

    def _has_work(self) -> bool:
        return self.last is not None and bool(self.last.waiting or self.last.running)

    def _tell_problem(self, problem: str) -> None:
        if problem == self.problem:
            return
        if problem:
            log.warning(f"load of {self._name} is not known: /metrics: {problem}")
        else:
            log.info(f"load of {self._name} is known again")
        self.problem = problem

    async def _sleep(self, seconds: float, can_wake: bool) -> None:
        if not can_wake:
            await asyncio.sleep(seconds)
            return
        self._wake.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            return
        finally:
            self._wake.set()


def _advised(error: Exception) -> str:
    """What went wrong, and what turns the page on where there is none."""
    has_no_page = isinstance(error, Unreachable) and error.status in NO_SUCH_PATH
    return f"{error}; {_NO_PAGE}" if has_no_page else str(error)
