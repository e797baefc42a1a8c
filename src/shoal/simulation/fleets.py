"""The fleet of an experiment: groups of equal engines, the tiers of their KV caches, and a store that they share.

Owns the form and what it makes; what an engine is, is `shoal.engine`'s.
"""

from collections.abc import Callable, Iterable
from typing import Annotated, Literal

import msgspec

from shoal.engine import EngineConfig, Profile, find_profile
from shoal.engine.profilefile import check_profile, parse_profile
from shoal.kernel import ConfigError
from shoal.scheduling.filters import ROLE_LABEL
from shoal.simulation.handover import Role
from shoal.simulation.nodes import NodeConfig

MAX_NODES = 20_000
Factor = Annotated[float, msgspec.Meta(ge=1e-3, le=1e4)]
"""How many times as long an engine takes."""

_MAX_GB = 1e9
_Speed = Annotated[float, msgspec.Meta(ge=1e-3, le=1e6)]
PROFILE_ENDINGS = (".yaml", ".yml", ".json")


class Group(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Equal engines.  blocks: 0 for the profile's own.

    profile: model and accelerator, as `shoal engine --help` lists them, or the path of a file of one's own, in whose
    place `with_profiles` puts what it holds.  cost_per_hour: of one engine, for
    `shoal twin size`.

    host_gb, ssd_gb: KV tiers below the accelerator's memory, 0 for none; the SSD gets what the host drops.  *_gb_per_s:
    how fast KV comes back from them.  speculation: tokens that a decode step yields for each sequence on average, 1
    without speculative decoding.  mode: `aggregate` for the approximation that is faster with thousands of engines.

    role: `prefill` for engines that only prefill, `decode` for those that get KV from them, `both` for those that do
    all of a request.  transfer_gb_per_s: of KV from one engine to another, 0 for the profile's; the slower end counts.
    """

    count: Annotated[int, msgspec.Meta(ge=1, le=MAX_NODES)] = 4
    profile: str | Profile = "h100-8b"
    blocks: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)] = 0
    slow_factor: Factor = 1.0
    labels: dict[str, str] = {}
    cost_per_hour: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 0.0
    host_gb: Annotated[float, msgspec.Meta(ge=0, le=_MAX_GB)] = 0.0
    host_gb_per_s: _Speed = 50.0
    ssd_gb: Annotated[float, msgspec.Meta(ge=0, le=_MAX_GB)] = 0.0
    ssd_gb_per_s: _Speed = 6.0
    speculation: Annotated[float, msgspec.Meta(ge=1, le=16)] = 1.0
    mode: Literal["step", "aggregate"] = "step"
    role: Role = Role.BOTH
    transfer_gb_per_s: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 0.0


class Store(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """KV blocks that all engines share.  gb_per_s: how fast KV comes from it, to each engine."""

    gb: Annotated[float, msgspec.Meta(gt=0, le=_MAX_GB)]
    gb_per_s: _Speed = 10.0


def check_fleet(fleet: tuple[Group, ...], store: Store | None, source: str) -> None:
    """Raise ConfigError for what cannot be."""
    count = sum(group.count for group in fleet)
    if not 1 <= count <= MAX_NODES:
        raise ConfigError(f"fleet: has {count:,} engines; it may have 1 to {MAX_NODES:,}", source=source)
    for group in fleet:
        if isinstance(group.profile, Profile):
            check_profile(group.profile, f"{source}: fleet: profile {group.profile.name}")
        try:
            find_profile(group.profile)
        except ValueError as error:
            raise ConfigError(f"fleet: {error}", source=source) from None
        if group.ssd_gb and not group.host_gb:
            raise ConfigError("fleet: ssd_gb holds what the host drops, so it needs host_gb", source=source)
        if group.mode == "aggregate" and (group.host_gb or store is not None):
            raise ConfigError("fleet: aggregate engines have no tiers below the accelerator's memory", source=source)
    _check_roles(fleet, source)
    if store is not None and len({find_profile(group.profile).kv_bytes_per_token for group in fleet}) > 1:
        raise ConfigError("store: engines of different models cannot share blocks", source=source)


def _check_roles(fleet: tuple[Group, ...], source: str) -> None:
    roles = {group.role for group in fleet}
    if Role.PREFILL in roles and Role.DECODE not in roles:
        raise ConfigError("fleet: engines of role prefill need some of role decode", source=source)
    if Role.DECODE in roles and Role.PREFILL not in roles:
        raise ConfigError("fleet: engines of role decode need some of role prefill", source=source)
    parts = [find_profile(group.profile) for group in fleet if group.role is not Role.BOTH]
    kinds = {(each.kv_bytes_per_token, each.stored_bytes_per_token, each.block_size) for each in parts}
    if len(kinds) > 1:
        raise ConfigError(
            "fleet: engines of role prefill and decode need one model and one block size, to hand over KV",
            source=source,
        )


def with_profiles(fleet: tuple[Group, ...], read: Callable[[str], str]) -> tuple[Group, ...]:
    """Return the groups with what the files of their profiles hold.  read: gives the text of a file.

    Raises ConfigError.
    """
    return tuple(
        msgspec.structs.replace(group, profile=parse_profile(read(group.profile), group.profile))
        if isinstance(group.profile, str) and group.profile.endswith(PROFILE_ENDINGS)
        else group
        for group in fleet
    )


def nodes(fleet: Iterable[Group], store: Store | None = None) -> tuple[NodeConfig, ...]:
    """Return the engines: e0, e1, ... in the order of the groups."""
    made: list[NodeConfig] = []
    for group in fleet:
        engine = EngineConfig(
            profile=find_profile(group.profile),
            num_blocks=group.blocks,
            slow_factor=group.slow_factor,
            speculation=group.speculation,
            host_blocks=_blocks(group.host_gb, group.profile),
            host_bytes_per_s=group.host_gb_per_s * 1e9,
            disk_blocks=_blocks(group.ssd_gb, group.profile),
            disk_bytes_per_s=group.ssd_gb_per_s * 1e9,
            store_bytes_per_s=(store.gb_per_s if store is not None else 1.0) * 1e9,
        )
        made += [
            NodeConfig(
                id=f"e{len(made) + n}",
                engine=engine,
                labels=group.labels if group.role is Role.BOTH else {ROLE_LABEL: group.role.value} | group.labels,
                role=group.role,
                transfer_bytes_per_s=group.transfer_gb_per_s * 1e9 or engine.profile.transfer_bytes_per_s,
                is_aggregate=group.mode == "aggregate",
                has_store=store is not None,
            )
            for n in range(group.count)
        ]
    return tuple(made)


def store_blocks(fleet: tuple[Group, ...], store: Store | None) -> int:
    """Return how many blocks a store holds, 0 without one."""
    return _blocks(store.gb, fleet[0].profile) if store is not None else 0


def _blocks(gigabytes: float, named: str | Profile) -> int:
    profile = find_profile(named)
    token_bytes = profile.stored_bytes_per_token or profile.kv_bytes_per_token
    return int(gigabytes * 1e9 / (token_bytes * profile.block_size))
