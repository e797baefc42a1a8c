"""Bounds and waits of the subscriber of KV events: figures only."""

import msgspec


class KvSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How streams of KV events are followed; all times in seconds."""

    slice_s: float = 0.002
    """Longest time that events may take before the loop turns to requests."""
    receive_messages: int = 10_000
    """Messages of one publisher that wait in this process; past it they wait with the engine, which drops what is too
    much, and that is replayed."""
    replay_receive_messages: int = 1000
    """Replies of a replay that wait here; past it the engine's side waits."""
    reconnect_s: float = 0.1
    """First wait before a lost connection is dialled again; doubles up to `reconnect_most_s`."""
    reconnect_most_s: float = 2.0
    """Longest wait before a lost connection is dialled again: a restarted engine is seen before it can serve."""
    heartbeat_s: float = 5.0
    """Between pings of a quiet connection."""
    heartbeat_timeout_s: float = 10.0
    """Without any answer for this long the connection counts as cut."""
    settle_s: float = 0.05
    """From a connection to its replay: by then the engine knows of the subscription, so no event falls between."""
    replay_idle_s: float = 2.0
    """Longest wait for the next reply of a replay."""
    replay_total_s: float = 120.0
    """Longest replay."""
    replays: int = 8
    """Replays at once; others wait."""
    replay_tries: int = 3
    """Replays in a row that brought nothing, after which what was missed is given up."""
    retry_s: float = 0.1
    """First wait before a replay that failed is asked for again; doubles."""
    cool_down_s: float = 30.0
    """After giving up, no replay for this long; doubles up to `cool_down_most_s`."""
    cool_down_most_s: float = 600.0
    """Longest cool-down."""
    warm_up_s: float = 120.0
    """After something was missed for good, events without a further gap for this long make the view good again."""
    check_s: float = 10.0
    """After a stream was quiet for this long, the engine is asked once whether there was more."""
