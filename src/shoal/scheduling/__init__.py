"""Who gets a request: filters, scorers, pickers and profiles over a view of the fleet.

Everything here is a pure function of a request, a view and the state that plugins learned from dispatches.  Where
the columns of the view come from is `routing`'s matter; how a configuration file becomes a Policy, too.
"""

from shoal.scheduling.plugin import Deprecated, Filter, Ignored, Key, Picker, Ref, Scorer
from shoal.scheduling.producers import ApproxPrefixCacheProducer, InflightLoadProducer
from shoal.scheduling.registry import Registry, installed
from shoal.scheduling.scheduler import Named, Policy, Profile, Scheduler

__all__ = [
    "ApproxPrefixCacheProducer",
    "Deprecated",
    "Filter",
    "Ignored",
    "InflightLoadProducer",
    "Key",
    "Named",
    "Picker",
    "Policy",
    "Profile",
    "Ref",
    "Registry",
    "Scheduler",
    "Scorer",
    "installed",
]
