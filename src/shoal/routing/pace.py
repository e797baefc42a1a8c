"""How fast an endpoint has been seen to work, learned from its records.

Owns the model seconds = base + s_per_token x tokens of what it did up to a first token (`line`), one fit per endpoint,
shrunk towards the pool's.  What is booked where is `books`; who is chosen is `scheduling`.

The base is what the quickest answers of late took, not the intercept of a line through all: an intercept takes waits
whose cause is not known for the endpoint's own, and leaves it too fast a speed.
"""

from collections.abc import Iterable
from statistics import median

from shoal.kernel import InvalidInput
from shoal.routing.line import Turn
from shoal.routing.news import PaceState

# One record's weight after n later ones is DECAY**n: a change of speed is half learned after 35 records.
DECAY = 0.98
# Before anything was seen: 10,000 tokens/s of prefill, the order of one busy mid-range accelerator.
DEFAULT_S_PER_TOKEN = 1e-4
# An own fit weighs as much as the pool's once it rests on this many records, and takes part in the pool's.
SHRINK_RECORDS = 4.0
# Of the way from the base up to a slower answer, the base goes this far; to a quicker one it goes at once.
BASE_RISE = 0.01
# Mean square of the work, in tokens squared, below which a speed cannot be told from noise.
RIDGE_TOKENS2 = 300.0**2
# A record far above what was expected is a stall, not a speed: it counts as at most this multiple.
OUTLIER_RATIO = 4.0
OUTLIER_FLOOR_S = 0.5
# A request in flight costs as much as this many uncached tokens, over all peers the best trade in a live lab.
TOKENS_PER_REQUEST = 75.0
# The pool's line of decoding: one answer's weight after n later ones, and how many it takes to be one.
DECODING_DECAY = 0.99
DECODING_RECORDS = 8.0
MIN_S_PER_TOKEN = 1e-7
MAX_S_PER_TOKEN = 1.0
# No sum of records comes near it, and its products are still numbers.
MAX_SUM = 1e24


class Pace:
    """The fit of one endpoint: decayed least squares through a base that follows the quickest answers.

    decoding: its time per output token beside what is usual at its load, 1.0 as usual.
    """

    __slots__ = ("_sum_wxx", "_sum_wxy", "base_s", "decoding", "records", "s_per_token", "tpot_s", "weight")

    def __init__(self) -> None:
        self.weight = 0.0
        self.records = 0
        self._sum_wxx = self._sum_wxy = 0.0
        self.s_per_token = DEFAULT_S_PER_TOKEN
        self.base_s = 0.0
        self.tpot_s = 0.0
        self.decoding = 1.0

    def worked_s(self, turn: Turn) -> float:
        """Return how long the endpoint worked on the tokens of a turn: without the base where nobody was waiting."""
        if not turn.was_idle:
            return turn.seconds
        if turn.seconds <= self.base_s:
            self.base_s = turn.seconds
        else:
            rest_s = max(0.0, turn.seconds - self.s_per_token * turn.tokens)
            self.base_s += BASE_RISE * (min(rest_s, self.base_s + OUTLIER_FLOOR_S) - self.base_s)
        return turn.seconds - self.base_s

    def learn(self, tokens: float, seconds: float, prior_s_per_token: float) -> None:
        """Take in that `tokens` of prefill took `seconds`."""
        if self.records >= SHRINK_RECORDS:
            seconds = min(seconds, OUTLIER_RATIO * self.s_per_token * tokens + OUTLIER_FLOOR_S)
        self.records += 1
        self.weight = weight = self.weight * DECAY + 1.0
        self._sum_wxx = self._sum_wxx * DECAY + tokens * tokens
        self._sum_wxy = self._sum_wxy * DECAY + tokens * seconds
        slope = (self._sum_wxy / weight + RIDGE_TOKENS2 * prior_s_per_token) / (self._sum_wxx / weight + RIDGE_TOKENS2)
        own_share = weight / (weight + SHRINK_RECORDS)
        slope = own_share * slope + (1.0 - own_share) * prior_s_per_token
        self.s_per_token = min(max(slope, prior_s_per_token / 50.0, MIN_S_PER_TOKEN), MAX_S_PER_TOKEN)

    def state(self) -> PaceState:
        """Return all that was learnt, for another router."""
        sums = (self.weight, self._sum_wxx, self._sum_wxy)
        return PaceState(self.records, sums, self.s_per_token, self.base_s, self.tpot_s)

    def take(self, state: PaceState) -> None:
        """Go on from what another router learnt.  Raises InvalidInput when it is no pace."""
        figures = (*state.sums, state.s_per_token, state.base_s, state.tpot_s)
        if not all(0.0 <= each <= MAX_SUM for each in figures):
            raise InvalidInput("a handed-over pace is no number")
        self.records = state.records
        self.weight, self._sum_wxx, self._sum_wxy = state.sums
        self.s_per_token = min(max(state.s_per_token, MIN_S_PER_TOKEN), MAX_S_PER_TOKEN)
        self.base_s, self.tpot_s = state.base_s, state.tpot_s

    def learn_tpot(self, tpot_s: float, usual_s: float) -> None:
        """Take in the mean time per output token of one answer, and what is usual, 0.0 while that is not known."""
        self.tpot_s = tpot_s if self.tpot_s == 0.0 else 0.9 * self.tpot_s + 0.1 * tpot_s
        if usual_s > 0.0:
            self.decoding = 0.9 * self.decoding + 0.1 * tpot_s / usual_s


