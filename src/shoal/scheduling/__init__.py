"""Who gets a request: filters, scorers, pickers and profiles over a view of the fleet.

Everything here is a pure function of a request, a view and the state that plugins learned from dispatches.  Where
the columns of the view come from is `routing`'s matter; how a configuration file becomes a Policy, too.  The module
`plugin` holds the protocols, `registry` the plugins that exist, `schema` their parameters.
"""

from shoal.scheduling import plugin, producers, registry, schema
from shoal.scheduling.plugin import Filter, Picker, Scorer
from shoal.scheduling.registry import Registry
from shoal.scheduling.scheduler import Named, Policy, Profile, Scheduler

__all__ = [
    "Filter",
    "Named",
    "Picker",
    "Policy",
    "Profile",
    "Registry",
    "Scheduler",
    "Scorer",
    "plugin",
    "producers",
    "registry",
    "schema",
]
