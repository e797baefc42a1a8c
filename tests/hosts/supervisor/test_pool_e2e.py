"""A whole pool: `shoal up` with real engines and workers, under each data plane."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from shoal.cli import main
from shoal.hosts.supervisor import free_port
from tests.hosts.supervisor.pool_rig import Pool, body, is_gone, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def pool(plane: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Two engines and two workers, shared by the tests that leave it whole."""
    directory = tmp_path_factory.mktemp("pool")
    config = directory / "epp.yaml"
    config.write_text("apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n")
    running = Pool(directory, ["--data-plane", plane, "--engines", "2", "--workers", "2", "--config", str(config)])
    try:
        running.wait_ready()
        yield running
    finally:
        running.end()


class Load:
    """Requests one after the other from a few threads; keeps what did not go well."""

    def __init__(self, pool: Pool, threads: int = 3) -> None:
        self.done = 0
        self.bad: list[str] = []
        self._stop = threading.Event()
        self._pool = pool
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(threads)]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        with httpx.Client(timeout=60.0) as client:
            turn = 0
            while not self._stop.is_set():
                turn += 1
                try:
                    answer = client.post(f"{self._pool.url}/v1/chat/completions", json=body(f"{number} {turn}"))
                    if answer.status_code != 200:
                        self.bad.append(f"{answer.status_code} {answer.text[:200]}")
                except httpx.HTTPError as error:
                    self.bad.append(repr(error))
                self.done += 1


def test_the_first_lines_say_what_is_open_and_the_last_that_it_is_ready(pool: Pool) -> None:
    said = pool.said()
    assert "open to clients address=127.0.0.1:" in said
    assert "auth=off tls=off" in said
    assert f"shoal is ready: {pool.url}" in said


def test_a_request_is_served_and_explained(pool: Pool, capsys: pytest.CaptureFixture[str]) -> None:
    assert pool.chat(request_id="e2e-explain").status_code == 200
    flags = ["--run-dir", str(pool.run_dir)]
    until(lambda: "served by engine-" in _explain(flags, capsys))
    picture = pool.client.picture()
    assert picture.is_ready
    assert not picture.is_partial
    assert {endpoint.id for endpoint in picture.endpoints} == {"engine-0", "engine-1"}
    assert len(picture.workers) == 2


