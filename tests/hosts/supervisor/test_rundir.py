"""Run directories: private, held by one pool, found by its port."""

import socket
import stat
from pathlib import Path

import pytest

from shoal.hosts.admin import ADMIN_SOCKET, NoPool, RunDir, default_for, find_pool
from shoal.kernel import ConfigError


def test_the_directory_is_private_and_says_who_holds_it(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    run_dir.open()
    try:
        assert stat.S_IMODE(run_dir.path.stat().st_mode) == 0o700
        with pytest.raises(ConfigError, match=r"held by another pool \(pid \d+\)"):
            RunDir(tmp_path / "run").open()
    finally:
        run_dir.close()
    again = RunDir(tmp_path / "run")
    again.open()
    again.close()


def test_sockets_and_bequests_of_a_dead_pool_are_cleared(tmp_path: Path) -> None:
    stale = tmp_path / "run" / ADMIN_SOCKET
    stale.parent.mkdir()
    left = stale.with_name("w0.1.bequest")
    left.touch()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(stale))
    run_dir = RunDir(stale.parent)
    run_dir.open()
    assert not stale.exists()
    assert not left.exists()
    left.touch()
    run_dir.close()
    assert not left.exists()


def test_a_directory_that_others_could_enter_is_closed_to_them(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir(mode=0o755)
    run_dir = RunDir(path)
    run_dir.open()
    run_dir.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_a_link_that_somebody_prepared_is_refused(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "target")
    with pytest.raises(ConfigError, match="not a directory"):
        RunDir(tmp_path / "run").open()


def test_a_path_too_long_for_sockets_is_named_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"too long.*--run-dir"):
        RunDir(tmp_path / ("x" * 120)).open()


def test_each_public_port_has_its_own_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert default_for(8080) == tmp_path / "shoal" / "8080"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert str(default_for(8080)).startswith("/tmp/shoal-")


def test_a_verb_without_a_pool_says_where_it_looked_and_which_pools_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(NoPool, match=r"no pool is running on port 8080.*shoal up"):
        find_pool(None, 8080)
    other = default_for(9000) / ADMIN_SOCKET
    other.parent.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as alive:
        alive.bind(str(other))
        alive.listen()
        with pytest.raises(NoPool, match="running pools of this user: --port 9000"):
            find_pool(None, 8080)
        assert find_pool(None, 9000).run_dir == other.parent


def test_keys_and_private_keys_do_not_outlive_the_pool(tmp_path: Path) -> None:
    names = [
        "envoy/eds/eds.json", "envoy/eds/.eds.json.7", "envoy/sds/listener.json", "backends.json", ".backends.json.7",
        "direct/backends.json", "direct/.backends.json.7",
    ]  # fmt: skip
    run_dir = RunDir(tmp_path / "run")

    def leave_behind() -> list[Path]:
        files = [run_dir.path / name for name in (*names, "envoy/envoy.json")]
        for file in files:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("{}")
        return files

    only_the_last = [False] * len(names) + [True]
    died = leave_behind()
    run_dir.open()
    assert [file.exists() for file in died] == only_the_last
    ended = leave_behind()
    run_dir.close()
    assert [file.exists() for file in ended] == only_the_last
