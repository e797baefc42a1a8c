import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.flow import Allowance, Budgets, FewDetector, Loads, Reservation
from shoal.flow.adaptive import AdaptiveDetector, FewDraining, Sample
from shoal.flow.ceilings import PriorityHoldback, SoftReflectiveCeiling, StaticUsageLimit
from shoal.flow.detectors import ConcurrencyDetector, UtilizationDetector


def loads(**columns: list[float]) -> Loads:
    count = len(next(iter(columns.values())))
    values = {
        name: np.array(columns.get(name, [default] * count))
        for name, default in (
            ("inflight_requests", 0.0),
            ("inflight_tokens", 0.0),
            ("output_tokens", 0.0),
            ("kv_capacity_tokens", np.nan),
            ("clear_at", 0.0),
            ("waiting", np.nan),
            ("running", np.nan),
            ("kv_usage", np.nan),
            ("read_at", 0.0),
        )
    }
    return Loads(tuple(f"e{number}" for number in range(count)), 0.1, **values)


def test_what_was_sent_since_the_reading_counts_as_waiting() -> None:
    seen = loads(waiting=[0.0, 0.0], running=[3.0, 3.0], inflight_requests=[3.0, 8.0], kv_usage=[0.4, 0.4])
    assert UtilizationDetector().saturation(seen).tolist() == [0.5, 1.0]


def test_an_engine_without_a_reading_is_judged_by_what_is_in_flight() -> None:
    seen = loads(waiting=[np.nan, 9.0], inflight_requests=[50.0, 10.0], running=[np.nan, 1.0], read_at=[-np.inf, -30.0])
    assert UtilizationDetector().saturation(seen).tolist() == [0.5, 0.1]


def test_concurrency_counts_requests_tokens_or_the_fuller_of_both() -> None:
    seen = loads(inflight_requests=[5.0], inflight_tokens=[800.0])
    for mode, expected in (("requests", 0.5), ("tokens", 0.8), ("hybrid", 0.8)):
        detector = ConcurrencyDetector(concurrency_mode=mode, max_concurrency=10, max_token_concurrency=1000)  # type: ignore[arg-type]
        assert detector.saturation(seen).tolist() == [expected]


def answer(waited_s: float, *, sent_at: float = 0.0, inflight: float = 100.0, ahead_s: float = 0.0) -> Sample:
    return Sample(0.1 + waited_s, own_s=0.1, ahead_s=ahead_s, sent_at=sent_at, inflight=inflight)


def test_a_limit_rises_while_answers_come_in_time_and_only_when_it_is_used() -> None:
    detector = AdaptiveDetector(initial_requests=8)
    for _ in range(100):
        detector.answered("e0", answer(0.0, inflight=2.0), 1.0)
    assert detector.limit("e0") == 8
    for _ in range(8):
        detector.answered("e0", answer(0.0), 1.0)
    assert detector.limit("e0") == 16


def test_a_late_answer_cuts_the_limit_once_for_all_that_were_sent_before() -> None:
    detector = AdaptiveDetector(initial_requests=40)
    detector.answered("e0", answer(0.0, inflight=1.0), 1.0)
    for _ in range(20):
        detector.answered("e0", answer(5.0, inflight=40.0), 2.0)
    assert detector.limit("e0") == pytest.approx(34)
    detector.answered("e0", answer(5.0, sent_at=2.5, inflight=40.0), 5.0)
    assert detector.limit("e0") < 34
    slow = detector.limit("e0")
    detector.answered("e0", answer(0.0, sent_at=5.0, inflight=34.0), 6.0)
    assert slow < detector.limit("e0") < slow + 1


def test_prefill_in_flight_moves_until_requests_wait_as_long_as_they_may() -> None:
    detector = AdaptiveDetector(engine_wait_seconds=0.2)
    for _ in range(10):
        detector.answered("e0", answer(0.0, ahead_s=0.2), 1.0)
    raised = detector.prefill_limit_s("e0")
    assert raised > 0.2
    detector.answered("e0", answer(0.3, sent_at=1.0), 2.0)
    assert 0.2 < detector.prefill_limit_s("e0") < raised
    for at in range(100):
        detector.answered("e0", answer(0.3, sent_at=3.0 + at), 4.0 + at)
    # However slow it seems, something may be sent.
    assert detector.prefill_limit_s("e0") == pytest.approx(0.05)


