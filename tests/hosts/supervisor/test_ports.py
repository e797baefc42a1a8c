"""A port that is taken is one clear line."""

import os
import socket

import pytest

from shoal.hosts.supervisor.ports import check_port, free_port, holder_of
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


def test_a_free_port_passes_and_stays_free() -> None:
    port = free_port()
    check_port("127.0.0.1", port, "--port")
    check_port("127.0.0.1", port, "--port")
    assert holder_of(port) == ""


def test_an_address_of_another_machine_is_refused_with_the_flag_to_change() -> None:
    with pytest.raises(ConfigError, match=r"no address of this machine.*--host"):
        check_port("192.0.2.1", 8080, "--port")
