"""A stage is a real pool that is there until the measurement is over."""

import asyncio
import os

import pytest

from shoal.hosts.load import Stage, StageFailed, run_load
from shoal.workload import Chat, Plan

pytestmark = pytest.mark.e2e


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_pool_that_cannot_start_says_why() -> None:
    async def go() -> None:
        async with Stage(["--config", "/nowhere/config.yaml"]):
            raise AssertionError("it started")

    with pytest.raises(StageFailed, match="nowhere"):
        asyncio.run(go())


def test_a_stage_serves_and_is_gone_afterwards() -> None:
    plan = Plan(
        name="two",
        chats=tuple(Chat(id=str(i), says=("hello " * 40,), reply_tokens=(4,)) for i in range(6)),
        concurrency=2,
    )

    async def go() -> int:
        async with Stage(["--engines", "2", "--workers", "1"]) as stage:
            report = await run_load(plan, stage.url, model=await stage.model())
            report = await stage.complete(report)
            assert report.errors == {}
            assert report.completion_tokens == 24
            assert sum(report.served.values()) == 6
            assert len(report.served) == 2
            return stage.pid

    assert not is_alive(asyncio.run(go()))
