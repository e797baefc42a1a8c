"""Other routers are started with the flags that are shown, and one that fails is never said to be beaten."""

import asyncio
import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from bench.backend import serve
from bench.peers import NGINX, PEERS, Failed, Peer, Row, running, survey
from bench.peers.catalog import Place
from bench.peers.install import NotInstalled, program_of, version_of
from bench.peers.rounds import NOBODY
from bench.peers.table import table
from bench.processes import command_of

ANSWERS = """
import asyncio, sys
from functools import partial
sys.path.insert(0, {root!r})
from bench.backend import Door, Pace, Site
from shoal.hosts.engine.lag import LoopLag

async def main():
    site = Site("m", LoopLag())
    loop = asyncio.get_running_loop()
    port = int(sys.argv[sys.argv.index("--port") + 1])
    server = await loop.create_server(partial(Door, site, loop, Pace(loop)), "127.0.0.1", port)
    await server.serve_forever()

asyncio.run(main())
"""
REFUSES = """
import http.server, sys

class Refuse(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(503)
        self.send_header("content-length", "0")
        self.end_headers()

port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Refuse).serve_forever()
"""
ENDS = """
import sys
print("loading")
sys.exit("no such policy: cache_aware")
"""


def script(directory: Path, name: str, text: str) -> Peer:
    """A router of our own making."""
    path = directory / name
    path.write_text(f"#!{sys.executable}\n{text.replace('{root!r}', repr(str(Path.cwd())))}")
    path.chmod(0o700)
    return Peer(name, str(path), ("--policy", "cache_aware"), version="0.0")


@pytest.mark.parametrize("peer", PEERS)
def test_a_peer_routes_by_prefix_and_listens_on_this_machine_only(peer: Peer, tmp_path: Path) -> None:
    words = peer.words("/bin/x", Place(1234, 1235, tmp_path), ["127.0.0.1:1", "127.0.0.1:2"])
    assert words[0] == "/bin/x"
    line = " ".join(words)
    assert "--policy cache_aware" in line
    assert "--host 127.0.0.1 --port 1234" in line
    assert "--prometheus-host 127.0.0.1 --prometheus-port 1235" in line
    assert line.endswith("--worker-urls http://127.0.0.1:1 http://127.0.0.1:2")
    assert peer.package
    assert peer.version


def test_a_program_that_is_not_on_the_path_is_said_to_be_absent() -> None:
    with pytest.raises(NotInstalled, match="surely-not-here is not on the PATH"):
        program_of(Peer("x", "surely-not-here", ()))


def test_what_is_installed_already_is_not_installed_again(tmp_path: Path) -> None:
    program = tmp_path / "smg-1.13.0" / "bin" / "smg"
    program.parent.mkdir(parents=True)
    program.touch()
    assert program_of(PEERS[0], tmp_path) == str(program)


def test_nginx_is_one_process_so_that_nothing_outlives_it(tmp_path: Path) -> None:
    NGINX.words("nginx", Place(1234, 1235, tmp_path), ["127.0.0.1:1"])
    assert "master_process off;" in (tmp_path / "nginx.conf").read_text().splitlines()


def run(peer: Peer, wait_s: float) -> tuple[str, int]:
    """Start a peer; its version and its process, which must be gone afterwards."""

    async def once() -> tuple[str, int]:
        async with serve(2, "m") as sites, running(peer, [site.address for site in sites], wait_s) as front:
            (pid,) = front.pids()[:1]
            assert command_of(pid)
            return front.version, pid

    return asyncio.run(once())


@pytest.mark.e2e
def test_a_peer_that_answers_is_yielded_and_taken_down(tmp_path: Path) -> None:
    version, pid = run(script(tmp_path, "good", ANSWERS), 20.0)
    assert version == "0.0"
    assert command_of(pid) == []


@pytest.mark.e2e
def test_a_peer_that_ends_has_failed_with_its_own_words(tmp_path: Path) -> None:
    with pytest.raises(Failed, match="ended with status 1: no such policy: cache_aware"):
        run(script(tmp_path, "ends", ENDS), 20.0)


@pytest.mark.e2e
def test_a_peer_that_refuses_has_failed(tmp_path: Path) -> None:
    with pytest.raises(Failed, match=r"did not answer within 2 s.*status-503"):
        run(script(tmp_path, "refuses", REFUSES), 2.0)


@pytest.mark.e2e
def test_a_survey_has_a_row_for_everyone_and_figures_for_those_that_answer(tmp_path: Path) -> None:
    peers = [script(tmp_path, "good", ANSWERS), script(tmp_path, "ends", ENDS)]
    rows = {row.name: row for row in asyncio.run(survey(0.05, peers=peers, ours=()))}
    assert set(rows) == {NOBODY, "good", "ends"}
    assert rows["good"].failed == ""
    assert rows["good"].small_us["all"] > 0
    assert rows["good"].large_us["all"] > 0
    assert rows["good"].rss_mb[1] > 1
    assert 0 < rows[NOBODY].p50_ms < 1e3
    assert "no such policy" in rows["ends"].failed
    assert rows["ends"].large_us == {}


@pytest.mark.e2e
def test_nginx_passes_requests_on() -> None:
    try:
        program = program_of(NGINX)
    except NotInstalled as error:
        pytest.skip(str(error))
    version, pid = run(NGINX, 20.0)
    assert version == version_of(NGINX, program)
    assert version[0].isdigit()
    assert command_of(pid) == []


def test_the_table_gives_a_failed_peer_its_reason_and_no_figures() -> None:
    rows = [
        Row("shoal, envoy", "1.0", "--workers 1", "", {"worker": 300.0, "Envoy": 220.0}, {"worker": 320.0}, 1.5, 900.0),
        Row("other", "2.0", failed="1 x status-503 of 900 requests", small_us={"all": 1.0}, large_us={"all": 1.0}),
        Row(NOBODY, p50_ms=0.25),
    ]
    out = io.StringIO()
    Console(file=out, width=200).print(table(rows, 0.1))
    lines = {name: next(line for line in out.getvalue().splitlines() if name in line) for name in ("shoal", "other")}
    assert "520 us" in lines["shoal"]
    assert "320 us" in lines["shoal"]
    assert "failed" in lines["other"]
    assert "1 x status-503" in lines["other"]
    assert " us" not in lines["other"]
