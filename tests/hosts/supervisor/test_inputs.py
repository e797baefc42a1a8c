"""A file that a running pool reads and that is gone or bad is said once, and in status for as long."""

import logging
from pathlib import Path

import pytest

from shoal.hosts.supervisor.inputs import Inputs, inputs_of
from shoal.routing.config import load

HEAD = "apiVersion: shoal.dev/v1alpha1\nkind: Pool\n"
KEY = f"ops:{'0' * 64}\n"


class Scene:
    """A pool's files and who looks at them."""

    def __init__(self, folder: Path) -> None:
        self.config, self.keys, self.backends = folder / "pool.yaml", folder / "keys", folder / "backends.yaml"
        self.keys.write_text(KEY)
        self.backends.write_text("- url: http://10.0.0.1:8000\n")
        self.settings = f"{HEAD}auth: {{keys_file: {self.keys}}}\n"
        self.config.write_text(self.settings)
        self.inputs = Inputs(lambda: inputs_of(self.config, self.backends, load(self.settings, "pool.yaml")))

    def warnings(self) -> list[str]:
        self.inputs.look()
        return self.inputs.warnings


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_each_file_that_is_gone_is_named_until_it_is_back(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    assert scene.warnings() == []
    with caplog.at_level(logging.INFO, logger="shoal"):
        for file, what in ((scene.config, "configuration file"), (scene.keys, "keys file")):
            content = file.read_text()
            file.unlink()
            for _ in range(3):
                (warning,) = scene.warnings()
            assert warning.startswith(f"the {what} {file} is gone: what was read last stays in use")
            assert caplog.messages == [warning]
            file.write_text(content)
            assert scene.warnings() == []
            assert caplog.messages[1:] == [f"the {what} {file} can be read again"]
            caplog.clear()


def test_an_edit_that_cannot_be_read_is_said_with_its_line_and_without_its_content(scene: Scene) -> None:
    scene.keys.write_text("ops:canary\n")
    (warning,) = scene.warnings()
    assert warning.startswith(f"the keys file cannot be used: {scene.keys}:1: expected NAME:SHA256")
    assert "canary" not in warning
    scene.backends.write_text("url: http://10.0.0.1:8000\n")
    assert any(line.startswith("the backends file cannot be used: ") for line in scene.warnings())
    scene.keys.write_text(KEY)
    scene.backends.write_text("[]")
    assert scene.warnings() == []


def test_a_file_that_a_reload_no_longer_names_is_not_looked_at(scene: Scene) -> None:
    scene.keys.unlink()
    assert len(scene.warnings()) == 1
    scene.settings = HEAD
    assert scene.warnings() == []
