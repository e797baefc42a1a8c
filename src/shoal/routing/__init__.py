"""The picker's brain: events in, commands out; books, learned speed, health, models, and the journal of it all.

What scores an endpoint is `scheduling`; bytes are `wire` and the hosts; this room decides and remembers.  Events and
commands are many: take the less common ones from the modules `events` and `commands`.
"""

from shoal.routing import commands, events
from shoal.routing.commands import Account, Command, Forward, Refuse
from shoal.routing.events import Arrived, Configured, Ended, Event, Recorded, Ticked
from shoal.routing.router import Router
from shoal.routing.status import EndpointStatus, PoolStatus

__all__ = [
    "Account",
    "Arrived",
    "Command",
    "Configured",
    "Ended",
    "EndpointStatus",
    "Event",
    "Forward",
    "PoolStatus",
    "Recorded",
    "Refuse",
    "Router",
    "Ticked",
    "commands",
    "events",
]
