"""What happens to engines during a run: they die and come back, slow down, join and leave.

Owns the form, and what can come after what; what it does to a pool is the cluster's.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from shoal.kernel import ConfigError
from shoal.simulation.fleets import Factor
from shoal.simulation.talks import Seconds

_ABSENT, _THERE, _DEAD, _LEFT = "is not there", "is there", "is dead", "has left"
_STEPS = {
    "kill": {_THERE: _DEAD, _LEFT: _LEFT},
    "revive": {_DEAD: _THERE},
    "slow": {_THERE: _THERE},
    "join": {_ABSENT: _THERE, _LEFT: _THERE},
    "leave": {_THERE: _LEFT},
}
"""In which state each can come, and what it makes of it.  Who leaves may die before it has answered what it has."""


class Incident(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something that happens to an engine.  factor: for `slow`.

    join: it was not there before.  leave: it gets no more requests, and goes when it has answered those that it has.
    """

    at_s: Seconds
    what: Literal["kill", "revive", "slow", "join", "leave"]
    endpoint: str
    factor: Factor = 1.0


def in_order(incidents: Sequence[Incident]) -> list[Incident]:
    """Return them by time; of one instant as they stand in the file."""
    return sorted(incidents, key=lambda each: each.at_s)


def late(incidents: Sequence[Incident]) -> frozenset[str]:
    """Return the engines that are not there at the start: those to which joining happens first."""
    first: dict[str, Incident] = {}
    for each in in_order(incidents):
        first.setdefault(each.endpoint, each)
    return frozenset(name for name, each in first.items() if each.what == "join")


def check_incidents(incidents: Sequence[Incident], names: Sequence[str], source: str) -> None:
    """Raise ConfigError for what happens to no engine of these `names`, or cannot come when it does."""
    absent = late(incidents)
    states = {name: _ABSENT if name in absent else _THERE for name in names}
    for each in in_order(incidents):
        if each.endpoint not in states:
            raise ConfigError(
                f"incidents: no endpoint {each.endpoint!r}; they are e0 to e{len(names) - 1}", source=source
            )
        before = states[each.endpoint]
        if before not in _STEPS[each.what]:
            raise ConfigError(
                f"incidents: {each.what} of {each.endpoint} at {each.at_s:g} s: it {before} then", source=source
            )
        states[each.endpoint] = _STEPS[each.what][before]
