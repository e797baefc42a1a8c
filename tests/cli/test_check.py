import io
import json
from pathlib import Path

import pytest
import yaml

from shoal.cli import main
from shoal.cli.docs import settings_page

ROOT = Path(__file__).parents[2]
GOOD = ROOT / "examples/config/llm-d-default.yaml"
BAD = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins:\n- type: queue-scorr\n"


def test_a_good_file_is_printed_with_its_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(GOOD)]) == 0
    picker, pool = yaml.safe_load_all(capsys.readouterr().out)
    assert picker["schedulingProfiles"][0]["plugins"][2] == {"pluginRef": "prefix-cache-scorer", "weight": 3.0}
    assert pool["listen"] == {"host": "127.0.0.1", "port": 8080}
    assert pool["data_plane"] == "envoy"


def test_a_bad_file_is_one_line_with_its_place_and_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "pool.yaml"
    path.write_text(BAD)
    assert main(["check", str(path)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"shoal: {path}:4: plugins[0].type: unknown plugin type queue-scorr")
    assert printed.err.count("\n") == 1


def test_every_error_of_a_file_is_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "pool.yaml"
    path.write_text(f"{BAD}  wieght: 2\n---\napiVersion: shoal.dev/v1alpha1\nkind: Pool\nusage: nothing\n")
    assert main(["check", str(path)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[2] for line in lines] == ["4", "5", "9"]
    assert main(["check", "--json", str(path)]) == 2
    assert [error["line"] for error in json.loads(capsys.readouterr().out)["errors"]] == [4, 5, 9]


def test_an_empty_file_is_said_to_mean_the_defaults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "pool.yaml"
    path.write_text("# nothing yet\n")
    assert main(["check", str(path)]) == 0
    printed = capsys.readouterr()
    assert printed.err == f"warning: {path}: holds no document, so everything is as it is by default\n"
    assert yaml.safe_load_all(printed.out)


def test_json_is_for_machines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "pool.yaml"
    path.write_text(BAD)
    assert main(["check", "--json", str(path)]) == 2
    (error,) = json.loads(capsys.readouterr().out)["errors"]
    assert (error["line"], error["path"]) == (4, "plugins[0].type")
    assert main(["check", "--json", str(GOOD)]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["ok"]
    assert shown["documents"][0]["kind"] == "EndpointPickerConfig"


def test_warnings_do_not_mix_with_the_configuration(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(BAD.replace("queue-scorr", "tokenizer")))
    assert main(["check", "-"]) == 0
    printed = capsys.readouterr()
    assert printed.err.startswith("warning: stdin:4: plugins[0].type: tokenizer is deprecated")
    assert "warning" not in printed.out


def test_a_file_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "/nowhere/pool.yaml"]) == 2
    assert capsys.readouterr().err == "shoal: /nowhere/pool.yaml: cannot be read: No such file or directory\n"


def test_the_settings_on_the_configuration_page_are_current() -> None:
    assert settings_page() in (ROOT / "docs/config.md").read_text()


def test_a_file_that_no_worker_could_start_with_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "pool.yaml"
    path.write_text(f"apiVersion: shoal.dev/v1alpha1\nkind: Pool\nauth: {{keys_file: {tmp_path}/keys}}\n")
    assert main(["check", str(path)]) == 2
    assert capsys.readouterr().err.startswith(f"shoal: {tmp_path}/keys: auth.keys_file: ")
