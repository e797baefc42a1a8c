"""Runs `async def` tests on one loop per module, and keeps one Envoy per module."""

import asyncio
import inspect
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from tests.hosts.envoy.envoy_rig import Rig, rig


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """The loop of a module."""
    with asyncio.Runner() as made:
        made.get_loop()
        yield made


@pytest.fixture(scope="module")
def live(request: pytest.FixtureRequest, runner: asyncio.Runner) -> Iterator[Rig]:
    """Envoy, pickers and engines as the module's SETUP asks for."""
    setup: dict[str, Any] = getattr(request.module, "SETUP", {})
    context: AbstractAsyncContextManager[Rig] = rig(**setup)
    made = runner.run(context.__aenter__())
    try:
        yield made
    finally:
        runner.run(context.__aexit__(None, None, None))


@pytest.fixture(autouse=True)
def _fresh(request: pytest.FixtureRequest) -> None:
    if "live" in request.fixturenames:
        runner: asyncio.Runner = request.getfixturevalue("runner")
        runner.run(request.getfixturevalue("live").forget())


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run coroutine tests on the module's loop."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    made: asyncio.Runner = pyfuncitem._request.getfixturevalue("runner")
    made.run(pyfuncitem.obj(**arguments))
    return True