def test_the_limits_hold_in_the_columns_and_follow_the_fleet() -> None:
    detector = AdaptiveDetector(initial_requests=10, engine_wait_seconds=0.5)
    seen = loads(inflight_requests=[5.0, 20.0], clear_at=[0.5, 0.0])
    assert detector.saturation(seen).tolist() == pytest.approx([0.8, 2.0])
    for _ in range(10):
        detector.answered("e1", answer(0.0, inflight=20.0), 1.0)
    assert detector.saturation(seen).tolist() == pytest.approx([0.8, 1.0])
    after = AdaptiveDetector(initial_requests=10)
    after.adopt(detector)
    assert after.limit("e1") == 20


def test_what_is_in_flight_has_to_fit_the_cache() -> None:
    seen = loads(
        inflight_requests=[4.0, 4.0], inflight_tokens=[8000.0] * 2, output_tokens=[1000.0] * 2,
        kv_capacity_tokens=[10_000.0, np.nan],
    )  # fmt: skip
    assert AdaptiveDetector(initial_requests=8).saturation(seen).tolist() == [0.9, 0.5]


@pytest.mark.parametrize(
    "detector",
    [
        AdaptiveDetector(initial_requests=8),
        ConcurrencyDetector(max_concurrency=7),
        ConcurrencyDetector(concurrency_mode="hybrid"),
        ConcurrencyDetector(concurrency_mode="tokens", max_token_concurrency=4_000),
    ],
)
def test_plain_numbers_say_the_same_as_arrays(detector: FewDetector) -> None:
    rng = np.random.default_rng(5)
    columns = {
        name: (rng.random(6) * size).tolist()
        for name, size in (
            ("inflight_requests", 20), ("inflight_tokens", 9_000), ("output_tokens", 2_000), ("clear_at", 2)
        )
    }  # fmt: skip
    seen = loads(kv_capacity_tokens=[9_000.0, np.nan, 500.0, 1e6, np.nan, 3_000.0], **columns)
    assert detector.saturation_few(seen) == detector.saturation(seen).tolist()
    assert [detector.saturation_at(seen, row) for row in range(6)] == detector.saturation_few(seen)
    if isinstance(detector, FewDraining):
        for ceiling in (0.25, 0.75, 1.0):
            assert detector.opens_in_s_few(seen, ceiling) == detector.opens_in_s(seen, ceiling).tolist()


def test_an_endpoint_opens_when_its_prefill_is_done_and_not_before_a_request_ends() -> None:
    detector = AdaptiveDetector(initial_requests=10, engine_wait_seconds=0.5)
    seen = loads(inflight_requests=[5.0, 20.0], clear_at=[1.0, 0.0])
    assert detector.opens_in_s(seen, 0.8).tolist() == pytest.approx([0.5, np.inf])


def test_a_queue_in_the_engine_lowers_the_limit_of_answers_that_do_not_stream() -> None:
    detector = AdaptiveDetector(initial_requests=100)
    detector.read("e0", waiting=40.0, running=60.0, now=10.0)
    assert detector.limit("e0") == pytest.approx(85)
    detector.read("e0", waiting=0.0, running=60.0, now=20.0)
    assert detector.limit("e0") == pytest.approx(85)


def plain(*, sent_at: float, inflight: float = 100.0) -> Sample:
    return Sample(None, own_s=0.1, ahead_s=0.0, sent_at=sent_at, inflight=inflight)


def test_answers_that_do_not_stream_raise_a_limit_while_nothing_waits_in_the_engine() -> None:
    detector = AdaptiveDetector(initial_requests=8)

    def risen(sample: Sample, now: float) -> float:
        before = detector.limit("e0")
        detector.answered("e0", sample, now)
        return detector.limit("e0") - before

    assert risen(plain(sent_at=0.0), 1.0) == 0, "its engine has said nothing"
    detector.read("e0", waiting=0.0, running=8.0, now=2.0)
    assert risen(plain(sent_at=1.0), 3.0) == 1
    assert risen(plain(sent_at=1.0, inflight=2.0), 3.0) == 0, "the limit is not used"
    assert risen(plain(sent_at=2.5), 3.0) == 0, "sent after the reading"
    detector.read("e0", waiting=1.0, running=8.0, now=4.0)
    assert risen(plain(sent_at=2.5), 5.0) == 0, "something waits"
    detector.read("e0", waiting=40.0, running=8.0, now=6.0)
    detector.read("e0", waiting=0.0, running=8.0, now=7.0)
    assert risen(plain(sent_at=5.0), 8.0) == 0, "sent before the limit was lowered"
    assert 0 < risen(plain(sent_at=6.5), 8.0) < 1


