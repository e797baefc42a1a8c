import pytest

from shoal.routing.agreement import ALARM_AFTER, QUIET_AFTER, Agreement, Disagreement


def watch(made: Agreement, times: int = ALARM_AFTER, endpoint: str = "a", **figures: int | None) -> None:
    given: dict[str, int | None] = {
        "counted_tokens": 100, "prompt_tokens": 100, "predicted_tokens": 64, "cached_tokens": 64, "block_tokens": 16,
    }  # fmt: skip
    for _ in range(times):
        made.observe(endpoint, **{**given, **figures})  # type: ignore[arg-type]


def seen(made: Agreement) -> list[tuple[str, Disagreement]]:
    return [(alarm.endpoint_id, alarm.what) for alarm in made.alarms()]


def test_agreement_is_silent() -> None:
    made = Agreement()
    watch(made, 10 * ALARM_AFTER)
    watch(made, 10 * ALARM_AFTER, predicted_tokens=0, cached_tokens=0)
    watch(made, 10 * ALARM_AFTER, predicted_tokens=96, cached_tokens=16)
    assert made.alarms() == []


@pytest.mark.parametrize(
    ("figures", "what"),
    [
        ({"prompt_tokens": 101}, Disagreement.TOKENS_DIFFER),
        ({"predicted_tokens": 0}, Disagreement.NEVER_FOUND),
        ({"cached_tokens": 0}, Disagreement.NEVER_KEPT),
        ({"predicted_tokens": 0, "cached_tokens": 64, "prompt_tokens": 7}, Disagreement.TOKENS_DIFFER),
    ],
)
def test_a_difference_that_lasts_is_an_alarm_and_one_request_ends_it(
    figures: dict[str, int], what: Disagreement
) -> None:
    made = Agreement()
    watch(made, ALARM_AFTER - 1, **figures)
    assert made.alarms() == []
    watch(made, 1, **figures)
    assert seen(made) == [("a", what)]
    (warning,) = made.warnings()
    assert "a " in warning
    assert str(ALARM_AFTER) in warning
    watch(made, 1)
    assert made.alarms() == []


def test_one_block_that_is_computed_anew_is_no_difference() -> None:
    made = Agreement()
    watch(made, 10 * ALARM_AFTER, predicted_tokens=16, cached_tokens=0)
    assert made.alarms() == []


def test_an_engine_that_reports_nothing_is_waited_for_longer() -> None:
    made = Agreement()
    watch(made, QUIET_AFTER - 1, predicted_tokens=0, cached_tokens=None, prompt_tokens=None)
    assert made.alarms() == []
    watch(made, 1, predicted_tokens=0, cached_tokens=None, prompt_tokens=None)
    assert seen(made) == [("a", Disagreement.NEVER_SEEN)]
    watch(made, 1, cached_tokens=None)
    assert made.alarms() == []


def test_each_endpoint_has_alarms_of_its_own_until_it_is_forgotten() -> None:
    made = Agreement()
    watch(made, endpoint="b", cached_tokens=0)
    watch(made, endpoint="a", predicted_tokens=0)
    assert seen(made) == [("a", Disagreement.NEVER_FOUND), ("b", Disagreement.NEVER_KEPT)]
    made.forget("b")
    made.forget("c")
    assert seen(made) == [("a", Disagreement.NEVER_FOUND)]