def _explain(flags: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    main(["explain", "e2e-explain", *flags])
    return capsys.readouterr().out


def test_counts_of_all_workers_are_one(pool: Pool) -> None:
    before = pool.client.picture().requests_total
    for turn in range(12):
        assert pool.chat(f"count {turn}").status_code == 200
    picture = pool.client.picture()
    assert picture.requests_total == before + 12
    assert until(lambda: pool.client.picture().inflight == 0)


def test_a_killed_worker_is_back_with_the_fleet_and_only_what_it_carried_fails(plane: str, pool: Pool) -> None:
    victim = pool.client.picture().workers[0].pid
    assert victim is not None
    with Load(pool) as load:
        until(lambda: load.done > 5)
        os.kill(victim, signal.SIGKILL)
        until(lambda: pool.client.picture().workers[0].pid not in (None, victim), why=pool.said)
        until(lambda: not pool.client.picture().is_partial)
        mark = load.done
        until(lambda: load.done > mark + 10)
    # A worker of the direct plane has connections of clients, and each of the three may lose the one that it uses.
    assert len(load.bad) <= {"envoy": 0, "direct": 3}[plane], load.bad
    assert all("disconnected" in each or "reset" in each for each in load.bad), load.bad
    assert len(pool.client.picture().endpoints) == 2


def test_an_upgrade_under_load_replaces_every_worker_and_no_request_fails(
    pool: Pool, capsys: pytest.CaptureFixture[str]
) -> None:
    old = {worker.pid for worker in pool.client.picture().workers}
    pool.chat(request_id="before")
    until(lambda: pool.client.explain("before")["found"][0]["status"] == 200, why=pool.said)
    with Load(pool) as load:
        until(lambda: load.done > 5)
        assert main(["up", "--upgrade", "--run-dir", str(pool.run_dir)]) == 0
        mark = load.done
        until(lambda: load.done > mark + 10)
    assert load.bad == []
    assert "2 worker(s) replaced" in capsys.readouterr().out
    until(lambda: not old & {worker.pid for worker in pool.client.picture().workers}, why=pool.said)
    assert until(lambda: len(pool.client.picture().workers) == 2)
    (found,) = pool.client.explain("before")["found"]
    assert (found["is_replaced"], found["client_id"], found["status"]) == (True, "before", 200)
    assert found["candidates"]


def test_an_upgrade_lets_an_answer_end_that_takes_longer_than_the_drain_at_the_end(plane: str, tmp_path: Path) -> None:
    flags = ["--engines", "1", "--drain-timeout", "0.5", "--engine-arg=--slow-factor=20"]
    running = Pool(tmp_path, ["--data-plane", plane, *flags])
    try:
        running.wait_ready()
        old = running.client.picture().workers[0].pid
        asked = body("long", 250, stream=True)
        with httpx.stream("POST", f"{running.url}/v1/chat/completions", json=asked, timeout=60.0) as answer:
            lines = answer.iter_lines()
            next(lines)
            assert main(["up", "--upgrade", "--run-dir", str(running.run_dir)]) == 0
            until(lambda: running.client.picture().workers[0].pid not in (None, old), why=running.said)
            assert "data: [DONE]" in list(lines)
        until(lambda: not psutil.pid_exists(old or 0), why=running.said)
        assert "ended with requests in flight" not in running.said()
    finally:
        running.end()


def test_an_invalid_configuration_is_refused_and_a_good_one_needs_no_restart_of_who_carries_the_bytes(
    pool: Pool,
) -> None:
    config = pool.log.parent / "epp.yaml"
    good, carriers = config.read_text(), pool.carrier_pids()
    config.write_text(good + "plugins:\n- type: no-such-plugin\n")
    until(lambda: "configuration refused" in pool.said())
    assert "no-such-plugin" in pool.said()
    assert pool.chat().status_code == 200
    assert any("no-such-plugin" in warning for warning in pool.client.picture().warnings)
    config.write_text(good + "plugins:\n- type: queue-scorer\n- type: max-score-picker\n")
    until(lambda: "configuration accepted" in pool.said())
    assert not any("no-such-plugin" in warning for warning in pool.client.picture().warnings)
    assert pool.chat().status_code == 200
    assert pool.carrier_pids() == carriers


@pytest.mark.only_plane("envoy", "there is no Envoy")
def test_a_killed_envoy_is_started_again_and_knows_the_fleet(pool: Pool) -> None:
    old = pool.envoy_pid()
    os.kill(old, signal.SIGKILL)
    until(lambda: any(each.name().startswith("envoy") and each.pid != old for each in pool.family()))
    until(lambda: _status(pool) == 200, why=pool.said)
    until(lambda: not pool.client.picture().warnings, why=pool.said)


def _status(pool: Pool) -> int:
    try:
        return pool.chat().status_code
    except httpx.HTTPError:
        return 0


def test_the_metrics_page_is_one_over_all_workers(pool: Pool) -> None:
    page = pool.client.metrics()
    families = [line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")]
    assert len(families) == len(set(families))
    assert 'shoal_worker_up{picker="0"} 1' in page
    assert 'shoal_worker_up{picker="1"} 1' in page
    total = sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith("llm_d_epp_request_total"))
    assert total > 0


def test_an_endpoint_drains_and_comes_back_while_the_pool_runs(pool: Pool, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--run-dir", str(pool.run_dir)]
    address = next(each.address for each in pool.client.picture().endpoints if each.id == "engine-1")
    assert main(["endpoint", "drain", "engine-1", *flags]) == 0
    assert "drained engine-1" in capsys.readouterr().out
    assert [each.id for each in pool.client.picture().endpoints] == ["engine-0"]
    assert pool.chat().status_code == 200
    assert main(["endpoint", "add", f"http://{address}", *flags]) == 0
    until(lambda: sum(each.state == "ready" for each in pool.client.picture().endpoints) == 2, why=pool.said)


def test_a_killed_engine_is_started_again_under_its_address_and_returns(pool: Pool) -> None:
    def engines() -> set[int]:
        found = set()
        for each in pool.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                if "engine" in each.cmdline():
                    found.add(each.pid)
        return found

    before = engines()
    victim = min(before)
    addresses = {each.address for each in pool.client.picture().endpoints}
    os.kill(victim, signal.SIGKILL)
    # One that is back within a few seconds is never seen as lost.
    until(lambda: len(engines() - {victim}) == len(before), why=pool.said)
    until(lambda: all(each.state == "ready" for each in pool.client.picture().endpoints), why=pool.said)
    assert {each.address for each in pool.client.picture().endpoints} == addresses
    until(lambda: all(pool.chat().status_code == 200 for _ in range(4)), why=pool.said)


def test_a_second_pool_on_the_same_port_is_refused_in_one_line(
    pool: Pool, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    port = pool.url.rpartition(":")[2]
    flags = ["--engines", "1", "--metrics-port", "0", "--run-dir", str(tmp_path / "run")]
    assert main(["up", "--port", port, *flags]) == 2
    err = capfd.readouterr().err
    assert err.startswith(f"shoal: port {port} on 127.0.0.1 is already taken by the Shoal pool in {pool.run_dir}; ")
    assert f"`kill {pool.process.pid}`" in err
    assert err.count("\n") == 1


def test_keys_that_a_reload_asks_for_are_asked_for(pool: Pool) -> None:
    keys, config = pool.log.parent / "keys", pool.log.parent / "epp.yaml"
    keys.write_text(f"ops:{'0' * 64}\n")
    before = config.read_text()
    extra = f"---\napiVersion: shoal.dev/v1alpha1\nkind: Pool\nauth: {{keys_file: {keys}}}\nlisten: {{host: 0.0.0.0}}\n"
    config.write_text(before + extra)
    until(lambda: all(pool.chat().status_code == 401 for _ in range(8)), why=pool.said)
    until(lambda: "take effect at the next start" in pool.said())
    assert "settings=listen.host" in pool.said()
    for file in (keys, config):
        content = file.read_text()
        file.unlink()
        until(lambda name=str(file): any(f"{name} is gone" in each for each in pool.client.picture().warnings))  # type: ignore[misc]
        assert pool.chat().status_code == 401
        file.write_text(content)
        until(lambda: not any("is gone" in each for each in pool.client.picture().warnings))
    config.write_text(before)
    until(lambda: all(pool.chat().status_code == 200 for _ in range(4)), why=pool.said)


def test_a_changed_key_of_a_backend_reaches_the_data_plane_and_does_not_outlive_the_pool(
    plane: str, tmp_path: Path
) -> None:
    port, key, config = free_port(), tmp_path / "key", tmp_path / "pool.yaml"
    key.write_text("sk-old\n")
    config.write_text(
        "apiVersion: shoal.dev/v1alpha1\nkind: Pool\n"
        f"backends:\n- {{url: 'http://127.0.0.1:{port}', api_key_file: {key}, engine: shoal}}\n"
    )
    engine = subprocess.Popen([sys.executable, "-m", "shoal.cli", "engine", "--port", str(port)])
    pool = Pool(tmp_path, ["--data-plane", plane, "--config", str(config)])
    shown = pool.run_dir / {"envoy": "envoy/eds/eds.json", "direct": "backends.json"}[plane]
    try:
        pool.wait_ready()
        assert "Bearer sk-old" in shown.read_text()
        key.write_text("sk-new\n")
        os.kill(pool.process.pid, signal.SIGHUP)
        until(lambda: "Bearer sk-new" in shown.read_text(), why=pool.said)
        assert "sk-old" not in shown.read_text()
        assert pool.chat().status_code == 200
    finally:
        pool.end()
        engine.kill()
        engine.wait()
    assert not shown.exists()


def test_sigterm_finishes_what_is_in_flight_and_leaves_no_process(plane: str, tmp_path: Path) -> None:
    pool = Pool(tmp_path, ["--data-plane", plane, "--engines", "1"])
    try:
        pool.wait_ready()
        family = [each.pid for each in pool.family()]
        chunks: list[str] = []
        began = threading.Event()

        def stream() -> None:
            request = {"json": body("stream", tokens=60, stream=True), "timeout": 60.0}
            with httpx.stream("POST", f"{pool.url}/v1/chat/completions", **request) as answer:  # type: ignore[arg-type]
                for line in answer.iter_lines():
                    chunks.append(line)
                    began.set()

        client = threading.Thread(target=stream)
        client.start()
        assert began.wait(60.0)
        pool.process.send_signal(signal.SIGTERM)
        client.join()
        assert "data: [DONE]" in chunks
        assert pool.process.wait(60.0) == 0
        until(lambda: all(is_gone(pid) for pid in family))
        assert not list(pool.run_dir.glob("*.sock"))
    finally:
        pool.end()


def test_a_second_signal_stops_at_once(plane: str, tmp_path: Path) -> None:
    pool = Pool(
        tmp_path, ["--data-plane", plane, "--engines", "1", "--engine-arg=--slow-factor=20", "--drain-timeout", "300"]
    )
    try:
        pool.wait_ready()
        family = [each.pid for each in pool.family()]
        threading.Thread(target=lambda: _ignore(lambda: pool.chat("slow", tokens=3000)), daemon=True).start()
        until(lambda: pool.client.picture().inflight == 1)
        pool.process.send_signal(signal.SIGINT)
        until(lambda: "draining" in pool.said())
        assert pool.process.poll() is None
        pool.process.send_signal(signal.SIGINT)
        assert pool.process.wait(60.0) == 0
        assert "stopping at once" in pool.said()
        until(lambda: all(is_gone(pid) for pid in family))
    finally:
        pool.end()


def _ignore(work: Callable[[], object]) -> None:
    with contextlib.suppress(httpx.HTTPError):
        work()


def test_a_pool_whose_engine_does_not_answer_says_why_it_is_not_ready(plane: str, tmp_path: Path) -> None:
    port = free_port()
    pool = Pool(tmp_path, ["--data-plane", plane, "--backend", f"http://127.0.0.1:{port}"])
    try:
        until(lambda: 'endpoints="0 of 1 endpoint"' in pool.said(), why=pool.said)
        until(lambda: f"waiting for http://127.0.0.1:{port}: connection refused" in pool.said(), why=pool.said)
        assert "shoal is ready" not in pool.said()
        (endpoint,) = pool.client.picture().endpoints
        assert (endpoint.state, endpoint.reason) == ("loading", "connection refused")
    finally:
        pool.end()


def test_a_pool_is_ready_with_its_first_endpoint_and_counts_on(plane: str, tmp_path: Path) -> None:
    port = free_port()
    pool = Pool(
        tmp_path, ["--data-plane", plane, "--engines", "1", "--workers", "2", "--backend", f"http://127.0.0.1:{port}"]
    )
    try:
        pool.wait_ready()
        assert f"shoal is ready: {pool.url} (1 of 2 endpoints)" in pool.said()
        assert all(worker.is_answering for worker in pool.client.picture().workers)
        assert pool.chat().status_code == 200
        assert "ext_proc" not in pool.said()
        engine = subprocess.Popen([sys.executable, "-m", "shoal.cli", "engine", "--port", str(port)])
        until(lambda: 'endpoints ready share="2 of 2 endpoints"' in pool.said(), why=pool.said)
    finally:
        pool.end()
        engine.kill()
        engine.wait()


def test_children_are_gone_when_the_supervisor_was_killed(plane: str, tmp_path: Path) -> None:
    pool = Pool(tmp_path, ["--data-plane", plane, "--engines", "1"])
    try:
        pool.wait_ready()
        family = [each.pid for each in pool.family()]
        assert len(family) >= {"envoy": 4, "direct": 3}[plane]  # itself, an engine, a worker, Envoy
        pool.process.kill()
        until(lambda: all(is_gone(pid) for pid in family))
    finally:
        pool.end()
