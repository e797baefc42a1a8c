"""The plugin types that a configuration file may name: those of scheduling, of flow, and of installed packages.

Third parties add theirs through the entry point group `shoal.plugins`.
"""

import functools
from importlib.metadata import entry_points
from typing import Any

from shoal.flow import adaptive, ceilings, detectors, fairness, ordering, programs
from shoal.kernel import ConfigError
from shoal.scheduling import Registry
from shoal.scheduling.registry import BUILT_IN

ENTRY_POINT_GROUP = "shoal.plugins"

FAMILIES: dict[str, tuple[type[Any], ...]] = {
    **BUILT_IN,
    "Fairness between tenants": (
        fairness.TokenFairness,
        fairness.GlobalStrictFairness,
        fairness.RoundRobinFairness,
        programs.ProgramAwareFairness,
    ),
    "Order within a tenant": (
        ordering.TurnAwareOrdering,
        ordering.FcfsOrdering,
        ordering.EdfOrdering,
        ordering.SloDeadlineOrdering,
        ordering.ShortestWorkOrdering,
    ),
    "Usage limits": (ceilings.StaticUsageLimit, ceilings.PriorityHoldback, ceilings.SoftReflectiveCeiling),
    "Saturation": (adaptive.AdaptiveDetector, detectors.UtilizationDetector, detectors.ConcurrencyDetector),
}
"""The plugins of this version by family, in the order of the documentation."""


@functools.cache
def installed() -> Registry:
    """Return the built-in plugins and those of installed packages.  Raises ConfigError when one cannot be loaded."""
    classes = [cls for family in FAMILIES.values() for cls in family]
    for point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda point: (point.name, point.value)):
        try:
            cls = point.load()
        except Exception as error:
            raise ConfigError(f"plugin {point.name} ({point.value}) cannot be loaded: {error!r}") from error
        if getattr(cls, "type", None) != point.name:
            raise ConfigError(f"plugin {point.value} must have type = {point.name!r}, the name of its entry point")
        classes.append(cls)
    return Registry(classes)
