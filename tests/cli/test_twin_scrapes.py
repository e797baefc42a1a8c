"""`shoal twin fit --metrics`: from files of pages, or from an address, to a profile."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from shoal.cli import main
from shoal.cli.profiles import profile_named
from shoal.engine import find_profile
from tests.simulation.scrapes import scrapes

PAGES = [page for _, page in scrapes(find_profile("a100-8b"), 1, count=8)]


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    for place, page in enumerate(PAGES):
        (tmp_path / f"{place}.txt").write_bytes(page)
    return [str(tmp_path / f"{place}.txt") for place in range(len(PAGES))]


@pytest.fixture
def address() -> Iterator[str]:
    """An engine that is further at each scrape, and does not answer one of them."""
    asked = iter(range(1_000_000))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            place = next(asked)
            self.send_response(503 if place == 2 else 200)
            self.end_headers()
            self.wfile.write(PAGES[min(place, len(PAGES) - 1)])

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/metrics"
    server.shutdown()
    server.server_close()


def test_files_of_pages_become_a_profile(files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours, figures = tmp_path / "ours.yaml", tmp_path / "fit.json"
    words = ["twin", "fit", "--metrics", *files, "--every", "60s", "--name", "ours"]
    assert main([*words, "--out", str(ours), "--json", str(figures)]) == 0
    shown = capsys.readouterr().out
    assert "kept" in shown
    assert "those of h100-8b" in shown
    found = json.loads(figures.read_text())
    # 989.5 against 312 Tflops, 3.35 against 2.04 TB/s.
    assert found["factors"]["compute"] == pytest.approx(3.17, rel=0.15)
    assert found["factors"]["memory"] == pytest.approx(1.64, rel=0.1)
    assert "overhead" not in found["factors"]
    assert profile_named(str(ours), "--profile").name == "ours"
    assert ours.read_text().startswith("# Fitted to metrics, from h100-8b.")


def test_an_address_is_scraped_for_a_while_and_a_scrape_that_fails_is_passed_over(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["twin", "fit", "--metrics", address, "--for", "1500ms", "--every", "100ms"]) == 0
    shown = capsys.readouterr().out
    assert "503" in shown
    assert "requests in" in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "name journals, or --metrics, and not both"),
        (["journal", "--metrics", "x.txt"], "name journals, or --metrics, and not both"),
        (["journal", "--every", "1s"], "--every: is for --metrics"),
        (["--metrics", "nowhere.txt", "--every", "1s"], "nowhere.txt: cannot be read"),
        (["--metrics", "x.txt"], "--every: is needed with files"),
        (["--metrics", "x.txt", "--every", "1s", "--for", "9s"], "--for: is for an address"),
        (["--metrics", "http://127.0.0.1:1/metrics"], "--for: is needed with an address"),
        (["--metrics", "http://127.0.0.1:1/metrics", "--for", "9s"], "cannot be scraped: "),
        (["--metrics", "http://127.0.0.1:1/", "x.txt", "--for", "9s"], "takes one address"),
        (["--metrics", "x.txt", "--every", "1s", "--endpoint", "e"], "--endpoint: is for journals"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["twin", "fit", *words]) == 2
    assert said in capsys.readouterr().err
