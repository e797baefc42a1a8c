"""Profiles in files: what is written is read again, and what no engine is, is refused by name."""

import msgspec
import pytest

from shoal.engine import PROFILES
from shoal.engine.profilefile import parse_profile, profile_text
from shoal.kernel import ConfigError

WRITTEN = profile_text(PROFILES["h100-8b"], "ours\nmeasured")


def test_what_is_written_is_read_again() -> None:
    assert WRITTEN.startswith("# ours\n# measured\nkind: EngineProfile\n")
    read = msgspec.structs.asdict(parse_profile(WRITTEN, "x.yaml"))
    for name, value in msgspec.structs.asdict(PROFILES["h100-8b"]).items():
        assert read[name] == (pytest.approx(value, rel=1e-5) if isinstance(value, float) else value)


def test_numbers_may_stand_as_other_tools_write_them() -> None:
    text = WRITTEN.replace("overhead_s: ", "overhead_s: 2e-3 # ")
    assert parse_profile(text, "x.yaml").overhead_s == 0.002


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [", "YAML"),
        ("kind: Experiment", "kind: EngineProfile"),
        (WRITTEN + "speed: 3\n", "unknown field 'speed'"),
        (WRITTEN.replace("weight_bytes", "# "), "weight_bytes"),
        (WRITTEN.replace("flops_ratio: ", "flops_ratio: -"), "flops_ratio must be above 0"),
        (WRITTEN.replace("block_size: 16", "block_size: 20"), "multiple of 16"),
        (WRITTEN.replace("num_blocks: ", "num_blocks: many # "), "num_blocks"),
        (WRITTEN.replace("num_blocks: ", "num_blocks: 1" + "0" * 400 + " # "), "num_blocks must be above 0, up to"),
        (WRITTEN.replace("overhead_s: ", "overhead_s: 1.0e+25 # "), "overhead_s must be 0 or more, up to 1e"),
        (WRITTEN.replace("flops_ratio: ", "flops_ratio: 1.0e-200 # "), "a step for one token would take"),
        (WRITTEN + "block_size: 32\n", "duplicate key"),
    ],
)
def test_what_no_engine_is_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_profile(text, "x.yaml")
