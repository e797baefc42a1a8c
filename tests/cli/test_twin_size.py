"""`shoal twin size`: the smallest count that meets an SLO, the cheapest kind, and why there is none."""

import json
from pathlib import Path

import msgspec
import pytest

from shoal.cli import main
from shoal.simulation import Result
from shoal.simulation.results import summarise
from shoal.simulation.size import Search, Slo

FLEET = """\
workload: {shape: multi-turn, sessions: 24, turns: [2, 3], think_s: 0.2}
arrivals: {kind: poisson, rate_per_s: 8}
fleet:
- {profile: h100-8b, cost_per_hour: 3.0}
- {profile: a100-8b, cost_per_hour: 1.5}
seeds: [1, 2]
"""

SPLIT = """\
workload: {shape: multi-turn, sessions: 24, turns: [2, 3], think_s: 0.2}
arrivals: {kind: poisson, rate_per_s: 8}
fleet:
- {profile: h100-8b, cost_per_hour: 3.0}
- {profile: h100-8b, cost_per_hour: 3.0, role: prefill}
- {profile: l40s-8b, cost_per_hour: 1.0, role: decode}
seeds: [1]
"""


def result(ttft_p99_s: float, failed: int = 0) -> Result:
    return msgspec.structs.replace(summarise([], [], 1.0), ttft_p99_s=ttft_p99_s, failed=failed)


@pytest.mark.parametrize("least", [1, 2, 5, 8, 13])
def test_the_smallest_count_is_found_without_trying_all(least: int) -> None:
    search = Search([Slo("ttft_p99", 1.0)], 64)
    while (counts := search.next()) is not None:
        search.tell(counts, [result(0.5), result(least / counts[0])])
    assert search.found == (least,)
    assert search.less() == ((least - 1,) if least > 1 else None)
    assert len(search.tried) <= 8


@pytest.mark.parametrize(("costs", "cheapest"), [((1.0, 1.0), (3, 9)), ((1.0, 3.0), (8, 6)), ((6.0, 1.0), (2, 14))])
def test_the_cheapest_split_is_found_without_trying_many(costs: tuple[float, float], cheapest: tuple[int, int]) -> None:
    """Of a fleet that meets the SLO above a curve: fewer of one kind take more of the other."""
    least = {1: 40, 2: 14, 3: 9, 4: 9, 5: 8, 6: 8, 7: 8, 8: 6}
    search = Search([Slo("ttft_p99", 1.0)], 64, costs)
    while (counts := search.next()) is not None:
        prefill, decode = counts
        search.tell(counts, [result(0.5 if decode >= least.get(prefill, 6) else 2.0)])
    assert search.found == cheapest
    assert search.cost(cheapest) == cheapest[0] * costs[0] + cheapest[1] * costs[1]
    assert len(search.tried) <= 25
    less = search.less()
    assert less is not None
    assert search.missed(less)


def test_it_says_whether_more_engines_would_help() -> None:
    for figure, said in ((lambda count: 5.0, "a faster profile"), (lambda count: 500.0 / count, "--most above 16")):
        search = Search([Slo("ttft_p99", 1.0)], 16)
        while (counts := search.next()) is not None:
            search.tell(counts, [result(figure(counts[0]))])
        assert search.found is None
        assert said in search.why_none()
    refusing = Search([Slo("ttft_p99", 1.0)], 1)
    refusing.tell((1,), [result(0.1, failed=3)])
    assert "3 requests failed" in refusing.why_none()


def test_the_cheapest_kind_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, found = tmp_path / "fleet.yaml", tmp_path / "found.json"
    path.write_text(FLEET)
    words = ["twin", "size", str(path), "--slo", "ttft_p99=900ms", "--slo", "e2e_p95=20s", "--json", str(found)]
    assert main(words) == 0
    assert "Cheapest:" in capsys.readouterr().out
    document = json.loads(found.read_text())
    h100, a100 = document["candidates"]
    assert h100["engines"] <= a100["engines"]
    assert document["cheapest"] == (0 if h100["cost_per_hour"] <= a100["cost_per_hour"] else 1)
    assert all(run["ttft_p99_s"] <= 0.9 for run in h100["tried"][str(h100["engines"])])
    assert main([*words[:3], "--slo", "ttft_p99=1ms", "--most", "2"]) == 1
    assert "none" in capsys.readouterr().out


def test_the_cheapest_split_of_prefill_and_decode_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, found = tmp_path / "fleet.yaml", tmp_path / "found.json"
    path.write_text(SPLIT)
    assert main(["twin", "size", str(path), "--slo", "ttft_p95=2s", "--most", "8", "--json", str(found)]) == 0
    assert "h100-8b prefill + l40s-8b decode" in capsys.readouterr().out
    alone, split = json.loads(found.read_text())["candidates"]
    assert alone["profile"] == "h100-8b"
    assert len(alone["split"]) == 1
    prefill, decode = split["split"]
    assert split["engines"] == prefill + decode
    assert split["cost_per_hour"] == pytest.approx(3.0 * prefill + 1.0 * decode)
    assert all(run["prefilled_elsewhere"] > 0 for run in split["tried"][f"{prefill} + {decode}"])


@pytest.mark.parametrize(
    ("change", "words", "said"),
    [
        ("", ["--slo", "speed=1s"], "no figure"),
        ("", ["--slo", "ttft_p99=soon"], "no duration"),
        ("", ["--slo", "ttft_p99=1s", "--most", "0"], "--most: must be at least 1"),
        ("", ["--slo", "ttft_p99=1s", "--most", "2001"], "--most: must be at most 2,000"),
        (", cost_per_hour: 1.5", ["--slo", "ttft_p99=1s"], "cost_per_hour"),
    ],
)
def test_what_cannot_be_sized_is_refused(
    change: str, words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(FLEET.replace(change, "") if change else FLEET)
    try:
        status: object = main(["twin", "size", str(path), *words])
    except SystemExit as exit_:
        status = exit_.code
    assert status == 2
    assert said in capsys.readouterr().err
