"""The step-time model and its profiles."""

import msgspec
import pytest

from shoal.engine import PROFILES, find_profile
from shoal.engine.catalog import ACCELERATORS
from shoal.engine.steptime import StepTime


def seconds(profile: str, *, sequences: int = 1, tokens: int = 1, context_tokens: int = 0, pairs: float = 0.0) -> float:
    return StepTime(PROFILES[profile]).seconds(
        sequences=sequences, tokens=tokens, context_tokens=context_tokens, pairs=pairs
    )


def test_a_lone_decode_step_of_tiny_takes_four_milliseconds_and_five_percent_more_a_sequence() -> None:
    assert seconds("tiny") == pytest.approx(0.004)
    assert seconds("tiny", sequences=11, tokens=11) == pytest.approx(0.004 * 1.5)


def test_tiny_prefills_about_ten_thousand_tokens_a_second() -> None:
    assert 512 / seconds("tiny", tokens=512) == pytest.approx(10_000, rel=0.05)


@pytest.mark.parametrize(
    ("profile", "decode_s", "prefill_tokens_per_s"),
    [
        ("h100-8b", 0.0075, 26_000),
        ("h100-70b", 0.018, 11_000),
        ("tpu-v6e-8b", 0.0143, 24_000),
        ("tpu-v6e-70b", 0.0194, 20_000),
    ],
)
def test_a_profile_decodes_and_prefills_as_its_docstring_says(
    profile: str, decode_s: float, prefill_tokens_per_s: float
) -> None:
    assert seconds(profile) == pytest.approx(decode_s, rel=0.05)
    rate = 8192 / seconds(profile, tokens=8192, pairs=8192 * 8192 / 2)
    assert rate == pytest.approx(prefill_tokens_per_s, rel=0.15)


def test_a_step_is_bound_by_compute_or_by_bandwidth_never_by_their_sum() -> None:
    profile = PROFILES["h100-8b"]
    weights_s = profile.weight_bytes / (profile.peak_bytes_per_s * profile.bytes_ratio)
    few = seconds("h100-8b", tokens=100)
    assert few == pytest.approx(weights_s + profile.overhead_s + profile.sequence_s)
    compute_s = 8192 * profile.flops_per_token / (profile.peak_flops_per_s * profile.flops_ratio)
    many = seconds("h100-8b", tokens=8192)
    assert many == pytest.approx(compute_s + profile.overhead_s + profile.sequence_s)


def test_long_contexts_slow_decoding_down() -> None:
    short = seconds("h100-8b", sequences=32, tokens=32, context_tokens=32 * 100)
    long = seconds("h100-8b", sequences=32, tokens=32, context_tokens=32 * 8000)
    assert long > 1.5 * short


def test_a_default_cache_fits_beside_the_weights_of_as_few_chips_as_can_be() -> None:
    chips = {"h100-8b": 1, "h100-70b": 4, "h200-70b": 2, "a100-qwen3-235b": 8, "h200-deepseek-v3": 8, "tpu-7x-70b": 1}
    for name, profile in PROFILES.items():
        accelerator = next((each for each in ACCELERATORS if name.startswith(each.name + "-")), None)
        if accelerator is None:
            continue
        count = round(profile.peak_bytes_per_s / accelerator.bytes_per_s)
        assert count == chips.get(name, count)
        cache = profile.num_blocks * profile.block_size * profile.kv_bytes_per_token
        used = profile.weight_bytes + profile.expert_bytes + cache
        assert cache > 0.09 * count * accelerator.memory_bytes
        assert 0.5 * count * accelerator.memory_bytes < used < 0.9 * count * accelerator.memory_bytes


def test_a_name_may_say_how_many_chips() -> None:
    few, many = find_profile("h200-70b"), find_profile("h200-70b-tp8")
    assert many.name == "h200-70b-tp8"
    assert many.peak_bytes_per_s == 4 * few.peak_bytes_per_s
    assert many.num_blocks > 5 * few.num_blocks
    assert find_profile("h200-70b-tp2") == msgspec.structs.replace(few, name="h200-70b-tp2")


@pytest.mark.parametrize(
    ("name", "why"),
    [("h300-8b", "known: tiny"), ("h100-70b-tp1", "do not fit the memory of 1 h100"), ("tiny-tp2", "known: tiny")],
)
def test_a_name_that_is_no_profile_says_why(name: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        find_profile(name)


def test_a_mixture_of_experts_reads_more_of_them_the_more_tokens_a_step_has() -> None:
    one, many = (seconds("h200-deepseek-v3", sequences=n, tokens=n) for n in (1, 256))
    profile = PROFILES["h200-deepseek-v3"]
    all_s = (profile.weight_bytes + profile.expert_bytes) / (profile.peak_bytes_per_s * profile.bytes_ratio)
    assert one < 0.2 * all_s + profile.overhead_s
    assert all_s < many < all_s + profile.overhead_s + 0.005


def test_speculation_makes_steps_of_decoding_faster_and_prefill_not() -> None:
    plain, guessing = (StepTime(PROFILES["h100-8b"], speculation=each) for each in (1.0, 2.5))
    for step, factor in (((8, 8), 2.5), ((8, 2000), 1.0)):
        sequences, tokens = step
        ours, theirs = (
            each.seconds(sequences=sequences, tokens=tokens, context_tokens=9000, pairs=9000.0)
            for each in (plain, guessing)
        )
        assert ours == pytest.approx(factor * theirs)


@pytest.mark.parametrize("profile", ["tiny", "h100-8b", "h200-deepseek-v3", "l40s-70b"])
def test_many_decode_steps_take_the_sum_of_single_ones(profile: str) -> None:
    step_time = StepTime(PROFILES[profile], speculation=1.5)
    now, ends = 3.0, []
    for n in range(200):
        context = 5000 + 7 * n
        now += 2.0 * step_time.seconds(sequences=7, tokens=7, context_tokens=context, pairs=context + 3.5)
        ends.append(now)
    assert step_time.ends(3.0, 200, 2.0, sequences=7, context_tokens=5000, pairs=5003.5) == ends
    pace = step_time.pace(sequences=7, context_tokens=5000)
    assert pace.total_s(200) == pytest.approx((ends[-1] - 3.0) / 2.0, rel=1e-12)
    assert pace.steps_within(pace.total_s(200)) == pytest.approx(200, rel=1e-9)
