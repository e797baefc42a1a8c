"""A pool that only answers: the real admin server over canned figures, on a socket in a run directory."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shoal.hosts.admin import ADMIN_SOCKET, EndpointPicture, PoolPicture, WorkerPicture
from shoal.hosts.supervisor.answers import Aborted, Explained, PoolAnswers
from shoal.hosts.supervisor.orders import Carried, EndpointOrder, NotFound
from shoal.hosts.supervisor.server import AdminServer
from shoal.routing.events import SessionAborted

EXPLANATION: dict[str, Any] = {
    "picker": "0",
    "request_id": "ab12-7",
    "client_id": "mine-1",
    "api": "chat",
    "model": "m",
    "target_model": "m",
    "prompt_tokens": 4100,
    "profile": "default",
    "weights": {"expected-wait-scorer": 2.0, "queue-scorer": 1.0},
    "dropped": [["label-selector-filter", 1]],
    "candidates": [
        {"id": "a", "total": 1.25, "matched_tokens": 0, "scores": {"expected-wait-scorer": 0.5, "queue-scorer": 0.25}},
        {"id": "b", "total": 2.5, "matched_tokens": 4096, "scores": {"expected-wait-scorer": 1.0, "queue-scorer": 0.5}},
    ],
    "chosen": ["b", "a"],
    "queue_s": 0.0015,
    "served": "b",
    "status": 200,
    "attempts": 1,
    "ttft_s": 0.058,
    "duration_s": 1.5,
    "cached_tokens": 4080,
    "reported_prompt_tokens": 4111,
    "completion_tokens": 50,
    "is_estimated": False,
    "is_cut": False,
}


WAITING: dict[str, Any] = {
    "picker": "0",
    "state": "waiting",
    "request_id": "waits-1",
    "client_id": "",
    "api": "chat",
    "model": "m",
    "tenant": "me",
    "prompt_tokens": 640,
    "priority": 0,
    "queue_s": 2.5,
    "ahead": 15,
    "ahead_by": [
        {"priority": 10, "tenant": "a", "requests": 3},
        {"priority": 0, "tenant": "batch", "requests": 11},
    ],
    "status": None,
}
REFUSED: dict[str, Any] = {
    **WAITING,
    "state": "refused",
    "request_id": "refused-1",
    "queue_s": 31.0,
    "reason": "rejected-ttl-expired",
    "message": "The request waited 31.0 s [in the queue].",
    "retry_after_s": 4.0,
}


class FakeAnswers(PoolAnswers):
    """Canned answers; each picture has ten more requests on `a`, one second later."""

    def __init__(self) -> None:
        super().__init__(list, PoolPicture)
        self.readings = 0
        self.draining: dict[str, int] = {}
        self.aborted: list[SessionAborted] = []
        self.silent: list[str] = []
        self.deaf = False

    async def picture(self) -> PoolPicture:
        self.readings += 1
        gone = [name for name, left in self.draining.items() if left == 0]
        self.draining = {name: max(0, left - 1) for name, left in self.draining.items()}
        endpoints = [
            EndpointPicture(
                id="a",
                address="10.0.0.1:8000",
                state="ready",
                models=["m"],
                inflight_requests=2,
                waiting=1.0,
                running=3.0,
                kv_usage_ratio=0.42,
                requests_total=10 * self.readings,
                prompt_tokens_total=1000,
                cached_tokens_total=750,
                ttft_s_avg=0.0585,
                reports_cached_tokens=not self.deaf,
            ),
            EndpointPicture(id="b", address="10.0.0.2:8000", state="loading", reason="connection refused"),
        ]
        return PoolPicture(
            url="http://127.0.0.1:8080",
            pid=1,
            at_s=float(self.readings),
            is_ready=True,
            workers=[WorkerPicture(picker="0"), WorkerPicture(picker="1", is_answering=False)],
            endpoints=[endpoint for endpoint in endpoints if endpoint.id not in gone],
            requests_total=10 * self.readings,
            inflight=2,
            warnings=["something to look at"],
        )

    async def explain(self, request_id: str) -> Explained:
        known = (EXPLANATION, WAITING, REFUSED)
        found = [each for each in known if request_id and request_id in (each["request_id"], each["client_id"])]
        return Explained(
            request_id=request_id, found=found, silent=[] if found else ["1"], renewed=[] if found else ["0"]
        )

    async def abort(self, session: SessionAborted) -> Aborted:
        self.aborted.append(session)
        return Aborted(requests=1 if session.tenant_id else 3, silent=self.silent)


class FakeOperations:
    """Writes down what it is asked."""

    def __init__(self, answers: FakeAnswers) -> None:
        self.asked: list[str] = []
        self.orders: list[EndpointOrder] = []
        self.problems: dict[str, str] = {}
        self._answers = answers

    async def add(self, url: str) -> Carried:
        is_known = f"add {url}" in self.asked
        self.asked.append(f"add {url}")
        return Carried(endpoints=["10.0.0.9:8000"], is_known=is_known)

    async def drain(self, name: str) -> Carried:
        self.asked.append(f"drain {name}")
        if name != "a":
            raise NotFound(f"no endpoint {name!r}; known: a, b")
        self._answers.draining["a"] = 3
        return Carried(endpoints=["a"])

    async def remove(self, name: str) -> Carried:
        self.asked.append(f"remove {name}")
        return Carried(endpoints=[name])

    async def control(self, order: EndpointOrder) -> Carried:
        self.orders.append(order)
        if order.id == "nobody":
            raise NotFound("no endpoint 'nobody'; known: a, b")
        return Carried(endpoints=[order.id] if order.id else ["a", "b"], problems=self.problems)

    async def reload(self) -> str:
        return "reloaded"

    async def upgrade(self) -> str:
        self.asked.append("upgrade")
        return "2 worker(s) replaced"

    def why_not_ready(self) -> str:
        return ""


class FakePool:
    """What a test may look at."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.answers = FakeAnswers()
        self.operations = FakeOperations(self.answers)
        self.flags = ["--run-dir", str(run_dir)]


@contextmanager
def fake_pool(run_dir: Path) -> Iterator[FakePool]:
    """Serve a fake pool from a thread."""
    pool = FakePool(run_dir)
    loop = asyncio.new_event_loop()
    server = AdminServer(pool.answers, pool.operations, pool.operations)
    loop.run_until_complete(server.listen_unix(run_dir / ADMIN_SOCKET))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield pool
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
