"""What is counted of KV events in one worker process, under llm-d's metric names where they mean the same.

Workers read the same streams each for itself, so counters add up over workers and gauges are the largest of them.
"""

from collections.abc import Mapping

from shoal.measures import Counter, Family, Gauge
from shoal.pool.kvevents import KvState

_ENDPOINT = ("endpoint_name",)


class KvCounts:
    """Counters of all streams of a process.  The hot ones are plain numbers until they are read."""

    __slots__ = ("_active", "_state", "errors", "events", "gaps", "messages", "reconnections", "replays", "restarts",
                 "skipped", "stored_blocks")  # fmt: skip

    def __init__(self) -> None:
        prefix = "llm_d_epp_kv_cache_events"
        self.messages = Counter(f"{prefix}_messages_received", "Messages of KV events, replayed ones among them.")
        self.reconnections = Counter(
            f"{prefix}_subscriber_reconnections", "Connections to publishers made again after a cut."
        )
        self.errors = Counter(
            f"{prefix}_zmq_errors", "Failures of sockets towards publishers.", ("pod_identifier", "operation")
        )
        self._active = Gauge(f"{prefix}_active_subscribers", "Publishers that are subscribed to.", (), "max")
        self.events = Counter("shoal_kv_events", "KV events applied.", ("kind",))
        self.skipped = Counter("shoal_kv_events_skipped", "KV events and messages not applied.", ("reason",))
        self.gaps = Counter("shoal_kv_gaps", "Times that events of an engine were missed for good.", ("cause",))
        self.replays = Counter("shoal_kv_replays", "Replays by how they ended.", ("result",))
        self.restarts = Counter("shoal_kv_publisher_restarts", "Publishers that began to count anew.")
        self._state = Gauge(
            "shoal_kv_stream_state", "1 for the state that it is in.", ("endpoint_name", "state"), "max"
        )

    def families(self, states: Mapping[str, KvState], active: int) -> list[Family]:
        """Every family now.  states: by endpoint id.  active: subscriptions."""
        self._active.set(active)
        self._state.clear()
        for endpoint_id, state in states.items():
            self._state.set(1.0, (endpoint_id, str(state)))
        counters = (self.messages, self.reconnections, self.errors, self.events, self.skipped)
        further = (self.gaps, self.replays, self.restarts)
        return [each.family() for each in (*counters, *further, self._active, self._state)]