def pool_s_per_token(paces: Iterable[Pace]) -> float:
    """Median seconds per uncached token over endpoints that were seen at work, else the default."""
    seen = [pace.s_per_token for pace in paces if pace.records >= SHRINK_RECORDS]
    return median(seen) if seen else DEFAULT_S_PER_TOKEN


class Decoding:
    """How long an output token takes with so many requests in flight: a line over the pool, by decayed least squares.

    An endpoint's time per output token by itself says little of the machine, since it grows with the load: of two equal
    endpoints the one that had a quiet minute would seem the faster, and be flooded.
    """

    __slots__ = ("_sum_w", "_sum_wx", "_sum_wxx", "_sum_wxy", "_sum_wy")

    def __init__(self) -> None:
        self._sum_w = self._sum_wx = self._sum_wy = self._sum_wxx = self._sum_wxy = 0.0

    def usual_s(self, requests: float) -> float:
        """Seconds per output token where `requests` are in flight, 0.0 while it is not known."""
        weight = self._sum_w
        if weight < DECODING_RECORDS:
            return 0.0
        mean, mean_s = self._sum_wx / weight, self._sum_wy / weight
        spread = self._sum_wxx / weight - mean * mean
        slope_s = max(0.0, self._sum_wxy / weight - mean * mean_s) / spread if spread > 1.0 else 0.0
        # Even the first request takes time: at least a tenth of the mean.
        slope_s = min(slope_s, 0.9 * mean_s / mean if mean > 0.0 else 0.0)
        return mean_s + slope_s * (requests - mean)

    def learn(self, requests: float, tpot_s: float) -> None:
        """Take in an answer that ended with `requests` in flight beside it."""
        self._sum_w = self._sum_w * DECODING_DECAY + 1.0
        self._sum_wx = self._sum_wx * DECODING_DECAY + requests
        self._sum_wy = self._sum_wy * DECODING_DECAY + tpot_s
        self._sum_wxx = self._sum_wxx * DECODING_DECAY + requests * requests
        self._sum_wxy = self._sum_wxy * DECODING_DECAY + requests * tpot_s


def request_s(pace: Pace, pool_token_s: float) -> float:
    """Seconds that one more request in flight adds on an endpoint, by how it decodes beside others at its load."""
    return TOKENS_PER_REQUEST * pool_token_s * min(max(pace.decoding, 0.25), 8.0)
