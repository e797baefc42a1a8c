"""What engines tell of themselves unasked: streams of KV events, followed over ZMQ.

One subscription per publisher, in sequence, caught up by replays, with a freshness that the router knows.  What a
message says is read in `wire`, what it means for the blocks of an engine in `prefix`.
"""

from shoal.hosts.signals.settings import KvSettings
from shoal.hosts.signals.sources import sources_of
from shoal.hosts.signals.subscriber import KvSubscriber

__all__ = ["KvSettings", "KvSubscriber", "sources_of"]
