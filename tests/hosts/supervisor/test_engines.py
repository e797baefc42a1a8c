"""Embedded engines as children of a pool."""

import asyncio

import aiohttp
import pytest
import uvloop

from shoal.hosts.supervisor.engines import EmbeddedEngines


@pytest.mark.e2e
def test_engines_of_a_pool_publish_on_loopback_ports_that_they_tell() -> None:
    async def sources() -> list[dict[str, str]]:
        engines = EmbeddedEngines(2, has_kv_events=True)
        engines.start()
        try:
            while engines.unannounced():
                await asyncio.sleep(0.05)
            async with aiohttp.ClientSession() as session:
                found = []
                for target in engines.targets():
                    async with session.get(f"http://{target.host}:{target.port}/kv_event_sources") as response:
                        found.append((await response.json())["0"])
            return found
        finally:
            await engines.stop()

    found = uvloop.run(sources())
    addresses = {each[key] for each in found for key in ("endpoint", "replay_endpoint")}
    assert len(addresses) == 4
    assert all(address.startswith("tcp://127.0.0.1:") and not address.endswith(":0") for address in addresses)


def test_engines_publish_nothing_unless_asked_and_each_has_its_own_hashes() -> None:
    assert "--kv-events-config" not in EmbeddedEngines(1)._command(0)
    commands = [EmbeddedEngines(2, has_kv_events=True)._command(number) for number in (0, 1)]
    assert [command[command.index("--hash-seed") + 1] for command in commands] == ["0", "1"]
