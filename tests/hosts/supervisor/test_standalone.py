"""What the picker alone does with a reload, and what it asks of its router."""

import asyncio
from pathlib import Path

import pytest

from shoal.hosts.supervisor.configuration import Configuration
from shoal.hosts.supervisor.configured import ConfiguredBackends
from shoal.hosts.supervisor.standalone import PickerOptions, StandalonePicker, run_picker
from shoal.kernel import ConfigError
from shoal.routing import Router

HEAD = "apiVersion: shoal.dev/v1alpha1\nkind: Pool\n"
IDLE_FIELD = """apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: precise-prefix-cache-producer
  parameters: {tokenProcessorConfig: {blockSizeTokens: 16}}
- type: prefix-cache-scorer
"""


class Scene:
    """A picker that is made and not started."""

    def __init__(self, directory: Path) -> None:
        self.keys, self.file = directory / "keys", directory / "pool.yaml"
        self.file.write_text(HEAD)
        configuration = Configuration(self.file)
        options = PickerOptions(backends=("http://127.0.0.1:1",), config=self.file)
        self.picker = StandalonePicker(options, configuration, [], ConfiguredBackends(()), None, directory)

    def ask_for_keys(self) -> None:
        self.file.write_text(f"{HEAD}auth: {{keys_file: {self.keys}}}\naliases: {{a: b}}\n")


def test_settings_that_a_running_picker_does_not_read_are_said_until_it_restarts(tmp_path: Path) -> None:
    async def test() -> None:
        scene = Scene(tmp_path)
        scene.keys.write_text(f"ops:{'0' * 64}\n")
        scene.ask_for_keys()
        assert (await scene.picker.reload()).endswith("is in use; at the next start: auth")
        assert "these settings take effect at the next start: auth" in scene.picker._about().warnings
        scene.file.write_text(HEAD)
        assert "next start" not in await scene.picker.reload()
        assert not any("next start" in warning for warning in scene.picker._about().warnings)

    asyncio.run(test())


def test_a_reload_or_start_with_keys_that_are_not_there_is_refused(tmp_path: Path) -> None:
    async def test() -> None:
        scene = Scene(tmp_path)
        scene.ask_for_keys()
        with pytest.raises(ConfigError, match=r"auth\.keys_file"):
            await scene.picker.reload()
        with pytest.raises(ConfigError, match=r"auth\.keys_file"):
            await run_picker(PickerOptions(config=scene.file))

    asyncio.run(test())


def test_whether_an_endpoint_is_busy_is_asked_without_a_status_of_the_whole_fleet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        scene = Scene(tmp_path)
        monkeypatch.delattr(Router, "status")
        assert not scene.picker._is_busy("a")
        monkeypatch.setattr(Router, "inflight_at", lambda self, endpoint_id: int(endpoint_id == "a"))
        assert scene.picker._is_busy("a")
        assert not scene.picker._is_busy("b")

    asyncio.run(test())


def test_every_picker_hashes_prompts_with_a_key_of_its_own(tmp_path: Path) -> None:
    async def test() -> None:
        keys = {Scene(tmp_path).picker._options.hash_key for _ in range(3)}
        assert len(keys) == 3
        assert "0" not in keys

    asyncio.run(test())


def test_what_is_wrong_with_the_file_is_said_once_and_under_its_own_name(tmp_path: Path) -> None:
    async def test() -> None:
        scene = Scene(tmp_path)
        scene.file.write_text(f"{HEAD}---\n{IDLE_FIELD}")
        await scene.picker.reload()
        (warning,) = [each for each in scene.picker._about().warnings if "blockSizeTokens" in each]
        assert warning.startswith(f"{scene.file}:")
        assert scene.picker.picker.driver.router.status().warnings == []

    asyncio.run(test())
