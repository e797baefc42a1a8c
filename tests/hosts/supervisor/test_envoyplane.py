"""What our Envoy is given: TLS groups of engines, and what its counters mean."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from shoal.hosts.fleet import Target
from shoal.hosts.supervisor.envoyplane import EnvoyPlane
from shoal.hosts.supervisor.settings import Ground
from shoal.kernel import ConfigError
from shoal.pool import Endpoint
from shoal.routing.config import load
from tests.hosts.envoy.test_tls import make_certificate

GROUND = Ground(host="127.0.0.1", port=8080, metrics_port=0)


class Scene:
    """A data plane whose Envoy is not started: its files are what is looked at."""

    def __init__(self, directory: Path) -> None:
        self.ca = Path(make_certificate(directory, "authority")[0])
        self.config = load("", "default")
        self.targets = {"a": Target(host="10.0.0.1", port=443, is_tls=True, ca_file=str(self.ca))}
        self.plane = EnvoyPlane(self.config, GROUND, directory, ["0"], lambda: self.targets)

    def show(self, *ids: str) -> None:
        fleet = {name: Endpoint(id=name, address="10.0.0.1:443", is_tls=self.targets[name].is_tls) for name in ids}
        asyncio.run(self.plane.show(fleet, False))

    @property
    def authorities(self) -> list[str]:
        return [group.ca for group in self.plane.process.settings.backend_tls if group.ca]


def test_an_https_backend_that_is_gone_leaves_no_certificate_authority_behind(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.show("a")
    assert scene.authorities == [str(scene.ca)]
    scene.show()
    assert scene.authorities == [str(scene.ca)]  # it is a member still, only not ready
    scene.targets.clear()
    scene.show()
    scene.ca.unlink()
    scene.plane.configure(scene.config)
    assert scene.authorities == []


def test_an_authority_that_cannot_be_used_does_not_keep_a_reload_from_being_accepted(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.ca.unlink()
    with pytest.raises(ConfigError, match="roots cannot be used"):
        scene.show("a")
    scene.plane.configure(scene.config)


@pytest.mark.parametrize(("mode", "says"), [("open", "Envoy placed new ones by itself"), ("closed", "got 503")])
def test_what_a_missing_picker_costs_is_said_as_the_failure_mode_has_it(tmp_path: Path, mode: str, says: str) -> None:
    scene = Scene(tmp_path)
    scene.plane.configure(load(f"apiVersion: shoal.dev/v1alpha1\nkind: Pool\nfailure_mode: {mode}\n", "pool.yaml"))
    assert says in scene.plane.meaning("http.public.ext_proc.failure_mode_allowed")
    assert "limit" in scene.plane.meaning("cluster.engines.upstream_cx_overflow")


def test_a_changed_limit_of_connections_waits_for_the_next_start(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    before = scene.config.pool
    after = msgspec.structs.replace(before, limits=msgspec.structs.replace(before.limits, max_connections=10))
    assert scene.plane.needs_restart(before, after) == ["limits.max_connections"]
    assert scene.plane.needs_restart(after, after) == []


def test_a_changed_key_or_authority_changes_the_mark_of_an_endpoint(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    marks = [scene.plane.marks()]
    for change in ({"api_key": "sk-1"}, {"ca_file": "other.pem"}):
        scene.targets = {"a": msgspec.structs.replace(scene.targets["a"], **change)}
        marks.append(scene.plane.marks())
    assert len({each["a"] for each in marks}) == 3
