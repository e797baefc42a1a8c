"""A port that is taken is one clear line."""

import os
import socket
from pathlib import Path

import pytest

from shoal.hosts.admin import ADMIN_SOCKET, RunDir, default_for
from shoal.hosts.supervisor.ports import check_port, free_port, hold_port, holder_of
from shoal.kernel import ConfigError


def test_a_port_already_taken_names_the_port_its_holder_and_the_flag() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            check_port("127.0.0.1", port, "--port")
    line = str(caught.value)
    assert "\n" not in line
    assert f"port {port} on 127.0.0.1 is already taken by " in line
    assert f"(pid {os.getpid()})" in line
    assert "--port" in line


def test_a_port_taken_by_a_running_pool_names_its_directory_and_how_to_stop_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with socket.socket() as taken, socket.socket(socket.AF_UNIX) as admin:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        run_dir = RunDir(default_for(12345))  # of another port: its metrics port is the one that is taken
        run_dir.open()
        admin.bind(str(run_dir.path / ADMIN_SOCKET))
        admin.listen()
        with pytest.raises(ConfigError) as caught:
            check_port("127.0.0.1", taken.getsockname()[1], "--metrics-port")
        run_dir.close()
    said = f"by the Shoal pool in {run_dir.path}; stop it with `kill {os.getpid()}`, or choose another port with "
    assert str(caught.value).endswith(f"{said}--metrics-port")


def test_a_free_port_passes_and_stays_free() -> None:
    port = free_port()
    check_port("127.0.0.1", port, "--port")
    check_port("127.0.0.1", port, "--port")
    assert holder_of(port) is None


def test_a_held_port_is_shared_with_who_shares_ports_and_with_nobody_else() -> None:
    port = free_port()
    holder = hold_port("127.0.0.1", port)
    assert holder is not None
    with holder, socket.socket() as friend:
        with pytest.raises(ConfigError, match="already taken"):
            check_port("127.0.0.1", port, "--port")
        friend.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        friend.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as Envoy
        friend.bind(("127.0.0.1", port))
        friend.listen()
        # Every connection reaches the one that listens.
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", port), timeout=10):
                friend.accept()[0].close()
    check_port("127.0.0.1", port, "--port")


def test_an_address_of_another_machine_is_refused_with_the_flag_to_change() -> None:
    with pytest.raises(ConfigError, match=r"no address of this machine.*--host"):
        check_port("192.0.2.1", 8080, "--port")
