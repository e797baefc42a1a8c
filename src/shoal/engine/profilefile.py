"""Profiles in files of one's own: an accelerator and a model that are not in the catalogue.

Owns the form, a YAML mapping of `Profile`'s fields with `kind: EngineProfile`.  Reads no file: a host gives the text.
"""

from typing import Any

import msgspec
import yaml

from shoal.engine.profiles import Profile
from shoal.engine.steptime import StepTime
from shoal.kernel import ConfigError
from shoal.wire.documents import read_document

KIND = "EngineProfile"

_MAX_FIGURE = 1e24
_MAX_STEP_S = 3600.0
_MAY_BE_ZERO = frozenset(
    (
        *("expert_bytes", "expert_ratio", "flops_per_pair", "kv_bytes_per_token", "stored_bytes_per_token"),
        *("overhead_s", "sequence_s", "request_s"),
    )
)


def parse_profile(text: str, source: str) -> Profile:
    """Read a profile.  Raises ConfigError that names the first field that is missing, unknown or out of range."""
    document = read_document(text, source)
    if document.pop("kind", None) != KIND:
        raise ConfigError(f"is no profile; it begins with `kind: {KIND}`", source=source)
    unknown = sorted(str(name) for name in document if name not in Profile.__struct_fields__)
    if unknown:
        known = ", ".join(Profile.__struct_fields__)
        raise ConfigError(f"unknown field {unknown[0]!r}; there are {known}", source=source)
    try:
        # Other tools write 1e9 where YAML 1.1 wants 1.0e+9, and PyYAML then reads a string.
        profile = msgspec.convert(document, Profile, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error), source=source) from None
    check_profile(profile, source)
    return profile


def check_profile(profile: Profile, source: str) -> None:
    """Raise ConfigError for figures that no engine has."""
    for name, value in msgspec.structs.asdict(profile).items():
        if isinstance(value, str):
            continue
        least = f"{'0 or more' if name in _MAY_BE_ZERO else 'above 0'}, up to {_MAX_FIGURE:g}"
        if not value <= _MAX_FIGURE or value < 0 or (value == 0 and name not in _MAY_BE_ZERO):
            raise ConfigError(f"{name} must be {least}, got {float(min(value, 1e300)):g}", source=source)
    step_s = StepTime(profile).seconds(sequences=1, tokens=1, context_tokens=1, pairs=1.0)
    if not step_s <= _MAX_STEP_S:
        raise ConfigError(f"a step for one token would take {step_s:g} s; it may be {_MAX_STEP_S:g}", source=source)
    if profile.block_size % 16:
        raise ConfigError(f"block_size must be a multiple of 16, got {profile.block_size}", source=source)


def profile_text(profile: Profile, remarks: str = "") -> str:
    """Return a profile as a file.  remarks: lines that stand above it as comments."""
    lines = [f"# {line}".rstrip() for line in remarks.splitlines()]
    fields = {name: _short(value) for name, value in msgspec.structs.asdict(profile).items()}
    return "\n".join([*lines, yaml.safe_dump({"kind": KIND, **fields}, sort_keys=False)])


def _short(value: Any) -> Any:
    """A float with six digits: more is not known of any engine."""
    return float(f"{value:.6g}") if isinstance(value, float) else value
