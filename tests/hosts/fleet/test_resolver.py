import asyncio
import logging

import pytest

from shoal.hosts.fleet.pace import Tempo
from shoal.hosts.fleet.resolver import Resolver, system_lookup
from tests.hosts.fleet.fleet_engines import FAST, run, until


class Names:
    """A name service that a test sets."""

    def __init__(self) -> None:
        self.answers: dict[str, list[str]] = {}
        self.error: Exception | None = None
        self.asked = 0

    async def __call__(self, name: str) -> list[str]:
        self.asked += 1
        if self.error:
            raise self.error
        return self.answers.get(name, [])


def test_every_address_of_a_name_is_known_and_followed() -> None:
    async def test() -> None:
        names = Names()
        names.answers["vllm"] = ["10.0.0.2", "10.0.0.1"]
        changes: list[int] = []
        resolver = Resolver(lambda: changes.append(1), Tempo(FAST, 0), names)
        resolver.want(["vllm"])
        await until(lambda: resolver.addresses("vllm") == ("10.0.0.1", "10.0.0.2"))
        names.answers["vllm"] = ["10.0.0.2", "10.0.0.3"]
        await until(lambda: resolver.addresses("vllm") == ("10.0.0.2", "10.0.0.3"))
        assert len(changes) == 2
        await resolver.close()

    run(test)


def test_a_failed_lookup_keeps_the_last_answer_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        names = Names()
        names.answers["vllm"] = ["10.0.0.1"]
        resolver = Resolver(lambda: None, Tempo(FAST, 0), names)
        resolver.want(["vllm"])
        await until(lambda: resolver.addresses("vllm"))
        names.error = OSError(-2, "Name or service not known")
        asked = names.asked
        await until(lambda: names.asked > asked + 4)
        assert resolver.addresses("vllm") == ("10.0.0.1",)
        assert "Name or service not known" in resolver.reason("vllm")
        names.error = None
        await until(lambda: not resolver.reason("vllm"))
        await resolver.close()

    with caplog.at_level(logging.INFO, logger="shoal"):
        run(test)
    assert sum("cannot be resolved" in record.getMessage() for record in caplog.records) == 1
    assert sum("resolves again" in record.getMessage() for record in caplog.records) == 1


def test_an_empty_answer_counts_as_failed() -> None:
    async def test() -> None:
        names = Names()
        names.answers["vllm"] = ["10.0.0.1"]
        resolver = Resolver(lambda: None, Tempo(FAST, 0), names)
        resolver.want(["vllm"])
        await until(lambda: resolver.addresses("vllm"))
        names.answers["vllm"] = []
        await until(lambda: resolver.reason("vllm"))
        assert resolver.addresses("vllm") == ("10.0.0.1",)
        resolver.want([])
        assert resolver.addresses("vllm") == ()
        await resolver.close()

    run(test)


def test_a_dual_stack_name_counts_by_its_ipv4_addresses() -> None:
    async def test() -> None:
        assert await system_lookup("localhost") == ["127.0.0.1"]
        await asyncio.get_running_loop().shutdown_default_executor()

    run(test)
