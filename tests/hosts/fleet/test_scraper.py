import asyncio
from collections.abc import Callable

import pytest

from shoal.hosts.fleet.door import EngineDoor, Lanes, Trust
from shoal.hosts.fleet.pace import Tempo
from shoal.hosts.fleet.readiness import detect_engine
from shoal.hosts.fleet.scraper import Scraper
from shoal.pool import Signals
from tests.hosts.fleet.fleet_engines import FAST, ScriptedEngine, run, target, until


class Scraped:
    """A scraper of one engine with its readings."""

    def __init__(
        self, engine: ScriptedEngine, busy: Callable[[], bool] = lambda: False, kind: type[Scraper] = Scraper
    ) -> None:
        aim = target(engine)
        self.seen: list[Signals] = []
        self.door = EngineDoor(aim, aim.endpoint("127.0.0.1"), Lanes(FAST), Trust())
        self.scraper = kind(
            engine.url,
            self.door,
            Tempo(FAST, 0),
            engine=lambda page: detect_engine(page) or "vllm",
            busy=busy,
            seen=self.seen.append,
        )

    async def __aenter__(self) -> "Scraped":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.door.close()


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_page_is_read_by_the_names_of_its_engine(kind: str) -> None:
    async def test() -> None:
        async with ScriptedEngine(kind) as engine, Scraped(engine) as scraped:
            engine.running = 3
            assert await scraped.scraper.scrape()
            assert scraped.seen == [Signals(running=3.0, waiting=0.0)]
            assert engine.headers["Accept-Encoding"] == "identity"

    run(test)


def test_a_failing_page_is_told_once_as_unknown_and_never_as_zero() -> None:
    async def test() -> None:
        async with ScriptedEngine() as engine, Scraped(engine) as scraped:
            engine.running = 2
            await scraped.scraper.scrape()
            engine.status["/metrics"] = 500
            for _ in range(5):
                assert not await scraped.scraper.scrape()
            engine.status.clear()
            engine.page = b"# nothing known\nother 1\n"
            for _ in range(5):
                assert not await scraped.scraper.scrape()
            engine.page = None
            await scraped.scraper.scrape()
            two = Signals(running=2.0, waiting=0.0)
            assert scraped.seen == [two, Signals(), two]

    run(test)


@pytest.mark.parametrize("page", [b"", b"x" * (5 << 20), b"\xff\xfe\x00" * 1000, b"{" * 9999, b"\n" * 99_999])
def test_a_hostile_page_is_an_unknown_load(page: bytes) -> None:
    async def test() -> None:
        async with ScriptedEngine() as engine, Scraped(engine) as scraped:
            engine.page = page
            assert not await scraped.scraper.scrape()
            assert scraped.seen == [Signals()]

    run(test)


def test_a_page_that_never_ends_is_given_up() -> None:
    async def test() -> None:
        async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            try:
                while True:
                    writer.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
                    await writer.drain()
            except ConnectionError:
                writer.close()

        server = await asyncio.start_server(drip, "127.0.0.1", 0)
        engine = ScriptedEngine(port=server.sockets[0].getsockname()[1])
        async with Scraped(engine) as scraped:
            assert not await scraped.scraper.scrape()
            assert scraped.seen == [Signals()]
        server.close()
        await until(lambda: len(asyncio.all_tasks()) == 1)

    run(test)


class Hasty(Scraper):
    """A scraper that notes its waits instead of waiting."""

    waits: list[float]

    async def _sleep(self, seconds: float, can_wake: bool) -> None:
        self.waits.append(seconds)
        await asyncio.sleep(0)

    async def scrape(self) -> bool:
        is_read = await super().scrape()
        # The time that reading took, which a busy machine stretches, is not what is tested here.
        self._parse_s = 0.0
        return is_read


def test_an_idle_engine_is_read_seldom_and_a_busy_one_often() -> None:
    async def test() -> None:
        is_busy = False
        async with ScriptedEngine() as engine, Scraped(engine, lambda: is_busy, Hasty) as scraped:
            waits: list[float] = []
            assert isinstance(scraped.scraper, Hasty)
            scraped.scraper.waits = waits
            task = asyncio.create_task(scraped.scraper.run())
            await until(lambda: len(waits) >= 8)
            assert waits[7] == pytest.approx(FAST.idle_scrape_s, rel=0.11)
            assert waits[0] < waits[1] < waits[2]
            is_busy = True
            await until(lambda: waits[-1] <= FAST.busy_scrape_s * 1.11)
            is_busy = False
            engine.running = 1
            count = len(waits)
            await until(lambda: len(waits) > count + 5)
            assert waits[-1] <= FAST.busy_scrape_s * 1.11
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    run(test)


def test_work_that_comes_ends_an_idle_wait() -> None:
    async def test() -> None:
        is_busy = False
        async with ScriptedEngine() as engine, Scraped(engine, busy=lambda: is_busy) as scraped:
            waiting = asyncio.create_task(scraped.scraper._sleep(3600.0, True))
            await asyncio.sleep(0)
            scraped.scraper.wake_if_busy()
            await asyncio.sleep(0)
            assert not waiting.done()
            is_busy = True
            scraped.scraper.wake_if_busy()
            await asyncio.wait_for(waiting, 10)

    run(test)


def test_engines_are_told_apart_by_their_pages() -> None:
    assert detect_engine(b"# TYPE x\nsglang:num_running_reqs 1\n") == "sglang"
    assert detect_engine(b"vllm:num_requests_running 1\n") == "vllm"
    assert detect_engine(b"trtllm_num_requests_waiting 1\n") == "trtllm-serve"
    assert detect_engine(b"# HELP about vllm: nothing\nother 1\n") == ""


@pytest.mark.parametrize(
    ("status", "page", "said"),
    [
        (404, None, "HTTP 404; start SGLang with --enable-metrics"),
        (401, None, "the engine wants an API key"),
        (500, None, "HTTP 500"),
        (0, b"<html>not metrics</html>", "no known load metric; start vLLM without --disable-log-stats"),
        (0, b"x" * (5 << 20), "larger than"),
    ],
)
def test_why_the_load_is_not_known_is_said_until_it_is_known(status: int, page: bytes | None, said: str) -> None:
    async def test() -> None:
        async with ScriptedEngine() as engine, Scraped(engine) as scraped:
            assert scraped.scraper.problem == ""
            engine.status, engine.page = ({"/metrics": status} if status else {}), page
            await scraped.scraper.scrape()
            assert said in scraped.scraper.problem
            engine.status, engine.page = {}, None
            await scraped.scraper.scrape()
            assert scraped.scraper.problem == ""

    run(test)


def test_a_page_that_does_not_come_is_a_problem_too() -> None:
    async def test() -> None:
        async with ScriptedEngine() as engine, Scraped(engine) as scraped:
            engine.gates["/metrics"] = asyncio.Event()
            await scraped.scraper.scrape()
            assert "no answer" in scraped.scraper.problem

    run(test)
