"""What a reload changes, and what it says when the workers do not come along."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from shoal.hosts.supervisor.configuration import Configuration
from shoal.hosts.supervisor.operations import PoolOperations
from shoal.hosts.supervisor.options import Options
from shoal.hosts.supervisor.parts import Parts
from shoal.hosts.supervisor.settings import Ground
from shoal.hosts.supervisor.vitals import Vitals
from shoal.hosts.supervisor.workers import Upgrade
from shoal.kernel import ConfigError
from shoal.routing import Configured, Event

HEAD = "apiVersion: shoal.dev/v1alpha1\nkind: Pool\n"


class Scene:
    """The operations of a pool whose other parts only keep what they are told."""

    def __init__(self, directory: Path) -> None:
        self.file = directory / "pool.yaml"
        self.keys = directory / "keys"
        self.file.write_text(HEAD)
        self.told: list[Event] = []
        self.upgrades = 0
        self.answer = Upgrade(True, "1 worker(s) replaced")
        parts = SimpleNamespace(
            options=Options(config=self.file),
            ground=Ground(host="127.0.0.1", port=8080, metrics_port=9090),
            run_dir=directory,
            configuration=Configuration(self.file),
            backends=SimpleNamespace(replace=lambda targets: None),
            plane=SimpleNamespace(
                configure=lambda config: None,
                needs_restart=lambda before, after: [],
                needs_new_workers=lambda before, after: [],
            ),
            gate=SimpleNamespace(pass_on=self.pass_on),
            workers=SimpleNamespace(upgrade=self.upgrade),
        )
        self.vitals = SimpleNamespace(reloads={"accepted": 0, "refused": 0}, config_error="")
        self.operations = PoolOperations(cast(Parts, parts), cast(Vitals, self.vitals))

    def pass_on(self, batch: Sequence[Event]) -> None:
        self.told.extend(batch)

    async def upgrade(self, drain_s: float) -> Upgrade:
        self.upgrades += 1
        return self.answer

    def ask_for_keys(self) -> None:
        self.file.write_text(f"{HEAD}auth: {{keys_file: {self.keys}}}\n")

    def reload(self) -> str:
        return asyncio.run(self.operations.reload())


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_a_reload_that_asks_for_keys_that_are_not_there_changes_nothing(scene: Scene) -> None:
    scene.ask_for_keys()
    with pytest.raises(ConfigError, match=r"auth\.keys_file"):
        scene.reload()
    assert (scene.told, scene.upgrades) == ([], 0)
    assert "not in use" in scene.vitals.config_error
    scene.keys.write_text(f"ops:{'0' * 64}\n")
    assert "is in use" in scene.reload()
    assert scene.upgrades == 1
    assert [type(event) for event in scene.told] == [Configured]
    assert scene.vitals.config_error == ""


def test_a_reload_fails_when_the_workers_could_not_be_replaced_and_the_next_one_tries_again(scene: Scene) -> None:
    scene.keys.write_text(f"ops:{'0' * 64}\n")
    scene.ask_for_keys()
    scene.answer = Upgrade(False, "picker 0: the new worker did not come up")
    with pytest.raises(ConfigError, match="workers still run with the auth of before"):
        scene.reload()
    assert scene.vitals.reloads == {"accepted": 0, "refused": 1}
    scene.answer = Upgrade(True, "1 worker(s) replaced")
    scene.reload()
    scene.reload()
    assert scene.upgrades == 2
    assert scene.vitals.reloads == {"accepted": 2, "refused": 1}
