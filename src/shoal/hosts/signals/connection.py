"""The sockets and clocks of one publisher: subscription, its cuts, its replays and their pauses.

Owns what happens when; what it means is `publisher`'s, what messages say is `cache`'s.
"""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

import zmq
from zmq.utils.monitor import parse_monitor_message

from shoal.hosts.logs import Log
from shoal.hosts.signals.cache import Cache
from shoal.hosts.signals.counts import KvCounts
from shoal.hosts.signals.publisher import Publisher
from shoal.hosts.signals.pump import Pump
from shoal.hosts.signals.replay import Replay, Slots
from shoal.hosts.signals.settings import KvSettings
from shoal.hosts.signals.sockets import Sockets
from shoal.kernel import InvalidInput
from shoal.pool.kvevents import KvSource, KvState
from shoal.prefix.ledger import LedgerGauges
from shoal.wire.kvevents import read_frames

log = Log("kvevents")

_WATCHED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
# One line of a publisher in so many seconds; more of them are for debugging.
_QUIET_S = 5.0


class Kit(NamedTuple):
    """What all connections of a process share."""

    sockets: Sockets
    pump: Pump
    slots: Slots
    settings: KvSettings
    counts: KvCounts


class Connection:
    """One subscription, from its making until `close`.

    changed: called when its state is another.  Raises zmq.ZMQError when ZMQ does not take the address.
    """

    __slots__ = (
        *(
            "_cache",
            "_checked",
            "_cool_down_s",
            "_kit",
            "_monitor",
            "_name",
            "_publisher",
            "_quiet_until",
            "_replay",
            "_settling",
            "_seen",
            "_socket",
        ),
        *("_timers", "_was_connected", "source"),
    )

    def __init__(self, name: str, source: KvSource, cache: Cache, kit: Kit, changed: Callable[[], None]) -> None:
        self.source = source
        self._name = name
        self._kit = kit
        self._cache = cache
        self._replay: Replay | None = None
        self._was_connected = False
        self._quiet_until = 0.0
        self._cool_down_s = kit.settings.cool_down_s
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._publisher = Publisher(
            cache,
            self,
            kit.settings,
            ask=self._ask,
            stop=self._stop_replay,
            pause=lambda is_paused: kit.pump.pause(self._socket, is_paused),
            changed=changed,
            warm=self._warm,
            has_replay=bool(source.replay_endpoint),
        )
        self._socket = kit.sockets.subscription(source.topic)
        self._monitor = self._socket.get_monitor_socket(_WATCHED)
        try:
            self._socket.connect(source.endpoint)
        except zmq.ZMQError:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close(linger=0)
            raise
        # Last sequence number: at the last look, and when the engine was last asked whether there was more.
        self._seen = self._checked = -1
        self._later("check", kit.settings.check_s, self._check)
        kit.pump.add(self._monitor, self._on_monitor)
        kit.pump.add(self._socket, self._on_message, self.rest)

    @property
    def state(self) -> KvState:
        """How far the view of this publisher can be trusted."""
        return self._publisher.state

    def gauges(self) -> LedgerGauges:
        """See `Cache.gauges`."""
        return self._cache.gauges()

    def close(self) -> None:
        """Close everything at once and tell nobody."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._stop_replay()
        # The other way round it would wait for ever to say goodbye to a monitor that is closed.
        self._socket.disable_monitor()
        self._kit.pump.close(self._monitor)
        self._kit.pump.close(self._socket)

    def forget(self) -> None:
        """Begin anew with what comes from now on; the router knows it already."""
        self._cache.forget()

    # ------------------------------------------------------------------ the subscription

    def _on_message(self, frames: list[bytes]) -> None:
        try:
            _, sequence, payload = read_frames(frames)
        except InvalidInput:
            self.dropped("unreadable-message")
            return
        self._publisher.received(sequence, payload)

    def _on_monitor(self, frames: list[bytes]) -> None:
        event = parse_monitor_message(frames)["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            if self._was_connected:
                self._kit.counts.reconnections.add()
            self._was_connected = True
            self._later("settle", self._kit.settings.settle_s, self._publisher.connected)
        elif event == zmq.EVENT_DISCONNECTED:
            self._cancel("settle")
            self._cancel("retry")
            self._say("the stream of KV events is cut", "disconnected")
            self._publisher.disconnected()
        else:
            self._kit.counts.errors.add((self._name, "handshake"))

    # ------------------------------------------------------------------ replays

    def _ask(self, start: int) -> None:
        self._stop_replay()
        kit = self._kit
        self._replay = Replay(
            self.source.replay_endpoint,
            start,
            self,
            sockets=kit.sockets,
            pump=kit.pump,
            slots=kit.slots,
            settings=kit.settings,
        )

    def _stop_replay(self) -> None:
        replay, self._replay = self._replay, None
        if replay is not None:
            replay.stop()

    def replied(self, sequence: int, payload: bytes) -> None:
        """One message of the replay."""
        self._publisher.replied(sequence, payload)

    def ended(self) -> None:
        """The replay is complete."""
        self._replay = None
        self._kit.counts.replays.add(("complete",))
        self._cool_down_s = self._kit.settings.cool_down_s
        self._publisher.replay_ended()
        self.rest()

    def failed(self, reason: str) -> None:
        """The replay stopped before its end."""
        self._replay = None
        settings = self._kit.settings
        self._kit.counts.replays.add((reason,))
        is_tried_again = self._publisher.replay_failed()
        self.rest()
        if is_tried_again:
            self._later("retry", settings.retry_s, self._publisher.retry)
            return
        log.warning(
            "KV events cannot be replayed",
            endpoint=self._name,
            source=self.source.replay_endpoint,
            why=reason,
            again_in_s=self._cool_down_s,
        )
        self._allow_later()

    def _allow_later(self) -> None:
        self._later("cool-down", self._cool_down_s, self._publisher.allow_replay)
        self._cool_down_s = min(2 * self._cool_down_s, self._kit.settings.cool_down_most_s)

    def _check(self) -> None:
        self._later("check", self._kit.settings.check_s, self._check)
        last = self._publisher.last
        if last == self._seen and last != self._checked:
            self._checked = last
            self._publisher.check()
        self._seen = last

    def rest(self) -> None:
        """No more comes in this turn of the loop."""
        try:
            self._cache.flush()
        except Exception:
            # Some of them are applied and some are not: what is known is no longer the engine's cache.
            log.exception("KV events could not be applied")
            self._kit.counts.errors.add((self._name, "apply"))
            self._publisher.broken()
            self._allow_later()

    # ------------------------------------------------------------------ notes of the publisher

    def gap(self, cause: str) -> None:
        """Something was missed for good."""
        self._kit.counts.gaps.add((cause,))
        self._say("KV events were missed", cause)

    def restarted(self) -> None:
        """Another process publishes at the address."""
        self._kit.counts.restarts.add()
        self._say("the publisher of KV events began anew", "restart")

    def dropped(self, cause: str) -> None:
        """A message was not applied."""
        self._kit.counts.skipped.add((cause,))

    def _say(self, message: str, cause: str) -> None:
        """Log what may happen with every message, but not each time."""
        now = asyncio.get_running_loop().time()
        say = log.debug
        if now >= self._quiet_until:
            self._quiet_until = now + _QUIET_S
            say = log.info
        say(message, endpoint=self._name, source=self.source.endpoint, cause=cause)

    # ------------------------------------------------------------------ clocks

    def _warm(self, is_wanted: bool) -> None:
        if is_wanted:
            self._later("warm", self._kit.settings.warm_up_s, self._publisher.trust)
        else:
            self._cancel("warm")

    def _later(self, name: str, after_s: float, call: Callable[[], None]) -> None:
        self._cancel(name)
        self._timers[name] = asyncio.get_running_loop().call_later(after_s, call)

    def _cancel(self, name: str) -> None:
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()
