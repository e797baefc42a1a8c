"""A configuration that no worker could start with is refused before anything changes."""

import os
import sys
from pathlib import Path

import pytest

from shoal.cli import main
from shoal.hosts import logs
from shoal.hosts.supervisor.preflight import preflight
from shoal.kernel import ConfigError
from shoal.routing.config import load
from shoal.routing.settings import PoolSettings

HEAD = "apiVersion: shoal.dev/v1alpha1\nkind: Pool\n"


def pool(text: str) -> PoolSettings:
    return load(HEAD + text, "pool.yaml").pool


def test_the_default_configuration_asks_nothing_of_the_machine() -> None:
    preflight(load("", "default").pool)


def test_a_keys_file_that_is_missing_or_bad_is_refused_with_its_setting(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    with pytest.raises(ConfigError, match=r"keys: auth\.keys_file: "):
        preflight(pool(f"auth: {{keys_file: {keys}}}\n"))
    keys.write_text("not a key\n")
    with pytest.raises(ConfigError, match=r"keys:1: auth\.keys_file: expected NAME:SHA256"):
        preflight(pool(f"auth: {{keys_file: {keys}}}\n"))
    keys.write_text(f"ops:{'0' * 64}\n")
    preflight(pool(f"auth: {{keys_file: {keys}}}\n"))


def test_tracing_without_its_libraries_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    with pytest.raises(ConfigError, match=r"shoal\[otel\]"):
        preflight(pool("tracing: {otlp_endpoint: 'http://127.0.0.1:4318'}\n"))


def test_a_journal_that_cannot_be_written_is_refused_and_nothing_is_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"journal\.path: .*/file is not a directory"):
        preflight(pool(f"journal: {{path: {tmp_path}/file/journal}}\n"))
    if os.getuid():  # root may write everywhere
        with pytest.raises(ConfigError, match=r"journal\.path: /proc cannot be written"):
            preflight(pool("journal: {path: /proc/journal}\n"))
    preflight(pool(f"journal: {{path: {tmp_path}/new/journal}}\n"))
    assert not (tmp_path / "new").exists()


def test_a_pool_that_no_worker_could_serve_ends_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "setup", lambda *_: None)
    config = tmp_path / "pool.yaml"
    config.write_text(f"{HEAD}auth: {{keys_file: {tmp_path}/keys}}\n")
    assert main(["up", "--engines", "1", "--port", "0", "--config", str(config)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"shoal: {tmp_path}/keys: auth.keys_file: ")
    assert said.count("\n") == 1
