from collections.abc import Sequence

import pytest

from shoal.pool import Refusal, RefusalReason
from shoal.scheduling import Filter
from shoal.scheduling.filters import (
    ByLabel,
    Condition,
    DecodeFilter,
    EncodeFilter,
    Expression,
    LabelSelectorFilter,
    PrefillFilter,
    PrefixCacheAffinityFilter,
    UtilizationFilter,
)
from tests.scheduling.script import NAN, decide, request, scheduler, view

ROLE = "llm-d.ai/role"
ROLES = ("decode", "prefill", "encode", "prefill-decode", "both", "encode-prefill", "encode-prefill-decode", "")


def kept_roles(narrow: Filter) -> set[str]:
    labels: Sequence[dict[str, str]] = [{ROLE: role} if role else {} for role in ROLES]
    mask = narrow.keep(request(), view(labels=labels))
    return {role for role, stays in zip(ROLES, mask, strict=True) if stays}


def test_roles_are_those_of_llm_d() -> None:
    assert kept_roles(DecodeFilter()) == {"decode", "prefill-decode", "both", "encode-prefill-decode", ""}
    assert kept_roles(PrefillFilter()) == {
        "prefill",
        "encode-prefill",
        "prefill-decode",
        "both",
        "encode-prefill-decode",
    }
    assert kept_roles(EncodeFilter()) == {"encode", "encode-prefill", "encode-prefill-decode"}


def test_a_selector_needs_every_label_and_expression() -> None:
    labels = [{"gpu": "h100", "zone": "a"}, {"gpu": "h100", "zone": "b"}, {"gpu": "l4", "zone": "a"}, {}]
    narrow = LabelSelectorFilter(
        match_labels={"gpu": "h100"}, match_expressions=(Expression(key="zone", operator="In", values=("a", "c")),)
    )
    assert list(narrow.keep(request(), view(labels=labels))) == [True, False, False, False]
    assert LabelSelectorFilter().keep(request(), view(labels=labels)).all()


@pytest.mark.parametrize(
    ("expression", "kept"),
    [
        (Expression(key="a", operator="In", values=("1",)), [True, False, False]),
        (Expression(key="a", operator="NotIn", values=("1",)), [False, True, True]),
        (Expression(key="a", operator="Exists"), [True, True, False]),
        (Expression(key="a", operator="DoesNotExist"), [False, False, True]),
    ],
)
def test_expressions_are_those_of_kubernetes(expression: Expression, kept: list[bool]) -> None:
    narrow = LabelSelectorFilter(match_expressions=(expression,))
    assert list(narrow.keep(request(), view(labels=[{"a": "1"}, {"a": "2"}, {}]))) == kept


def test_an_expression_has_values_exactly_when_its_operator_takes_them() -> None:
    with pytest.raises(ValueError, match="needs values"):
        LabelSelectorFilter(match_expressions=(Expression(key="a", operator="In"),))
    with pytest.raises(ValueError, match="takes no values"):
        LabelSelectorFilter(match_expressions=(Expression(key="a", operator="Exists", values=("1",)),))


def test_labels_are_looked_at_again_when_the_fleet_changes() -> None:
    narrow = LabelSelectorFilter(match_labels={"a": "1"})
    assert list(narrow.keep(request(), view(labels=[{"a": "1"}, {}]))) == [True, False]
    assert list(narrow.keep(request(), view(labels=[{}, {"a": "1"}]))) == [False, True]


def test_the_old_label_filter_still_works() -> None:
    seen = view(labels=[{"a": "1"}, {"a": "2"}, {}])
    assert list(ByLabel(label="a", valid_values=("1",)).keep(request(), seen)) == [True, False, False]
    assert list(ByLabel(label="a", valid_values=("1",), allows_no_label=True).keep(request(), seen)) == [
        True,
        False,
        True,
    ]


def test_utilization_needs_every_condition() -> None:
    narrow = UtilizationFilter(
        conditions=(
            Condition(metric="waiting-queue", max_value=5),
            Condition(metric="kv-cache-utilization", max_value=0.9),
        )
    )
    seen = view(waiting=[5, 6, 0], kv_usage=[0.9, 0.1, 0.95])
    assert list(narrow.keep(request(), seen)) == [True, False, False]


