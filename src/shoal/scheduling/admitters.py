"""Admission by chance: of what may be shed, the more the fuller the pool is.

Admission by predicted latency is `latency`'s.
"""

from typing import Annotated, ClassVar

import numpy as np

from shoal.pool import FleetView, Request
from shoal.scheduling.columns import known


class ProbabilisticAdmitter:
    """Refuses, with 429, requests of a negative priority with a probability that grows with the pool's saturation.

    s = mean over the endpoints of max(waiting / queueDepthThreshold, kv usage / kvCacheUtilThreshold), 1 for one whose
    metrics are missing or old; p = min(1, k * s ** power).  With the defaults nearly nobody is refused at s = 0.1, and
    everybody from s = 0.32 on.
    """

    type: ClassVar[str] = "probabilistic-admitter"
    needs: ClassVar[tuple[str, ...]] = ("waiting", "kv_usage")

    def __init__(
        self,
        *,
        power: Annotated[float, "exponent of the saturation"] = 5.0,
        k: Annotated[float, "factor of the power"] = 300.0,
        queue_depth_threshold: Annotated[float, "requests that wait on an engine that is full"] = 5.0,
        kv_cache_util_threshold: Annotated[float, "use of the KV cache of an engine that is full, 0 to 1"] = 0.8,
    ) -> None:
        if not (power > 0 and k > 0 and queue_depth_threshold > 0 and 0 < kv_cache_util_threshold <= 1):
            raise ValueError(
                "power, k and queueDepthThreshold must be above 0, and kvCacheUtilThreshold above 0 and at most 1"
            )
        self._power, self._k = power, k
        self._queue, self._kv = queue_depth_threshold, kv_cache_util_threshold
        self._chance: np.random.Generator | None = None

    def draw_from(self, stream: np.random.Generator) -> None:
        self._chance = stream

    def objection(self, request: Request, priority: int, view: FleetView) -> str:
        if priority >= 0 or self._chance is None:
            return ""
        full = np.maximum(known(view, "waiting") / self._queue, known(view, "kv_usage") / self._kv)
        saturation = float(np.nan_to_num(full, nan=1.0).mean())
        if self._chance.random() >= self._k * saturation**self._power:
            return ""
        return f"the pool is {saturation:.0%} full and requests of a low priority are let in by chance"
