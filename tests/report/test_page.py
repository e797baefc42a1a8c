"""The page says everything, opens without a network, and nothing that a user named can become markup."""

import re
import shutil
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest

from shoal.report import Document, about, as_html
from shoal.report.honesty import CAUTION, MODELLED, NOT_MODELLED
from shoal.simulation import Run, read_experiment
from tests.report.runs import made

ROOT = Path(__file__).parents[2]
EXPERIMENT = read_experiment("workload: {shape: hot}\nname: '<script>x'\nfleet: [{count: 3}]\n", "test")


def page(runs: list[Run], planned: int | None = None, unit: str = "clients") -> str:
    document = Document(
        experiment=EXPERIMENT,
        policies={run.policy: "a: <b>" for run in runs},
        seeds=(1, 2),
        load_unit=unit,
        command="shoal twin run 'x & y'",
        planned=len(runs) if planned is None else planned,
        versions=about(),
    )
    return as_html(document, runs)


def headings(html: str) -> list[str]:
    return re.findall(r"<h[23]>([^<]*)</h[23]>", html)


def test_one_run_has_tiles_distributions_time_tenants_and_endpoints() -> None:
    html = page([made()])
    found = headings(html)
    for title in (
        "Time to first token",
        "Time per output token",
        "End to end",
        "Requests that wait",
        "Hit ratio over time",
        "Load of each endpoint",
        "Share of the work",
        "Work over time",
        "Requests per endpoint",
    ):
        assert title in found
    assert "Side by side" not in found
    assert "Over loads" not in found
    assert "Interrupted" not in html


def test_policies_stand_side_by_side_with_their_changes() -> None:
    html = page([made("default", seed) for seed in (1, 2, 3)] + [made("x/slow.yaml", s, slower=1.5) for s in (1, 2, 3)])
    assert "Side by side" in headings(html)
    assert '<small class="bad">+50 %</small>' in html
    assert ">slow</span>" in html


def test_several_loads_have_a_curve_and_a_view_each() -> None:
    html = page([made(policy, 1, load) for load in (8.0, 16.0) for policy in ("a", "b")])
    assert "Throughput against latency" in headings(html)
    assert ">8 clients</label>" in html
    assert html.count('<section id="view') == 2


def test_slos_are_told_where_clients_have_them() -> None:
    assert "SLO met" not in page([made()])
    html = page([made(slo_s=0.1)])
    assert "SLO met by tenant" in headings(html)
    assert "<span>SLO met</span>" in html
    assert "<th>SLO met %</th>" in page([made("a", slo_s=0.1), made("b", slo_s=0.1)])


def test_an_interrupted_run_says_so_first() -> None:
    html = page([made(), made(seed=2, is_partial=True)], planned=5)
    assert "1 of 5 runs were done, 1 in part" in html.split("<h2>")[0]


def test_what_is_modelled_and_how_it_was_run_is_said_as_the_documentation_says_it() -> None:
    html = page([made()])
    docs = " ".join((ROOT / "docs/twin.md").read_text().split())
    for sentence in (*MODELLED, *NOT_MODELLED, CAUTION):
        assert sentence in docs
        assert sentence.replace("'", "&#39;") in html
    for said in ("shoal twin run &#39;x &amp; y&#39;", "3 × h100-8b", "numpy", "prompt_tokens: 6000", "1, 2"):
        assert said in html


def test_what_is_approximated_is_said_of_the_fleets_that_have_it() -> None:
    text = "workload: {shape: hot}\nfleet: [{count: 2, mode: aggregate, slow_factor: 2.0}, {count: 1}]\n"
    document = Document(experiment=read_experiment(text, "test"), policies={}, seeds=(1,), versions=about(), planned=1)
    html = as_html(document, [made()])
    assert "Engines of mode aggregate" in html
    assert "2 × h100-8b (slow_factor 2.0, mode aggregate) + 1 × h100-8b" in html
    assert "Engines of mode aggregate" not in page([made()])


def test_names_of_users_are_text() -> None:
    html = page([made("<img src=x>")])
    assert "<script>x" not in html
    assert "<b>zeta" not in html
    assert "<img" not in html
    assert "a: <b>" not in html


def test_nothing_is_fetched() -> None:
    html = page([made(seed=seed) for seed in (1, 2)])
    assert not re.search(r"(src|href)\s*=|url\((?!#)|@import", html)
    assert "default-src 'none'" in html


def test_every_plot_is_sound_and_has_a_name() -> None:
    html = page([made(policy, 1, load) for load in (8.0, 16.0) for policy in ("a", "b")])
    plots = re.findall(r"<svg viewBox.*?</svg>", html, re.S)
    assert len(plots) > 20
    assert all(ElementTree.fromstring(plot).get("aria-label") for plot in plots)


@pytest.mark.e2e
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs the Debian package chromium")
def test_a_browser_runs_its_script(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(page([made(seed=seed) for seed in (1, 2)]))
    words = [
        "chromium",
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'p'}",
        "--dump-dom",
    ]
    seen = subprocess.run([*words, path.as_uri()], capture_output=True, text=True, timeout=120, check=True).stdout
    assert seen.count('class="cross"') == seen.count("data-read=")
    assert seen.count("data-read=") >= 6
