"""The sequence of one publisher without sockets: whatever is lost, what is believed follows from what was published."""

from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from shoal.hosts.signals.publisher import Publisher
from shoal.hosts.signals.settings import KvSettings
from shoal.pool.kvevents import KvState


class Engine:
    """A publisher's process with its buffer, and everything that stands between it and the picker."""

    def __init__(self, keeps: int, has_replay: bool) -> None:
        self.keeps = keeps
        self.has_replay = has_replay
        self.log: list[bytes] = []
        self.run = 0
        self.applied: list[bytes] = []
        self.gaps = 0
        self.is_paused = False
        self.asked: int | None = None
        self.asks = 0
        self.live: list[tuple[int, bytes]] = []
        self.warming = False
        self.publisher = Publisher(
            self,
            self,
            KvSettings(replay_tries=2),
            ask=self._ask,
            stop=lambda: self._ask(None),
            pause=self._pause,
            changed=lambda: None,
            warm=self._warm,
            has_replay=has_replay,
        )

    def apply(self, payload: bytes) -> bool:
        self.applied.append(payload)
        return False

    def clear(self) -> None:
        self.applied.clear()

    def gap(self, cause: str) -> None:
        assert cause
        self.gaps += 1

    def restarted(self) -> None:
        pass

    def dropped(self, cause: str) -> None:
        assert cause

    def _ask(self, start: int | None) -> None:
        self.asked = start
        self.asks += 1

    def _pause(self, is_paused: bool) -> None:
        self.is_paused = is_paused

    def _warm(self, is_wanted: bool) -> None:
        self.warming = is_wanted

    def publish(self, is_lost: bool) -> None:
        self.log.append(b"%d-%d" % (self.run, len(self.log)))
        if not is_lost:
            self.live.append((len(self.log) - 1, self.log[-1]))

    def restart(self) -> None:
        self.run += 1
        self.log, self.live = [], []
        self.publisher.disconnected()
        self.publisher.connected()
        if not self.has_replay:
            # An engine publishes nothing before its model is loaded, and by then the stream stands again.
            self.publish(False)

    def settle(self, answers: bool = True) -> None:
        """Deliver everything that is under way."""
        for _ in range(100):
            if self.asked is not None:
                self._replay(self.asked, answers)
            elif self.live and not self.is_paused:
                self.publisher.received(*self.live.pop(0))
            else:
                return
        raise AssertionError("it never comes to rest")

    def _replay(self, start: int, answers: bool) -> None:
        if not answers:
            self.asked = None
            if self.publisher.replay_failed():
                self.publisher.retry()
            return
        asks = self.asks
        for number in range(max(start, len(self.log) - self.keeps), len(self.log)):
            self.publisher.replied(number, self.log[number])
            if self.asks != asks:
                return
        self.asked = None
        self.publisher.replay_ended()


STEPS = st.lists(
    st.sampled_from(["publish", "publish", "publish", "lose", "lose-many", "restart", "cut", "check", "settle"]),
    max_size=25,
)


def play(engine: Engine, steps: list[str]) -> None:
    actions: dict[str, Callable[[], Any]] = {
        "publish": lambda: engine.publish(False),
        "lose": lambda: engine.publish(True),
        "lose-many": lambda: [engine.publish(True) for _ in range(6)],
        "restart": engine.restart,
        "cut": lambda: (engine.publisher.disconnected(), engine.publisher.connected()),
        "check": engine.publisher.check,
        "settle": engine.settle,
    }
    engine.publisher.connected()
    for step in steps:
        actions[step]()
    engine.settle()


@given(STEPS)
def test_with_a_replay_of_everything_nothing_is_ever_missing(steps: list[str]) -> None:
    engine = Engine(keeps=1000, has_replay=True)
    play(engine, steps)
    engine.publish(False)
    engine.settle()
    assert engine.applied == engine.log
    assert engine.gaps == 0
    assert engine.publisher.state is KvState.FRESH
    assert not engine.is_paused


@given(STEPS, st.integers(1, 5), st.booleans())
def test_what_is_believed_is_always_an_unbroken_end_of_what_was_published(
    steps: list[str], keeps: int, has_replay: bool
) -> None:
    engine = Engine(keeps=keeps, has_replay=has_replay)
    play(engine, steps)
    # One more shows the picker where the engine stands.
    engine.publish(False)
    engine.settle()
    assert engine.applied
    assert engine.applied == engine.log[-len(engine.applied) :]
    assert not engine.is_paused
    is_whole = engine.applied == engine.log
    assert is_whole or engine.gaps or has_replay
    if not has_replay and not is_whole:
        assert engine.publisher.state is KvState.STALE
        assert engine.warming


@given(STEPS)
def test_replays_that_never_answer_leave_the_live_stream_going(steps: list[str]) -> None:
    engine = Engine(keeps=1000, has_replay=True)
    engine.publisher.connected()
    for step in steps:
        if step == "settle":
            engine.settle(answers=False)
        else:
            engine.publish(step != "publish")
    engine.settle(answers=False)
    engine.publish(False)
    engine.settle(answers=False)
    assert engine.applied == engine.log[-len(engine.applied) :]
    assert not engine.is_paused
    # The engine finds its tongue: all is read again.
    engine.publisher.allow_replay()
    engine.settle()
    assert engine.applied == engine.log
    assert engine.publisher.state is KvState.FRESH
