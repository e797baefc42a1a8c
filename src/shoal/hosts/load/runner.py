"""Runs a plan against a URL: the chats in a closed or an open loop, and each chat turn by turn.

A chat whose turn fails is not carried on, since what follows would be another conversation; its remaining turns
are counted as `skipped`, so that a router cannot look fast by failing early.
"""

import asyncio
from collections.abc import Callable, Sequence
from time import perf_counter

from shoal.hosts.load.client import Client
from shoal.hosts.load.lag import LoopLag
from shoal.hosts.load.report import LoadReport, Sample, sample_of, summarise
from shoal.workload import Chat, Plan, chat_body

ENDPOINT_HEADER = "x-shoal-endpoint"
Progress = Callable[[int, int], None]


async def run_load(
    plan: Plan,
    url: str,
    *,
    model: str = "shoal",
    stream: bool = True,
    arrivals: Sequence[float] | None = None,
    headers: dict[str, str] | None = None,
    timeout_s: float = 300.0,
    endpoint_header: str = ENDPOINT_HEADER,
    leave_after_s: Callable[[int], float | None] | None = None,
    progress: Progress | None = None,
    samples: list[Sample] | None = None,
) -> LoadReport:
    """Send the whole plan and return what was measured.

    arrivals: start of each chat in seconds (open loop); None keeps `plan.concurrency` chats in flight (closed loop).
    leave_after_s: for the n-th request, the seconds after which the client leaves, None to stay.
    progress: called with (requests ended, requests planned) after each.  endpoint_header: response header that
    names who served.  samples: filled with each request as it ends.
    """
    run = _Run(plan, url, model, stream, headers, timeout_s, endpoint_header, leave_after_s, progress)
    if samples is not None:
        run.samples = samples
    run.began_s = perf_counter()
    with LoopLag() as lag:
        try:
            if arrivals is None:
                await run.closed_loop()
            else:
                await run.open_loop(arrivals)
        finally:
            await run.client.close()
    return summarise(plan.name, run.samples, duration_s=perf_counter() - run.began_s, lag_p99_s=lag.p99_s)


class _Run:
    def __init__(
        self,
        plan: Plan,
        url: str,
        model: str,
        stream: bool,
        headers: dict[str, str] | None,
        timeout_s: float,
        endpoint_header: str,
        leave_after_s: Callable[[int], float | None] | None,
        progress: Progress | None,
    ) -> None:
        self.client = Client(url, headers=headers, timeout_s=timeout_s)
        self.samples: list[Sample] = []
        self.began_s = 0.0
        self._plan = plan
        self._model = model
        self._stream = stream
        self._endpoint_header = endpoint_header
        self._leave_after_s = leave_after_s
        self._progress = progress
        self._sent = 0

    async def closed_loop(self) -> None:
        chats = iter(self._plan.chats)

        async def client() -> None:
            for chat in chats:
                await self._converse(chat)

        async with asyncio.TaskGroup() as clients:
            for _ in range(min(self._plan.concurrency, len(self._plan.chats))):
                clients.create_task(client())

    async def open_loop(self, arrivals: Sequence[float]) -> None:
        if len(arrivals) != len(self._plan.chats):
            raise ValueError(f"{len(arrivals)} arrivals for {len(self._plan.chats)} chats")
        async with asyncio.TaskGroup() as clients:
            for chat, at_s in zip(self._plan.chats, arrivals, strict=True):
                await asyncio.sleep(max(0.0, self.began_s + at_s - perf_counter()))
                clients.create_task(self._converse(chat))

    async def _converse(self, chat: Chat) -> None:
        replies: list[str] = []
        for turn in range(len(chat.says)):
            if chat.think_s:
                await asyncio.sleep(chat.think_s[turn])
            body = chat_body(chat, replies, model=self._model, stream=self._stream)
            leave_after_s = self._leave_after_s(self._sent) if self._leave_after_s else None
            self._sent += 1
            answer = await self.client.post("/v1/chat/completions", body, leave_after_s=leave_after_s)
            sample, reply = sample_of(answer, began_s=self.began_s, endpoint_header=self._endpoint_header)
            self._keep(sample)
            if sample.error:
                for _ in range(turn + 1, len(chat.says)):
                    self._keep(Sample(at_s=sample.at_s, error="skipped"))
                return
            replies.append(reply)

    def _keep(self, sample: Sample) -> None:
        self.samples.append(sample)
        if self._progress is not None:
            self._progress(len(self.samples), self._plan.requests)
