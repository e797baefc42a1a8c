"""What a replaced worker leaves of what it knew."""

from pathlib import Path

from shoal.hosts import bequest


def explanation(number: int, client: str = "") -> dict[str, object]:
    return {"request_id": f"r-{number}", "client_id": client, "chosen": ["e0"]}


def test_a_request_is_found_by_its_own_and_its_clients_id(tmp_path: Path) -> None:
    path = tmp_path / "w0.1.bequest"
    written = bequest.write(path, [explanation(2, 'mine "quoted" é'), explanation(1)])
    assert written == 2
    assert bequest.find(path, "r-1") == explanation(1)
    assert bequest.find(path, 'mine "quoted" é') == explanation(2, 'mine "quoted" é')
    assert path.stat().st_mode & 0o777 == 0o600


def test_what_only_looks_like_its_id_is_not_it(tmp_path: Path) -> None:
    path = tmp_path / "w0.1.bequest"
    bequest.write(path, [{**explanation(1), "model": "r-2", "chosen": ["r-2"]}])
    assert bequest.find(path, "r-2") is None
    assert bequest.find(path, "e0") is None
    assert bequest.find(path, "") is None


def test_the_latest_are_kept_within_the_budget(tmp_path: Path) -> None:
    path = tmp_path / "w0.1.bequest"
    one = len(b'{"request_id":"r-9","client_id":"c","chosen":["e0"]}\n')
    written = bequest.write(path, (explanation(number, "c") for number in range(9, 0, -1)), max_bytes=3 * one)
    assert written == 3
    assert path.stat().st_size <= 3 * one
    assert bequest.find(path, "r-7") is not None
    assert bequest.find(path, "r-6") is None
    assert bequest.find(path, "c") == explanation(9, "c")


def test_no_file_and_a_broken_one_hold_nothing(tmp_path: Path) -> None:
    assert bequest.find(tmp_path / "none.bequest", "r-1") is None
    broken = tmp_path / "broken.bequest"
    broken.write_bytes(b'{"request_id":"r-1"\n' + b'{"request_id":"r-2","client_id":"r-1"}\n')
    assert bequest.find(broken, "r-2") == {"request_id": "r-2", "client_id": "r-1"}
    assert bequest.find(broken, "r-1") == {"request_id": "r-2", "client_id": "r-1"}