def test_unknown_use_counts_as_the_largest_known_and_drops_nobody_when_none_is_known() -> None:
    narrow = UtilizationFilter(conditions=(Condition(metric="running-requests", max_value=5),))
    assert list(narrow.keep(request(), view(running=[1, NAN, 9]))) == [True, False, False]
    assert list(narrow.keep(request(), view(running=[NAN, NAN]))) == [True, True]


def test_a_full_fleet_is_refused_as_saturated_unless_it_may_fall_back() -> None:
    conditions = (Condition(metric="active-requests", max_value=1),)
    seen = view(inflight_requests=[2, 3])
    refusal = scheduler(UtilizationFilter(conditions=conditions)).schedule(request(), seen, 0.0)
    assert isinstance(refusal, Refusal)
    assert refusal.reason is RefusalReason.SATURATED
    assert "plugin0 dropped 2" in refusal.message
    lenient = UtilizationFilter(conditions=conditions, fallback_on_empty=True)
    assert decide(scheduler(lenient), request(), seen).dropped == (("plugin0", 0),)


def test_conditions_are_checked() -> None:
    with pytest.raises(ValueError, match="conditions must not be empty"):
        UtilizationFilter(conditions=())
    with pytest.raises(ValueError, match=r"conditions\[0\].maxValue"):
        UtilizationFilter(conditions=(Condition(metric="kv-cache-utilization", max_value=2),))


def test_affinity_keeps_the_holders() -> None:
    seen = view(matched_tokens=[850, 0, 790], inflight_uncached_tokens=[0, 0, 0])
    assert list(PrefixCacheAffinityFilter().keep(request(1000), seen)) == [True, False, False]


def test_affinity_gives_way_when_the_holders_are_much_busier() -> None:
    # 18 s at 15,928 tokens/s are 286,704 tokens.
    narrow = PrefixCacheAffinityFilter()
    busy = view(matched_tokens=[900, 0], inflight_uncached_tokens=[286_800, 0])
    assert list(narrow.keep(request(1000), busy)) == [True, True]
    less = view(matched_tokens=[900, 0], inflight_uncached_tokens=[286_600, 0])
    assert list(narrow.keep(request(1000), less)) == [True, False]
    never = PrefixCacheAffinityFilter(max_ttft_penalty_ms=0)
    assert list(never.keep(request(1000), busy)) == [True, False]


def test_affinity_keeps_all_without_a_holder() -> None:
    assert PrefixCacheAffinityFilter().keep(request(1000), view(matched_tokens=[100, 0])).all()
    assert PrefixCacheAffinityFilter().keep(request(0), view(matched_tokens=[0, 0])).all()


def test_some_requests_explore() -> None:
    made = scheduler(PrefixCacheAffinityFilter(exploration_probability=0.5))
    seen = view(matched_tokens=[900, 0], inflight_uncached_tokens=[0, 0])
    dropped = [decide(made, request(1000), seen).dropped[0][1] for _ in range(400)]
    assert 120 < sum(dropped) < 280


def test_affinity_gives_way_by_predicted_ttft_where_that_is_asked_for() -> None:
    made = PrefixCacheAffinityFilter(ttft_source="latencyPredictor", max_ttft_penalty_ms=200)
    held = [900, 0]
    slow = view(matched_tokens=held, predicted_ttft_s=[0.5, 0.2], inflight_uncached_tokens=[0, 0])
    near = view(matched_tokens=held, predicted_ttft_s=[0.3, 0.2], inflight_uncached_tokens=[9_000_000, 0])
    assert list(made.keep(request(1000), slow)) == [True, True]
    assert list(made.keep(request(1000), near)) == [True, False]


def test_affinity_goes_by_throughput_while_nothing_is_predicted() -> None:
    made = PrefixCacheAffinityFilter(ttft_source="latencyPredictor")
    busy = view(matched_tokens=[900, 0], inflight_uncached_tokens=[9_000_000, 0])
    assert made.keep(request(1000), busy).all()
