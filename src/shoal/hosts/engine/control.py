"""What operators have asked of an engine: paused, asleep, which weights.

Owns who wants it to stand still; how an engine pauses is its model's.
"""

from collections.abc import Iterable

from shoal.engine.events import PauseMode
from shoal.hosts.engine.ranks import Ranks

SLEEP_TAGS = {0: ("scheduling",), 1: ("weights", "kv_cache"), 2: ("weights", "kv_cache")}
"""What sleeps at each level, as /wake_up names it."""
_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")


class Control:
    """The state behind the control calls.  weight_version: of the model, `default` until somebody sets it.

    A pause and a sleep hold the engine each on its own: it runs when both are over.
    """

    __slots__ = ("_asleep", "_level", "_ranks", "is_paused", "weight_version")

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._asleep: set[str] = set()
        self._level = 0
        self.is_paused = False
        self.weight_version = "default"

    @property
    def is_sleeping(self) -> bool:
        """Whether something sleeps."""
        return bool(self._asleep)

    @property
    def sleep_state(self) -> str:
        """The value of vLLM's `engine_sleep_state`."""
        return _SLEEP_STATES[self._level if self._asleep else 0]

    async def pause(self, mode: PauseMode, *, is_clearing: bool) -> None:
        """Let no step begin; returns when nothing runs any more."""
        self.is_paused = True
        await self._ranks.pause(mode, is_clearing=is_clearing)

    def resume(self) -> None:
        """End a pause."""
        self.is_paused = False
        self._run()

    async def sleep(self, level: int, mode: PauseMode) -> None:
        """Pause as long as anything sleeps; a level above 0 empties the cache."""
        self._asleep.update(SLEEP_TAGS[level])
        self._level = level
        await self._ranks.pause(mode, is_clearing=level > 0)

    def wake(self, tags: Iterable[str]) -> None:
        """Wake what `tags` name, all when there are none."""
        self._asleep -= set(tags) or self._asleep.copy()
        self._run()

    def _run(self) -> None:
        if not self.is_paused and not self._asleep:
            self._ranks.resume()
