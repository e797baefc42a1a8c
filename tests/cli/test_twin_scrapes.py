"""`shoal twin fit --metrics`: from files of pages, or from an address, to a profile."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from shoal.cli import main
from shoal.cli.profiles import profile_named
from shoal.engine import find_profile
from shoal.wire.exposition import MAX_PAGE_BYTES
from tests.simulation.scrapes import scrapes

PAGES = [page for _, page in scrapes(find_profile("a100-8b"), 1, count=8)]


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    for place, page in enumerate(PAGES):
        (tmp_path / f"{place}.txt").write_bytes(page)
    return [str(tmp_path / f"{place}.txt") for place in range(len(PAGES))]


@contextmanager
def served(pages: Sequence[bytes], fails: int = -1) -> Iterator[tuple[str, list[str]]]:
    """An address that is a page further at each scrape, and does not answer that of number `fails`; what was asked."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            place = len(asked)
            asked.append(self.path)
            self.send_response(503 if place == fails else 200)
            self.end_headers()
            self.wfile.write(pages[min(place, len(pages) - 1)])

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/metrics", asked
    server.shutdown()
    server.server_close()


@pytest.fixture
def address() -> Iterator[str]:
    """An engine that is further at each scrape, and does not answer one of them."""
    with served(PAGES, fails=2) as (address, _):
        yield address


@pytest.fixture
def stranger() -> Iterator[tuple[str, list[str]]]:
    """An address with the metrics of something else."""
    with served([b"# TYPE up gauge\nup 1\n"]) as found:
        yield found


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


def test_an_address_that_is_no_engine_is_refused_by_its_first_page(
    capsys: pytest.CaptureFixture[str], stranger: tuple[str, list[str]]
) -> None:
    address, asked = stranger
    assert main(["twin", "fit", "--metrics", address, "--for", "1s", "--every", "100ms"]) == 2
    assert f"{address}: the metrics page has no vllm:" in capsys.readouterr().err
    assert len(asked) == 1


def test_a_file_that_is_no_page_of_an_engine_is_named(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for content, said in ((b"up 1\n", "has no vllm:"), (b"#" * (MAX_PAGE_BYTES + 1), "is larger than 8388608 bytes")):
        Path(files[3]).write_bytes(content)
        assert main(["twin", "fit", "--metrics", *files, "--every", "60s"]) == 2
        shown = capsys.readouterr().err
        assert f"{files[3]}: " in shown
        assert said in shown


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
        (["--metrics", "x.txt", "--every", "1s", "--requests", "9"], "--requests: is for journals"),
        (["journal", "--requests", "0"], "--requests: must be at least 1"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["twin", "fit", *words]) == 2
    assert said in capsys.readouterr().err
