"""Sources that flags and configuration name, the same for a pool and a picker alone."""

from pathlib import Path

import pytest

from shoal.cli import main
from shoal.hosts import logs
from shoal.hosts.fleet import FileSource, StaticSource
from shoal.hosts.supervisor.named import named_sources
from shoal.kernel import ConfigError
from shoal.routing.config import load


def test_flags_come_before_files_and_nothing_named_is_no_source(tmp_path: Path) -> None:
    (tmp_path / "backends.yaml").write_text("")
    config = load("", "default")
    assert named_sources((), None, config) == []
    found = named_sources(("http://10.0.0.1:8000",), tmp_path / "backends.yaml", config)
    assert [type(source) for source in found] == [StaticSource, FileSource]
    with pytest.raises(ConfigError, match="must begin with http"):
        named_sources(("10.0.0.1:8000",), None, config)


def test_a_flag_that_the_picker_takes_and_does_nothing_with_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logs, "setup", lambda *_: None)
    assert main(["picker", "--config-file", "/nowhere/epp.yaml", "--pool-name", "p", "--tracing=true"]) == 2
    said = [record for record in caplog.records if "changes nothing here" in record.message]
    assert [record.fields["flag"] for record in said] == ["--pool-name", "--tracing"]  # type: ignore[attr-defined]
