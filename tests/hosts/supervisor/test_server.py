"""The doors of the admin API."""

import asyncio
from pathlib import Path

import aiohttp

from shoal.hosts.supervisor import free_port
from shoal.hosts.supervisor.server import AdminServer
from tests.cli.fake_pool import FakeAnswers, FakeOperations


def test_the_tcp_door_shows_metrics_and_health_and_changes_nothing(tmp_path: Path) -> None:
    async def run() -> dict[str, int]:
        answers = FakeAnswers()
        operations = FakeOperations(answers)
        server = AdminServer(answers, operations, operations)
        port = free_port()
        await server.listen_tcp("127.0.0.1", port)
        found: dict[str, int] = {}
        try:
            async with aiohttp.ClientSession() as session:
                for method, path in (
                    ("GET", "/metrics"),
                    ("GET", "/healthz"),
                    ("GET", "/snapshot"),
                    ("GET", "/explain/x"),
                    ("POST", "/endpoints"),
                    ("POST", "/abort"),
                    ("POST", "/upgrade"),
                    ("POST", "/reload"),
                ):
                    async with session.request(method, f"http://127.0.0.1:{port}{path}") as answer:
                        found[path] = answer.status
        finally:
            await server.stop()
        return found

    found = asyncio.run(run())
    assert [path for path, status in found.items() if status == 200] == ["/metrics", "/healthz"]
    assert {status for path, status in found.items() if path not in ("/metrics", "/healthz")} == {404}


def test_orders_that_make_no_sense_are_refused_with_a_reason(tmp_path: Path) -> None:
    async def run() -> list[tuple[int, str]]:
        answers = FakeAnswers()
        operations = FakeOperations(answers)
        server = AdminServer(answers, operations, operations)
        await server.listen_unix(tmp_path / "admin.sock")
        found = []
        try:
            connector = aiohttp.UnixConnector(path=str(tmp_path / "admin.sock"))
            async with aiohttp.ClientSession(connector=connector) as session:
                for body in (
                    *(b"{", b'{"op": "dance", "id": "a"}', b'{"op": "drain"}', b'{"op": "drain", "id": "x"}'),
                    *(b'{"op": "reset"}', b'{"op": "pause", "id": "a", "all": true}'),
                    *(b'{"op": "pause", "id": "a", "timeout_s": 0}', b'{"op": "resume", "id": "nobody"}'),
                ):
                    async with session.post("http://pool/endpoints", data=body) as answer:
                        found.append((answer.status, (await answer.json())["error"]))
        finally:
            await server.stop()
        return found

    garbage, unknown, nameless, missing, *orders = asyncio.run(run())
    assert garbage[0] == 400
    assert unknown == (400, "unknown op 'dance'; one of add, drain, remove, pause, resume, reset")
    assert nameless == (400, "name the endpoint with url or id")
    assert missing == (404, "no endpoint 'x'; known: a, b")
    which = "name one endpoint with url or id, or give labels, or all"
    assert orders == [
        (400, which),
        (400, which),
        (400, "timeout_s must be above 0 and at most 3600"),
        (404, "no endpoint 'nobody'; known: a, b"),
    ]
