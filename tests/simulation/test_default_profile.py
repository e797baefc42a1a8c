"""The default profile beside what llm-d does without a configuration: same engines, same arrivals, virtual time."""

from pathlib import Path
from statistics import median

import pytest

from shoal.simulation import Result, read_experiment, run_experiment

LLM_D = (Path(__file__).parents[2] / "examples/policies/llm-d-default.yaml").read_text()
SEEDS = (101, 102, 103)
"""None that the profile was tuned on."""

# Four caches of 25,600 tokens; but for the hot one the prompts of a shape are more than one holds and less than four.
SHAPES = {
    "multi-turn": """
fleet: [{count: 4, profile: tiny}]
workload:
  {shape: multi-turn, sessions: 32, turns: [6, 6], systems: 8, system_tokens: 1000, say_tokens: [175, 325],
   reply_tokens: [16, 32], think_s: 0}
arrivals: {concurrency: 32}
""",
    "hot": """
fleet: [{count: 4, profile: tiny}]
workload: {shape: hot, requests: 400, prompt_tokens: 1500, say_tokens: [200, 400], reply_tokens: [8, 16]}
arrivals: {concurrency: 48}
""",
    "zipf": """
fleet: [{count: 4, profile: tiny}]
workload:
  {shape: zipf, requests: 400, documents: 40, document_tokens: 2000, exponent: 0.8, say_tokens: [20, 60],
   reply_tokens: [8, 16]}
arrivals: {concurrency: 24}
""",
}


def results(shape: str, router: str) -> list[Result]:
    experiment = read_experiment(SHAPES[shape], shape)
    return [run_experiment(experiment, seed, router=router)[0] for seed in SEEDS]


@pytest.mark.parametrize("shape", SHAPES)
def test_requests_are_served_sooner_than_by_llm_ds_default(shape: str) -> None:
    theirs, ours = results(shape, LLM_D), results(shape, "")
    assert [each.failed for each in (*theirs, *ours)] == [0] * (2 * len(SEEDS))
    assert {each.requests for each in theirs} == {each.requests for each in ours}

    def over_theirs(figure: str) -> list[float]:
        return [getattr(own, figure) / getattr(other, figure) for own, other in zip(ours, theirs, strict=True)]

    # By a third and more where it was written; on no seed may any of them be worse.
    for figure in ("duration_s", "ttft_mean_s", "ttft_p95_s"):
        ratios = over_theirs(figure)
        assert median(ratios) < 0.9, (figure, ratios)
        assert max(ratios) < 1.0, (figure, ratios)
    assert median(over_theirs("ttft_p50_s")) < 1.0
