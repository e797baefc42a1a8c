"""Predicted latency against plain routing, one seed of the bars."""

from bench.bars.slo import PLAIN_RATIO, goodputs, met


def test_predicting_latency_keeps_the_slo_of_many_more_requests_than_plain_routing() -> None:
    plain, predicted = met("plain", 1, 5.34), met("predicted", 1, 5.34)
    assert abs(plain - PLAIN_RATIO) < 0.1
    assert predicted >= 0.85


def test_shedding_raises_what_is_done_within_its_slo() -> None:
    without, with_it = goodputs(1)
    assert with_it > without
