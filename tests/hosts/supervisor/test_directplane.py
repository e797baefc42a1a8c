"""The sockets of the direct data plane, and what its workers are given."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import msgspec
import pytest

from shoal.hosts.backends import Backends
from shoal.hosts.fleet import Target
from shoal.hosts.supervisor import free_port
from shoal.hosts.supervisor.dialling import BACKENDS
from shoal.hosts.supervisor.directplane import ClientsDoor, DirectPlane
from shoal.hosts.supervisor.link import WorkerLink
from shoal.hosts.supervisor.settings import Ground
from shoal.hosts.supervisor.workers import Workers
from shoal.kernel import ConfigError
from shoal.pool import Endpoint
from shoal.routing.config import RouterConfig, load
from tests.hosts.envoy.test_tls import make_certificate


class Link:
    """A link to a worker that notes when it is told to serve."""

    def __init__(self) -> None:
        self.served = 0

    async def serve(self) -> None:
        self.served += 1


class Scene:
    """A door and a plane without workers."""

    def __init__(self, directory: Path) -> None:
        self.run_dir = directory
        self.port = free_port()
        self.door = ClientsDoor(directory, Ground(host="127.0.0.1", port=self.port, metrics_port=0), ["0", "1"])
        self.targets: dict[str, Target] = {}
        workers = cast(Workers, None)
        self.plane = DirectPlane(config(), self.door, workers, directory, lambda: self.targets)

    def listening(self, picker: str) -> socket.socket:
        """What the worker of a slot makes of its flags."""
        _, where, *_ = self.door.flags(picker, "0.1")
        made = socket.socket(fileno=os.dup(int(where.removeprefix("fd:"))))
        made.listen()
        return made

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=10)

    def shown(self) -> Backends:
        return msgspec.json.decode((self.run_dir / BACKENDS).read_bytes(), type=Backends)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    """A scene whose sockets are closed in the end."""
    made = Scene(tmp_path)
    try:
        yield made
    finally:
        made.door.close()


def config(settings: str = "") -> RouterConfig:
    return load(f"apiVersion: shoal.dev/v1alpha1\nkind: Pool\n{settings}", "pool.yaml")


def test_nobody_connects_before_a_worker_listens_and_nobody_after_the_door_is_shut(scene: Scene) -> None:
    with pytest.raises(ConnectionRefusedError):
        scene.connect()
    with scene.listening("1"):
        scene.connect().close()
        scene.door.shut()
        with pytest.raises(ConnectionRefusedError):
            scene.connect()


def test_what_waits_in_the_queue_of_a_worker_that_ends_is_taken_by_the_next(scene: Scene) -> None:
    first = scene.listening("0")
    with scene.connect() as client:
        client.sendall(b"hello")
        first.close()
        with scene.listening("0") as second, second.accept()[0] as taken:
            assert taken.recv(5) == b"hello"


def test_both_slots_get_connections(scene: Scene) -> None:
    with contextlib.ExitStack() as stack:
        listening = [stack.enter_context(scene.listening(picker)) for picker in ("0", "1")]
        for each in listening:
            each.setblocking(False)
        for _ in range(64):
            stack.enter_context(scene.connect())
        counts = [accepted(each) for each in listening]
    assert sum(counts) == 64
    assert min(counts) > 0


def accepted(listening: socket.socket) -> int:
    """Take what waits; returns how many."""
    count = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            listening.accept()[0].close()
            count += 1
    return count


def test_a_worker_that_knows_the_fleet_waits_until_the_pool_is_open(scene: Scene) -> None:
    link = Link()
    asyncio.run(scene.door.admit("0", "0.1", cast(WorkerLink, link)))
    assert (link.served, scene.plane.why_not_serving) == (0, "the port is not open yet")
    scene.door.is_open = True
    asyncio.run(scene.door.admit("0", "0.1", cast(WorkerLink, link)))
    assert (link.served, scene.plane.why_not_serving) == (1, "")


def test_a_port_that_is_taken_is_refused(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ground = Ground(host="127.0.0.1", port=taken.getsockname()[1], metrics_port=0)
        with pytest.raises(ConfigError, match="already taken"):
            ClientsDoor(tmp_path, ground, ["0", "1"])


def test_workers_are_shown_keys_and_groups_only_where_there_are_any(scene: Scene, tmp_path: Path) -> None:
    authority, _ = make_certificate(tmp_path, "authority")
    scene.targets = {
        "plain": Target(host="10.0.0.1", port=80),
        "keyed": Target(host="10.0.0.2", port=80, api_key="sk-1"),
        "tls": Target(host="engine.example", port=443, is_tls=True, ca_file=authority),
    }
    fleet = {
        name: Endpoint(id=name, address=f"10.0.0.{number}:80", is_tls=name == "tls")
        for number, name in enumerate(scene.targets, start=1)
    }
    assert asyncio.run(scene.plane.show(fleet, True))
    keyed, tls = scene.shown().endpoints
    (group,) = scene.shown().groups
    assert (keyed.address, keyed.authorization, keyed.tls) == ("10.0.0.2:80", "Bearer sk-1", "")
    assert (tls.address, tls.tls) == ("10.0.0.3:80", group.name)
    assert (group.ca, group.sni) == (authority, "engine.example")
    assert (tmp_path / BACKENDS).stat().st_mode & 0o077 == 0


def test_an_authority_that_cannot_be_used_is_refused_and_the_last_file_stays(scene: Scene, tmp_path: Path) -> None:
    asyncio.run(scene.plane.start())
    scene.targets = {"a": Target(host="10.0.0.1", port=443, is_tls=True, ca_file=str(tmp_path / "gone.pem"))}
    with pytest.raises(ConfigError, match="roots cannot be used"):
        asyncio.run(scene.plane.show({"a": Endpoint(id="a", address="10.0.0.1:443", is_tls=True)}, True))
    assert scene.shown() == Backends()


def test_a_certificate_that_cannot_be_used_is_refused_and_one_that_comes_or_goes_needs_new_workers(
    scene: Scene, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="cannot be used"):
        scene.plane.configure(config("tls: {cert: /nowhere/a.pem, key: /nowhere/b.pem}\n"))
    assert not scene.plane.is_tls
    certificate, key = make_certificate(tmp_path, "pool")
    after = config(f"tls: {{cert: {certificate}, key: {key}}}\n")
    scene.plane.configure(after)
    assert scene.plane.is_tls
    assert scene.plane.needs_new_workers(config().pool, after.pool) == ["tls"]
    assert scene.plane.needs_new_workers(after.pool, after.pool) == []
