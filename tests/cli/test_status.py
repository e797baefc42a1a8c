"""`shoal status`."""

import json

import pytest
from rich.console import Console

from shoal.cli import main
from shoal.cli.queues import MAX_TENANTS, queue_lines, seconds
from shoal.cli.status import Rates, all_warnings, hit_ratio, render
from shoal.hosts.admin import EndpointPicture, PoolPicture, WorkerPicture
from shoal.hosts.admin.queues import BandPicture, FlowPicture, TenantPicture, merge_flows
from shoal.kernel.spans import count, quantile_s
from tests.cli.fake_pool import FakePool


def test_one_table_shows_every_endpoint_with_its_load_hits_and_rate(
    pool: FakePool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "--once", "--interval", "0.1", *pool.flags]) == 0
    page = capsys.readouterr().out
    row = next(line for line in page.splitlines() if line.startswith("a "))
    assert row.split() == ["a", "ready", "m", "2", "1", "3", "42%", "75%", "10.0", "58", "ms", "20", "0"]
    assert next(line for line in page.splitlines() if line.startswith("b ")).split()[:2] == ["b", "loading"]
    assert "1/2 endpoints ready" in page
    assert "10.0 requests/s" in page


def test_into_a_pipe_there_is_one_table(pool: FakePool, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--interval", "0.1", *pool.flags]) == 0
    assert capsys.readouterr().out.count("1/2 endpoints ready") == 1


def test_warnings_of_the_pool_and_a_silent_picker_are_shown(pool: FakePool, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--once", "--interval", "0.1", *pool.flags]) == 0
    page = capsys.readouterr().out
    assert "! something to look at" in page
    assert "! picker 1 does not answer" in page


def test_an_endpoint_that_is_not_ready_is_shown_with_its_reason(
    pool: FakePool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "--once", "--interval", "0.1", *pool.flags]) == 0
    assert "b: connection refused" in capsys.readouterr().out.splitlines()


def test_a_picker_that_still_starts_is_no_warning() -> None:
    starting = WorkerPicture(picker="0", state="starting", is_answering=False)
    assert all_warnings(PoolPicture(workers=[starting])) == []
    down = WorkerPicture(picker="0", state="down", is_answering=False)
    assert all_warnings(PoolPicture(workers=[down])) == ["picker 0 does not answer: the figures are without it"]


def test_an_engine_that_reports_no_cached_tokens_is_named_with_the_flag_that_helps(
    pool: FakePool, capsys: pytest.CaptureFixture[str]
) -> None:
    pool.answers.deaf = True
    assert main(["status", "--once", "--interval", "0.1", *pool.flags]) == 0
    page = capsys.readouterr().out
    assert "a report no cached tokens" in page.replace("\n", " ")
    assert "--enable-prompt-tokens-details" in page
    assert "--enable-cache-report" in page


def test_json_is_the_merged_snapshot(pool: FakePool, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--json", *pool.flags]) == 0
    snapshot = json.loads(capsys.readouterr().out)
    assert [endpoint["id"] for endpoint in snapshot["endpoints"]] == ["a", "b"]
    assert snapshot["endpoints"][0]["requests_total"] == 10


def test_without_a_pool_one_line_says_where_it_looked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert main(["status", "--port", "18099"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("shoal: no pool is running on port 18099")
    assert captured.err.count("\n") == 1


def test_a_count_that_fell_gives_no_negative_rate() -> None:
    rates = Rates()
    for at_s, total in ((1.0, 100), (2.0, 40)):
        endpoint = EndpointPicture(id="a", requests_total=total)
        rates.update(PoolPicture(at_s=at_s, requests_total=total, endpoints=[endpoint]))
    assert rates.pool == 0.0
    assert rates.per_endpoint == {"a": 0.0}


def test_a_hit_ratio_that_nobody_reported_is_not_shown_as_zero() -> None:
    assert hit_ratio(EndpointPicture(id="a", prompt_tokens_total=10, reports_cached_tokens=False)) == "?"
    assert hit_ratio(EndpointPicture(id="a")) == "-"
    assert all_warnings(PoolPicture(endpoints=[EndpointPicture(id="a")])) == []


def page_at(width: int, picture: PoolPicture) -> list[str]:
    console = Console(width=width)
    with console.capture() as captured:
        console.print(render(picture, Rates(), console))
    return captured.get().splitlines()


def test_a_narrow_terminal_gets_fewer_columns_and_no_cut_ones() -> None:
    endpoint = EndpointPicture(
        id="127.0.0.1:41234",
        state="ready",
        models=["meta-llama/Llama-3.1-8B-Instruct"],
        waiting=12.0,
        running=256.0,
        kv_usage_ratio=1.0,
        requests_total=123_456,
        failures_total=12,
        ttft_s_avg=12.345,
        prompt_tokens_total=10,
        cached_tokens_total=5,
    )
    picture = PoolPicture(url="http://127.0.0.1:8080", at_s=4000.0, requests_total=123_456, endpoints=[endpoint])
    wide, narrow, slim = (page_at(width, picture) for width in (160, 80, 70))
    assert len(wide) == len(narrow) == len(slim) == 4
    assert "MODELS" in wide[2]
    assert "meta-llama/Llama-3.1-8B-Instruct" in wide[3]
    assert "MODELS" not in narrow[2]
    assert "TTFT" in narrow[2]
    assert "TTFT" not in slim[2]
    assert "FAILED" in slim[2]
    for row in (narrow[3], slim[3]):
        assert row.startswith("127.0.0.1:41234")
        assert row.split()[-2:] == ["123,456", "12"]
    assert all(len(line.rstrip()) <= 80 for line in narrow)


def test_what_was_refused_is_not_called_a_failed_request() -> None:
    assert "2 refused or failed" in page_at(80, PoolPicture(errors_total=2))[1]


def counted(*times_s: float) -> dict[int, int]:
    counts: dict[int, int] = {}
    count(times_s, counts)
    return counts


def two_workers() -> FlowPicture:
    """What two workers say, as one; a third has no queue."""
    one = FlowPicture(
        is_on=True,
        requests=3,
        saturation=0.5,
        drain_per_s=2.0,
        bands=[
            BandPicture(
                priority=0,
                requests=3,
                tenants={"a": 3},
                longest_s=0.5,
                waits={0: 19},
                computed_tokens_per_s=300.0,
                shares=[
                    TenantPicture(tenant="a", weight=3.0, waiting=3, tokens_per_s=900.0, computed_tokens_per_s=300.0)
                ],
            )
        ],
    )
    other = FlowPicture(
        is_on=True,
        requests=1201,
        saturation=1.02,
        drain_per_s=2.5,
        bands=[
            BandPicture(
                priority=0,
                requests=1200,
                tenants={"a": 200, "": 1000},
                longest_s=12.5,
                waits=counted(*[4.0] * 21),
                computed_tokens_per_s=500.0,
                shares=[
                    TenantPicture(tenant="a", weight=3.0, waiting=200, tokens_per_s=300.0, computed_tokens_per_s=300.0),
                    TenantPicture(tenant="", waiting=1000, tokens_per_s=250.0, computed_tokens_per_s=200.0),
                ],
            ),
            BandPicture(priority=10, requests=1, tenants={"b": 1}, longest_s=0.02),
            BandPicture(priority=-5),
        ],
    )
    return merge_flows([one, other, FlowPicture()])


def test_the_queue_is_shown_by_band_with_how_long_requests_wait() -> None:
    assert queue_lines(two_workers()) == [
        "1,204 wait in the queue  4.5 leave a second  endpoints 102% full",
        "  band 10: 1 wait, the first for 20.0 ms",
        f"  band 0: 1,203 wait, the first for 12.50 s; of late p50 {seconds(quantile_s(counted(4.0), 1.0))}, "
        f"p95 {seconds(quantile_s(counted(4.0), 1.0))}",
    ]
    assert queue_lines(merge_flows([])) == []


def test_tenants_are_shown_with_their_weight_and_share_over_all_workers() -> None:
    lines = page_at(80, PoolPicture(flow=two_workers()))
    head = next(place for place, line in enumerate(lines) if "COMPUTED/S" in line)
    rows = [line.split() for line in lines[head + 1 : head + 3]]
    assert lines[head].split() == ["BAND", "TENANT", "WAIT", "WEIGHT", "SHARE", "TOKENS/S", "COMPUTED/S"]
    assert rows[0] == ["0", "a", "203", "3", "75%", "1,200", "600"]
    assert rows[1] == ["0", "no", "tenant", "1,000", "-", "25%", "250", "200"]
    assert all(len(line.rstrip()) <= 80 for line in lines)


def test_only_the_tenants_with_most_are_shown() -> None:
    many = [TenantPicture(tenant=f"t{number:02}", computed_tokens_per_s=float(number)) for number in range(20)]
    flow = merge_flows([FlowPicture(is_on=True, bands=[BandPicture(computed_tokens_per_s=190.0, shares=many)])])
    page = page_at(80, PoolPicture(flow=flow))
    assert [line.split()[1] for line in page[-MAX_TENANTS - 1 : -1]] == [f"t{number}" for number in range(19, 11, -1)]
    assert page[-1].split()[1:] == ["12", "more"]


def test_a_tenants_name_cannot_write_on_the_terminal() -> None:
    evil = TenantPicture(tenant="x\x1b[2Jy[red]", waiting=1)
    flow = merge_flows([FlowPicture(is_on=True, bands=[BandPicture(shares=[evil])])])
    page = "\n".join(page_at(80, PoolPicture(flow=flow)))
    assert "\x1b" not in page
    assert "x?[2Jy[red]" in page


def test_without_flow_control_there_is_no_queue_to_show() -> None:
    assert "BAND" not in "\n".join(page_at(80, PoolPicture()))
