import pytest

from shoal.pool import FleetView, Request
from shoal.scheduling.latency import LatencyScorer, LatencySloAdmitter, SloHeadroomTierFilter
from shoal.scheduling.producers import PredictedLatencyProducer
from shoal.scheduling.slo import SLO_TTFT_HEADER, slo_s
from tests.scheduling.script import NAN, decide, request, scheduler, view


def asking(ttft_ms: float | None = None, tpot_ms: float | None = None, **fields: object) -> Request:
    given = {"x-llm-d-slo-ttft-ms": ttft_ms, "x-llm-d-slo-tpot-ms": tpot_ms}
    headers = {name: f"{value:g}" for name, value in given.items() if value is not None}
    return request(1000, headers=headers, is_streaming=True, **fields)


def predicted(ttft_ms: list[float], tpot_ms: list[float], **columns: list[float]) -> FleetView:
    return view(
        predicted_ttft_s=[each / 1000 for each in ttft_ms],
        predicted_tpot_s=[each / 1000 for each in tpot_ms],
        **{"inflight_requests": [1.0] * len(ttft_ms), **columns},
    )


def test_without_an_slo_the_lowest_prediction_wins() -> None:
    scores = LatencyScorer().score(asking(), predicted([300, 100, 200], [10, 10, 10]))
    assert scores.tolist() == [0.01, 1.01, 0.51]


def test_of_those_that_keep_the_slo_the_closest_wins() -> None:
    seen = predicted([100, 400, 900], [10, 10, 10])
    scores = LatencyScorer().score(asking(500, 50), seen)
    assert scores.tolist() == [0.01, 1.01, 0.0]
    most = LatencyScorer(headroom_selection_strategy="most").score(asking(500, 50), seen)
    assert most.tolist() == [1.01, 0.01, 0.0]


def test_ttft_counts_four_times_as_much_as_tpot() -> None:
    scores = LatencyScorer().score(asking(), predicted([100, 200], [20, 10]))
    assert scores.tolist() == [0.81, 0.21]


def test_where_ttft_tells_none_apart_tpot_decides_alone() -> None:
    scores = LatencyScorer().score(asking(), predicted([100, 100, 100], [10, 30, 20]))
    assert scores.tolist() == [1.01, 0.01, 0.51]


def test_where_nothing_tells_them_apart_all_score_alike() -> None:
    assert LatencyScorer().score(asking(), predicted([100, 100], [10, 10])).tolist() == [0.51, 0.51]


def test_when_all_miss_the_slo_an_idle_endpoint_is_scored_alone() -> None:
    seen = predicted([900, 600], [10, 10], inflight_requests=[0, 3])
    scores = LatencyScorer(headroom_selection_strategy="most").score(asking(500, 50), seen)
    assert scores.tolist() == [0.51, 0.0]


def test_when_all_miss_the_slo_the_least_violated_bucket_is_scored_alone() -> None:
    both, ttft_only, tpot_only = (600.0, 60.0), (501.0, 10.0), (100.0, 90.0)
    pairs = (both, ttft_only, tpot_only)
    seen = predicted([each[0] for each in pairs], [each[1] for each in pairs])
    assert LatencyScorer().score(asking(500, 50), seen).tolist() == [0.0, 0.0, 0.51]
    seen = predicted([600, 501], [60, 10])
    assert LatencyScorer().score(asking(500, 50), seen).tolist() == [0.0, 0.51]


def test_an_endpoint_without_a_prediction_counts_as_one_that_just_keeps_the_slo() -> None:
    scores = LatencyScorer().score(asking(500, 50), predicted([400, NAN, 900], [10, NAN, 10]))
    assert scores[1] > scores[0] > scores[2] == 0.0


def test_the_strictest_running_request_bounds_the_tpot() -> None:
    seen = predicted([100, 100], [20, 20], strictest_tpot_slo_s=[0.01, float("inf")])
    assert LatencyScorer().score(asking(500, 50), seen).tolist() == [0.0, 0.51]


def test_the_buffer_factor_narrows_the_tpot_slo() -> None:
    made = LatencyScorer()
    made.connect({"p": PredictedLatencyProducer(slo_buffer_factor=0.5)})
    seen = predicted([100, 100], [30, 20])
    assert made.score(asking(500, 50), seen).tolist() == [0.0, 0.51]


