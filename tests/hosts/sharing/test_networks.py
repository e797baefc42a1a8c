"""Pickers of several pools that share over TCP, with a secret."""

import asyncio
import socket
from pathlib import Path

import pytest
import zmq

from shoal.hosts.sharing import Secret, new_secret, read_secret
from shoal.hosts.sharing.wires import Wires
from shoal.kernel import ConfigError
from shoal.routing.config import load
from shoal.routing.settings import Sharing as SharingSettings
from tests.hosts.sharing.pickers import Picker, all_hear, until

PORTS = 4


def free_ports(count: int) -> int:
    """The first of `count` ports in a row that nobody listens on now."""
    for port in range(21_000, 60_000, 16):
        with_all: list[socket.socket] = []
        try:
            for at in range(port, port + count):
                probe = socket.socket()
                with_all.append(probe)
                probe.bind(("127.0.0.1", at))
            return port
        except OSError:
            continue
        finally:
            for probe in with_all:
                probe.close()
    raise AssertionError("no ports are free")


def secret_in(folder: Path, name: str = "secret") -> Path:
    path = folder / name
    new_secret(path)
    return path


def settings(port: int, peers: tuple[int, ...]) -> SharingSettings:
    return SharingSettings(
        listen=f"127.0.0.1:{port}",
        ports=PORTS,
        peers=tuple(f"localhost:{each}" for each in peers),
        secret_file="secret",
    )


def test_pickers_of_two_pools_share_and_do_not_hear_themselves(tmp_path: Path) -> None:
    async def run() -> None:
        secret, first_port = secret_in(tmp_path), free_ports(3 * PORTS)
        ports = [first_port, first_port + PORTS]
        # Each names all, itself among them, as a DNS name of all replicas does.
        one, two = (
            Picker(tmp_path, number, settings(port, (ports[0], ports[1])), secret) for number, port in enumerate(ports)
        )
        try:
            await one.sharing.start()
            await two.sharing.start()
            await all_hear((one, two))
            name = one.send("chat", 1_280)
            await until(lambda: two.bookings == 1)
            place = next(each for each in range(4) if one.router.inflight_at(f"e{each}"))
            one.finish(name, place)
            await until(lambda: two.is_idle and two.bookings == 0)
            assert two.finish(two.send("chat", 1_280), place) >= 1_024
        finally:
            one.close()
            two.close()

    asyncio.run(run())


def test_two_workers_of_one_pool_take_ports_of_their_own_and_the_third_only_listens(tmp_path: Path) -> None:
    async def run() -> None:
        secret, port = secret_in(tmp_path), free_ports(PORTS)
        workers = [Picker(tmp_path, number, settings(port, (port,)), secret) for number in range(3)]
        try:
            for worker in workers:
                await worker.sharing.start()
            await until(lambda: [len(each.states) for each in workers] == [1, 1, 2])
        finally:
            for worker in workers:
                worker.close()

    asyncio.run(run())


def test_a_picker_with_another_secret_neither_hears_nor_is_heard(tmp_path: Path) -> None:
    async def run() -> None:
        first_port = free_ports(3 * PORTS)
        ports = [first_port, first_port + PORTS, first_port + 2 * PORTS]
        good, other = secret_in(tmp_path), secret_in(tmp_path, "other")
        one, two, stranger = (
            Picker(tmp_path, number, settings(port, tuple(ports)), good if number < 2 else other)
            for number, port in enumerate(ports)
        )
        try:
            for each in (stranger, one, two):
                await each.sharing.start()
            await all_hear((one, two))
            stranger.send("p")
            one.send("p")
            await until(lambda: two.bookings == 1)
            await asyncio.sleep(0.5)
            assert stranger.bookings == one.bookings == 0
            assert stranger.states == []
        finally:
            for each in (one, two, stranger):
                each.close()

    asyncio.run(run())


def test_nothing_is_opened_on_a_network_without_keys() -> None:
    wires = Wires(None)
    publisher = wires.open(zmq.PUB)
    try:
        with pytest.raises(OSError, match="not without keys"):
            wires.bind(publisher, "tcp://127.0.0.1:*")
        with pytest.raises(OSError, match="not without keys"):
            wires.connect(publisher, "tcp://127.0.0.1:1")
    finally:
        publisher.close(0)
        wires.close()


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ("{listen: '0.0.0.0:7420'}", "secret_file is missing"),
        ("{peers: ['a:7420']}", "secret_file is missing"),
        ("{listen: '7420', secret_file: s}", "HOST:PORT"),
        ("{peers: ['a:65535'], secret_file: s}", "HOST:PORT"),
        ("{listen: 'a:7420', ports: 3, secret_file: s}", "even number"),
    ],
)
def test_settings_that_cannot_work_are_refused_in_one_line(lines: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as raised:
        load(f"apiVersion: shoal.dev/v1alpha1\nkind: Pool\nsharing: {lines}\n", "pool.yaml")
    assert "\n" not in str(raised.value)
    assert "pool.yaml:3" in str(raised.value)


def test_a_secret_is_made_once_and_read_the_same_by_all(tmp_path: Path) -> None:
    path = secret_in(tmp_path)
    assert path.stat().st_mode & 0o077 == 0
    assert read_secret(path) == read_secret(path)
    assert isinstance(read_secret(path), Secret)
    with pytest.raises(ConfigError, match="already"):
        new_secret(path)
    short = tmp_path / "short"
    short.write_text("too short\n")
    with pytest.raises(ConfigError, match="shoal keys secret"):
        read_secret(short)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_secret(tmp_path / "missing")
