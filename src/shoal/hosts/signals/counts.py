"""What is counted of KV events in one worker process, under llm-d's metric names where they mean the same.

Workers read the same streams each for itself, so counters add up over workers and gauges are the largest of them.
"""

from collections.abc import Mapping, Sequence

from shoal.measures import Counter, Family, Gauge
from shoal.pool.kvevents import KvState
from shoal.prefix.ledger import LedgerGauges

_ENDPOINT = ("endpoint_name",)
_LEFT_OUT = ("let-go", "lost-orphans", "other-groups", "unreadable", "unknown-removes", "uncounted")


class KvCounts:
    """Counters of all streams of a process.  The hot ones are plain numbers until they are read."""

    __slots__ = ("_active", "_left_out", "_sizes", "_state", "errors", "events", "gaps", "messages", "reconnections",
                 "replays", "restarts", "skipped", "stored_blocks")  # fmt: skip

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

        self._sizes = {
            "blocks": Gauge("shoal_kv_ledger_blocks", "Blocks that an engine is known to hold.", _ENDPOINT, "max"),
            "orphans": Gauge("shoal_kv_ledger_orphans", "Blocks that wait for the one before them.", _ENDPOINT, "max"),
            "used_bytes": Gauge("shoal_kv_ledger_bytes", "Memory for the blocks of an engine.", _ENDPOINT, "max"),
        }
        self._left_out = Gauge(
            "shoal_kv_ledger_left_out",
            "Blocks and events of an engine that are not known to be held, since its cache was last read anew.",
            ("endpoint_name", "reason"),
            "max",
        )

    def families(
        self, states: Mapping[str, KvState], active: int, ledgers: Mapping[str, Sequence[LedgerGauges]]
    ) -> list[Family]:
        """Every family now.  states, ledgers (of each rank): by endpoint id.  active: subscriptions."""
        self._active.set(active)
        self._state.clear()
        for endpoint_id, state in states.items():
            self._state.set(1.0, (endpoint_id, str(state)))
        self._take(ledgers)
        counters = (self.messages, self.reconnections, self.errors, self.events, self.skipped)
        further = (self.gaps, self.replays, self.restarts)
        gauges: list[Gauge] = [self._active, self._state, *self._sizes.values(), self._left_out]
        return [each.family() for each in (*counters, *further)] + [each.family() for each in gauges]

    def _take(self, ledgers: Mapping[str, Sequence[LedgerGauges]]) -> None:
        for gauge in (*self._sizes.values(), self._left_out):
            gauge.clear()
        for endpoint_id, ranks in ledgers.items():
            for name, gauge in self._sizes.items():
                gauge.set(float(sum(getattr(rank, name) for rank in ranks)), (endpoint_id,))
            for reason in _LEFT_OUT:
                count = sum(getattr(rank, reason.replace("-", "_")) for rank in ranks)
                if count:
                    self._left_out.set(float(count), (endpoint_id, reason))