def test_without_predictions_the_composite_decides() -> None:
    seen = view(kv_usage=[0.5, 0.1], waiting=[4, 0], matched_tokens=[500, 0])
    scores = LatencyScorer().score(asking(500), seen)
    assert scores.tolist() == pytest.approx([(0.5 + 0.0 + 0.5) / 3, (0.9 + 1.0 + 0.0) / 3])
    only_prefix = LatencyScorer(composite_kv_weight=0, composite_queue_weight=0)
    assert only_prefix.score(asking(500), seen).tolist() == [0.5, 0.0]


def test_a_plain_answer_has_no_tpot_to_miss() -> None:
    asked = asking(500, 1)
    plain = Request(id="r", model="m", prompt_tokens=1000, headers=asked.headers)
    assert LatencyScorer().score(plain, predicted([100, 900], [50, 50])).tolist() == [0.51, 0.0]


def test_the_tier_filter_keeps_those_that_keep_the_slo() -> None:
    made = SloHeadroomTierFilter(epsilon_explore_neg=0.0)
    assert made.keep(asking(500, 50), predicted([100, 900], [10, 10])).tolist() == [True, False]
    assert made.keep(asking(500, 50), predicted([100, NAN], [10, NAN])).tolist() == [True, False]
    assert made.keep(asking(), predicted([100, 900], [10, 10])).tolist() == [True, True]
    assert made.keep(asking(500, 50), view(2)).tolist() == [True, True]


def test_now_and_then_the_other_tier_is_tried() -> None:
    made = scheduler(SloHeadroomTierFilter(epsilon_explore_neg=0.5), LatencyScorer())
    seen = predicted([100, 900], [10, 10])
    chosen = [decide(made, asking(500, 50), seen).chosen[0] for _ in range(300)]
    assert 100 < chosen.count("e1") < 200


def test_low_priority_that_will_miss_its_slo_is_refused() -> None:
    made = LatencySloAdmitter()
    busy = {"running": [5.0, 5.0], "kv_usage": [0.5, 0.5]}
    hopeless = predicted([900, 900], [10, 10], **busy)
    assert "predicted" in made.objection(asking(500), -1, hopeless)
    assert made.objection(asking(500), 0, hopeless) == ""
    assert made.objection(asking(), -1, hopeless) == ""
    assert made.objection(asking(500), -1, predicted([900, 400], [10, 10], **busy)) == ""
    assert made.objection(asking(500), -1, view(2, inflight_requests=[1, 1], kv_usage=[0.5, 0.5])) == ""


def test_an_idle_or_cold_endpoint_lets_it_in() -> None:
    made = LatencySloAdmitter()
    idle = predicted([900, 900], [10, 10], inflight_requests=[0, 1], running=[0, 5], kv_usage=[0.5, 0.5])
    cold = predicted([900, 900], [10, 10], running=[5, 5], kv_usage=[0.5, 0.01])
    assert made.objection(asking(500), -1, idle) == ""
    assert made.objection(asking(500), -1, cold) == ""


def test_a_tpot_that_was_not_asked_for_is_not_missed() -> None:
    seen = predicted([100, 100], [10, 10], running=[5.0, 5.0], kv_usage=[0.5, 0.5])
    assert LatencySloAdmitter().objection(asking(500), -1, seen) == ""


@pytest.mark.parametrize("text", ["", "abc", "-5", "0", "nan", "inf", "1e99", "9" * 30])
def test_an_slo_that_is_no_time_is_none(text: str) -> None:
    assert slo_s(request(headers={SLO_TTFT_HEADER: text}), SLO_TTFT_HEADER) is None


def test_an_slo_is_read_in_milliseconds() -> None:
    assert slo_s(request(headers={SLO_TTFT_HEADER: "250.5"}), SLO_TTFT_HEADER) == pytest.approx(0.2505)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: LatencyScorer(ttft_weight=-1),
        lambda: SloHeadroomTierFilter(epsilon_explore_neg=2),
        lambda: PredictedLatencyProducer(slo_buffer_factor=0),
    ],
)
def test_wrong_parameters_are_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="must"):
        wrong()  # type: ignore[operator]
