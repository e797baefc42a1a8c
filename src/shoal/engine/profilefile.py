"""Profiles in files of one's own: an accelerator and a model that are not in the catalogue.

Owns the form, a YAML mapping of `Profile`'s fields with `kind: EngineProfile`.  Reads no file: a host gives the text.
"""

import math
from typing import Any

import msgspec
import yaml

from shoal.engine.profiles import Profile
from shoal.kernel import ConfigError
from shoal.wire.documents import read_document

KIND = "EngineProfile"

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
        least = "0 or more" if name in _MAY_BE_ZERO else "above 0"
        if not math.isfinite(value) or value < 0 or (value == 0 and name not in _MAY_BE_ZERO):
            raise ConfigError(f"{name} must be {least}, got {value:g}", source=source)
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
