"""The fleet keeper: which engines there are, whether each can serve, what it serves and how busy it is.

All looking at engines from outside (discovery, readiness, models, metrics) belongs here and ends in router
events.  Choosing an engine for a request does not, nor does carrying requests.
"""

from shoal.hosts.fleet.calls import PauseMode
from shoal.hosts.fleet.control import Done, Selection, UnknownEndpoint
from shoal.hosts.fleet.keeper import EndpointReport, FleetKeeper
from shoal.hosts.fleet.outbox import Sink
from shoal.hosts.fleet.pace import Pace
from shoal.hosts.fleet.publishers import kv_addresses
from shoal.hosts.fleet.sources import FileSource, Source, StaticSource
from shoal.hosts.fleet.targets import Target, parse_url

__all__ = [
    "Done",
    "EndpointReport",
    "FileSource",
    "FleetKeeper",
    "Pace",
    "PauseMode",
    "Selection",
    "Sink",
    "Source",
    "StaticSource",
    "Target",
    "UnknownEndpoint",
    "kv_addresses",
    "parse_url",
]
