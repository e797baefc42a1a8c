"""`shoal up` from the command line: what it refuses before anything starts, and the help."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.cli import VERBS, main
from tests.cli.fake_pool import FakePool


def test_without_engines_or_backends_it_says_what_to_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("shoal: nothing to put behind the endpoint")
    assert "shoal up --engines 4" in err
    assert "--backend http://" in err


def test_a_port_already_taken_is_one_clear_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        flags = ["--engines", "1", "--metrics-port", "0", "--run-dir", str(tmp_path / "run")]
        assert main(["up", "--port", str(port), *flags]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"shoal: port {port} on 127.0.0.1 is already taken by ")
    assert err.count("\n") == 1


def test_a_metrics_port_already_taken_names_its_flag(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        flags = ["--engines", "1", "--port", "0", "--run-dir", str(tmp_path / "run")]
        assert main(["up", "--metrics-port", port, *flags]) == 2
    assert "--metrics-port" in capsys.readouterr().err


def test_a_bad_configuration_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = tmp_path / "epp.yaml"
    config.write_text("apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins:\n- type: no-such-plugin\n")
    flags = ["--engines", "1", "--port", "0", "--metrics-port", "0", "--run-dir", str(tmp_path / "run")]
    assert main(["up", "--config", str(config), *flags]) == 2
    err = capsys.readouterr().err
    assert str(config) in err
    assert "no-such-plugin" in err
    assert not (tmp_path / "run").exists()


def test_flags_for_engines_that_do_not_exist_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--backend", "http://127.0.0.1:1", "--model", "m"]) == 2
    assert "--engines" in capsys.readouterr().err


def test_upgrade_asks_the_pool_that_runs(pool: FakePool, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--upgrade", *pool.flags]) == 0
    assert pool.operations.asked == ["upgrade"]
    assert "2 worker(s) replaced" in capsys.readouterr().out


def test_the_help_lists_every_verb_without_importing_any(capsys: pytest.CaptureFixture[str]) -> None:
    code = "import sys, shoal.cli; shoal.cli.main(['--help'])"
    code = (
        f"try:\n    exec({code!r})\nexcept SystemExit:\n    print([m for m in sys.modules if m.startswith('shoal.')])"
    )
    out = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}"], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert all(verb in out for verb in VERBS)
    assert out.splitlines()[-1] == "['shoal.cli']"


@pytest.mark.parametrize(
    "verb",
    [
        *VERBS,
        *(f"endpoint {part}" for part in ("add", "drain", "remove", "pause", "resume", "reset")),
        *(f"keys {part}" for part in ("new", "secret", "check")),
        *(f"twin {part}" for part in ("run", "compare", "size", "replay", "fit")),
    ],
)
def test_each_verb_has_help_with_examples(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*verb.split(), "--help"])
    assert ended.value.code == 0
    _, examples = capsys.readouterr().out.split("examples:\n")
    assert f"  shoal {verb}" in examples


def test_an_interrupt_is_a_clean_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("shoal.cli.status.run", interrupt)
    assert main(["status"]) == 130
