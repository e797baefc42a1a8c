"""When chats begin in an open loop, where the clients do not wait for the pool."""

import numpy as np
import numpy.typing as npt


def poisson_arrivals(rng: np.random.Generator, *, count: int, rate_per_s: float) -> npt.NDArray[np.float64]:
    """Return `count` ascending start times in seconds from 0, at `rate_per_s` on average."""
    if rate_per_s <= 0:
        raise ValueError(f"rate_per_s must be above 0, not {rate_per_s}")
    return np.cumsum(rng.exponential(1.0 / rate_per_s, size=count))
