"""What happened of late, by band: how long requests waited, and what tenants got.

Owns two windows of half a minute, the present one and the one before; older figures are forgotten.  Nothing is decided
by it.
"""

from collections.abc import Mapping
from typing import NamedTuple

from shoal.kernel import spans

WINDOW_S = 30.0
MAX_TENANTS = 1_000
"""Tenants that are told apart in a window; what others got is in the total of their band."""
MAX_GATHERED = 256
"""Waits that are counted at once."""


class Got(NamedTuple):
    """Per second of late.  tokens: of prompts and answers.  computed: without those that a cache held."""

    tokens_per_s: float = 0.0
    computed_tokens_per_s: float = 0.0


class BandRecord(NamedTuple):
    """One band.  waits: how many waited how long, by class (`kernel.spans`).  total: of all its tenants; tenants: of
    each, and their weights."""

    waits: Mapping[int, int]
    total: Got
    tenants: Mapping[str, Got]
    weights: Mapping[str, float]


class _Sums:
    """Tokens that were used.  weight: the latest one of their tenant."""

    __slots__ = ("computed", "tokens", "weight")

    def __init__(self) -> None:
        self.tokens = self.computed = 0.0
        self.weight = 1.0

    def add(self, other: "_Sums") -> None:
        self.tokens += other.tokens
        self.computed += other.computed
        self.weight = other.weight

    def per(self, seconds: float) -> Got:
        return Got(self.tokens / seconds, self.computed / seconds)


class _Window:
    """gathered: waits of each band that are not counted yet.  rest: of tenants that are not told apart."""

    __slots__ = ("began_at", "gathered", "rest", "used", "waits")

    def __init__(self, began_at: float) -> None:
        self.began_at = began_at
        self.gathered: dict[int, list[float]] = {}
        self.waits: dict[int, dict[int, int]] = {}
        self.used: dict[tuple[int, str], _Sums] = {}
        self.rest: dict[int, _Sums] = {}

    def settle(self) -> None:
        for priority, times_s in self.gathered.items():
            spans.count(times_s, self.waits.setdefault(priority, {}))
            times_s.clear()


class Recent:
    """The figures of the last 30 to 60 seconds; of less right after the first one."""

    __slots__ = ("_before", "_present")

    def __init__(self) -> None:
        self._present: _Window | None = None
        self._before: _Window | None = None

    def waited(self, priority: int, wait_s: float, now: float) -> None:
        """Note that a request of a band waits no more; 0.0 for one that did not wait."""
        window = self._present
        if window is None or now - window.began_at >= WINDOW_S:
            window = self._at(now)
        times_s = window.gathered.get(priority)
        if times_s is None:
            times_s = window.gathered[priority] = []
        times_s.append(wait_s)
        if len(times_s) >= MAX_GATHERED:
            window.settle()

    def used(self, priority: int, tenant_id: str, weight: float, tokens: float, computed: float, now: float) -> None:
        """Note what a request of a tenant has used."""
        window = self._present
        if window is None or now - window.began_at >= WINDOW_S:
            window = self._at(now)
        key = (priority, tenant_id)
        sums = window.used.get(key)
        if sums is None:
            is_named = len(window.used) < MAX_TENANTS
            sums = window.used.setdefault(key, _Sums()) if is_named else window.rest.setdefault(priority, _Sums())
        sums.tokens += tokens
        sums.computed += computed
        sums.weight = weight

    def bands(self, now: float) -> dict[int, BandRecord]:
        """What happened in each band of which anything is known."""
        windows = [each for each in (self._at(now), self._before) if each is not None]
        seconds = max(1.0, now - windows[-1].began_at)
        return {priority: self._band(windows, priority, seconds) for priority in sorted(_priorities(windows))}

    def _band(self, windows: list[_Window], priority: int, seconds: float) -> BandRecord:
        waits: dict[int, int] = {}
        tenants: dict[str, _Sums] = {}
        total = _Sums()
        for window in reversed(windows):
            window.settle()
            for each, count in window.waits.get(priority, {}).items():
                waits[each] = waits.get(each, 0) + count
            total.add(window.rest.get(priority, _NOTHING))
            for (band, tenant_id), used in window.used.items():
                if band == priority:
                    total.add(used)
                    tenants.setdefault(tenant_id, _Sums()).add(used)
        got = {name: sums.per(seconds) for name, sums in tenants.items()}
        return BandRecord(waits, total.per(seconds), got, {name: sums.weight for name, sums in tenants.items()})

    def _at(self, now: float) -> _Window:
        present = self._present
        if present is not None and now - present.began_at < WINDOW_S:
            return present
        if present is not None:
            is_next = now - present.began_at < 2 * WINDOW_S
            self._before = present if is_next else _Window(now - WINDOW_S)
        self._present = present = _Window(now)
        return present


def _priorities(windows: list[_Window]) -> set[int]:
    told = {priority for window in windows for priority in (*window.gathered, *window.rest)}
    return told | {priority for window in windows for priority, _ in window.used}


_NOTHING = _Sums()
