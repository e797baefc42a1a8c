"""The fleet of an experiment: kinds of engines side by side, and the tiers of their caches."""

import pytest

from shoal.kernel import ConfigError
from shoal.simulation import Result, read_experiment, run_experiment

ROUND_ROBIN = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins: [{type: round-robin-picker}]\n"
CHATS = """
workload: {shape: multi-turn, sessions: 40, turns: [3, 5], system_tokens: 3000, say_tokens: [800, 2000], think_s: 0.5}
arrivals: {concurrency: 12}
"""


def run(fleet: str) -> Result:
    return run_experiment(read_experiment(CHATS + fleet, "test"), 1, router=ROUND_ROBIN)[0]


def test_each_tier_below_finds_what_the_one_above_lost() -> None:
    group = "count: 3, blocks: 1200"
    none, host, ssd, store = (
        run(text)
        for text in (
            f"fleet: [{{{group}}}]",
            f"fleet: [{{{group}, host_gb: 4}}]",
            f"fleet: [{{{group}, host_gb: 4, ssd_gb: 100}}]",
            f"fleet: [{{{group}}}]\nstore: {{gb: 200}}",
        )
    )
    assert none.hit_ratio < host.hit_ratio < ssd.hit_ratio < store.hit_ratio
    assert store.ttft_mean_s < none.ttft_mean_s


def test_a_slow_tier_costs_time() -> None:
    fast, slow = (
        run(f"fleet: [{{count: 2, blocks: 1200}}]\nstore: {{gb: 200, gb_per_s: {rate}}}") for rate in (20, 0.5)
    )
    assert slow.ttft_mean_s > 1.5 * fast.ttft_mean_s


def test_a_mixed_fleet_serves_and_the_fast_kind_gets_more_of_the_default_profile() -> None:
    text = CHATS + "fleet: [{count: 2, profile: h200-8b}, {count: 2, profile: l40s-8b}]\n"
    result, _ = run_experiment(read_experiment(text, "test"), 1)
    assert result.failed == 0
    assert result.served["e0"] + result.served["e1"] > result.served["e2"] + result.served["e3"] > 0


def test_speculative_decoding_shortens_answers_and_leaves_what_is_found() -> None:
    plain, guessing = run("fleet: [{count: 3}]"), run("fleet: [{count: 3, speculation: 2}]")
    assert guessing.tpot_p50_s < 0.7 * plain.tpot_p50_s


@pytest.mark.parametrize(
    ("fleet", "named"),
    [
        ("fleet: [{ssd_gb: 100}]", "needs host_gb"),
        ("fleet: [{mode: aggregate, host_gb: 100}]", "aggregate"),
        ("fleet: [{mode: aggregate}]\nstore: {gb: 1}", "aggregate"),
        ("fleet: [{profile: h100-8b}, {profile: h100-70b}]\nstore: {gb: 1}", "different models"),
        ("fleet: [{profile: h100-70b-tp1}]", "do not fit"),
        ("fleet: [{speculation: 0.5}]", "speculation"),
    ],
)
def test_what_cannot_be_is_said(fleet: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_experiment(CHATS + fleet, "test")
