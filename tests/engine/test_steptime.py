"""The step-time model and its profiles."""

import pytest

from shoal.engine import PROFILES
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


def test_a_default_cache_fits_beside_the_weights() -> None:
    memory_bytes = {"h100-8b": 80e9, "h100-70b": 320e9, "tpu-v6e-8b": 32e9, "tpu-v6e-70b": 256e9}
    for name, memory in memory_bytes.items():
        profile = PROFILES[name]
        cache = profile.num_blocks * profile.block_size * profile.kv_bytes_per_token
        assert 0.5 * memory < profile.weight_bytes + cache < 0.92 * memory