def test_ceilings_of_each_policy() -> None:
    assert StaticUsageLimit(threshold=0.9).ceilings([2, 1], 0.5, 0) == [0.9, 0.9]
    assert PriorityHoldback(min_ceiling=0.6).ceilings([9, 5, 0], 0.5, 0) == pytest.approx([1.0, 0.8, 0.6])
    assert PriorityHoldback(min_ceiling=0.6).ceilings([0], 0.5, 0) == [1.0]
    soft = SoftReflectiveCeiling()
    assert soft.ceilings([2, 1, 0], 0.4, 1) == [1.0, 1.0, 1.0]
    assert soft.ceilings([2, 1, 0], 0.8, 1) == [1.0, 0.0, 0.0]
    assert soft.ceilings([2, 1, 0], 0.8, 4) == [1.0, 1.0, 1.0]
    assert soft.ceilings([2, 1, 0], 1.2, 4) == [1.0, 0.0, 0.0]


def test_a_budget_is_refused_with_the_time_until_there_is_enough() -> None:
    budgets, allowance = Budgets(), Allowance(requests_per_s=2.0)
    assert isinstance(budgets.reserve("a", allowance, 10, 0.0), Reservation)
    assert isinstance(budgets.reserve("a", allowance, 10, 0.0), Reservation)
    assert budgets.reserve("a", allowance, 10, 0.0) == pytest.approx(0.5)
    assert isinstance(budgets.reserve("b", allowance, 10, 0.0), Reservation)
    assert isinstance(budgets.reserve("a", allowance, 10, 0.5), Reservation)


def test_a_refund_leaves_the_budget_as_it_was() -> None:
    budgets, allowance = Budgets(), Allowance(requests_per_s=5.0, tokens_per_min=600.0)
    reserved = budgets.reserve("a", allowance, 400, 0.0)
    assert isinstance(reserved, Reservation)
    assert budgets.left("a", 0.0) == (4.0, 200.0)
    budgets.refund(reserved, 0.0)
    assert budgets.left("a", 0.0) == (5.0, 600.0)


def test_what_was_used_beyond_the_reservation_is_owed() -> None:
    budgets, allowance = Budgets(), Allowance(tokens_per_min=600.0)
    reserved = budgets.reserve("a", allowance, 500, 0.0)
    assert isinstance(reserved, Reservation)
    budgets.commit(reserved, 900.0, 0.0)
    wait_s = budgets.reserve("a", allowance, 100, 0.0)
    assert wait_s == pytest.approx(40.0)
    assert isinstance(budgets.reserve("a", allowance, 100, 40.0), Reservation)


def test_pickers_that_share_a_pool_share_its_budgets() -> None:
    budgets, allowance = Budgets(), Allowance(tokens_per_min=600.0)
    budgets.reserve("a", allowance, 100, 0.0)
    budgets.share(0.5)
    assert budgets.left("a", 0.0) == (None, 250.0)


def test_a_request_larger_than_the_budget_goes_when_it_is_full() -> None:
    budgets, allowance = Budgets(), Allowance(tokens_per_min=600.0)
    assert isinstance(budgets.reserve("a", allowance, 5000, 0.0), Reservation)
    assert budgets.reserve("a", allowance, 100, 0.0) == pytest.approx(450.0)


@given(st.lists(st.tuples(st.integers(1, 500), st.one_of(st.none(), st.integers(0, 2000))), max_size=30), st.randoms())
def test_whatever_the_order_of_endings_a_budget_is_what_was_used(
    ends: list[tuple[int, int | None]], chance: object
) -> None:
    budgets, allowance = Budgets(), Allowance(requests_per_s=40.0, tokens_per_min=60_000.0)
    held = []
    for tokens, used in ends:
        reserved = budgets.reserve("a", allowance, tokens, 0.0)
        assert isinstance(reserved, Reservation)
        held.append((reserved, used))
    chance.shuffle(held)  # type: ignore[attr-defined]
    for reserved, used in held:
        if used is None:
            budgets.refund(reserved, 0.0)
        else:
            budgets.commit(reserved, used, 0.0)
    served = [used for _, used in held if used is not None]
    assert not held or budgets.left("a", 0.0) == (40.0 - len(served), 60_000.0 - sum(served))
