"""The columns of one decision: what plugins may read of the fleet, made when first read.

Owns which figure of the books, the fleet and the index stands behind each column's name.  What the names mean is told
at `FleetView`.
"""

from collections.abc import Callable

import numpy as np

from shoal.pool import Column, Given, Request
from shoal.prefix import BLOCK_TOKENS, Match
from shoal.prefix.hashing import REACH, Blocks
from shoal.routing.books import Books
from shoal.routing.exact import Held
from shoal.routing.fleet import Fleet, Floats
from shoal.routing.forecasts import Forecasts
from shoal.routing.laws import Prediction
from shoal.routing.models import ModelTable
from shoal.scheduling.plugin import FEW

# A reading older than this is no longer read: the scraper's slowest interval is 2 s.
STALE_SIGNALS_S = 6.0

# What an endpoint was sent and has dropped again counts for this share: a prompt that returns there pushes no copy into
# another cache.  Chosen in virtual time on caches far smaller than the working set (docs/performance.md).
HOME_RATIO = 0.25

# Tokens that the first n hashes of a prompt cover.
REACH_TOKENS = tuple(blocks * BLOCK_TOKENS for blocks in REACH)

# Columns that our own books fill: every value in them is known.
COMPLETE = frozenset(
    (
        "inflight_output_tokens",
        "inflight_prefill_s",
        "inflight_requests",
        "inflight_uncached_tokens",
        "is_trial",
        "estimated_tokens",
        "held_tokens",
        "matched_tokens",
        "prefill_s_per_token",
        "request_s",
    )
)


_NONE = np.zeros(0, np.bool_)
_NO_BLOCKS: Blocks = np.zeros(0, np.uint64)
_PREDICTED = frozenset(("predicted_ttft_s", "predicted_tpot_s", "strictest_tpot_slo_s"))


class Columns(dict[str, Given]):
    """Columns over the whole fleet for one request.  Looking one up makes it; `in` asks whether anybody can.

    What is read by nearly every policy and lies ready is there from the beginning.

    forecasts, blocks: for predictions; they are asked for only where they are on.
    """

    __slots__ = (
        "_blocks", "_books", "_fleet", "_forecasts", "_held", "_is_stale", "_makers", "_match", "_mean_uncached",
        "_models", "_now", "_prediction", "_request",
    )  # fmt: skip

    def __init__(
        self,
        fleet: Fleet,
        books: Books,
        models: ModelTable,
        request: Request,
        match: Match | None,
        now: float,
        mean_uncached_tokens: float,
        held: Held | None = None,
        forecasts: Forecasts | None = None,
        blocks: Blocks = _NO_BLOCKS,
    ) -> None:
        self._fleet = fleet
        self._forecasts = forecasts
        self._blocks = blocks
        self._prediction: Prediction | None = None
        self._held = held
        self._books = books
        self._models = models
        self._request = request
        self._match = match
        self._now = now
        self._mean_uncached = mean_uncached_tokens
        self._is_stale: Column | None = None
        self._makers = _MAKERS
        if not fleet.on_trial:
            self["is_trial"] = 0.0
        if fleet.has_foreign:
            return
        if len(fleet.rows) <= FEW:
            self._makers, columns = _FEW_MAKERS, fleet.columns
            self["inflight_requests"] = columns["inflight_requests"].tolist()
            self["prefill_s_per_token"] = columns["prefill_s_per_token"].tolist()
            self["request_s"] = columns["request_s"].tolist()
        elif fleet.stale(now - STALE_SIGNALS_S) is None:
            self.update(fleet.shown)

    def __contains__(self, name: object) -> bool:
        if name in _PREDICTED:
            forecasts = self._forecasts
            return forecasts is not None and forecasts.is_shown and self.prediction(forecasts).is_trusted
        return name in _MAKERS

    def __missing__(self, name: str) -> Given:
        column = self[name] = self._makers[name](self)
        return column

    def prediction(self, forecasts: Forecasts) -> Prediction:
        """What is predicted of the request, made once; before it is booked anywhere."""
        if self._prediction is None:
            self._prediction = forecasts.predict(self._request, self._floats, self._match, self._blocks)
        return self._prediction

    def _floats(self, name: str) -> Floats:
        column = self[name]
        return np.full(len(self._fleet), column) if isinstance(column, float) else np.asarray(column, np.float64)

    def _predicted(self) -> Prediction:
        forecasts = self._forecasts
        if forecasts is None:
            raise KeyError("predictions are off")
        return self.prediction(forecasts)

    def _predicted_ttft_s(self) -> Floats:
        return self._predicted().ttft_s

    def _predicted_tpot_s(self) -> Floats:
        return self._predicted().tpot_s

    def _strictest_tpot_slo_s(self) -> Floats | float:
        return float("inf") if self._forecasts is None else self._forecasts.strictest_tpot_slo_s()

    def _is_latency_unknown(self) -> float:
        forecasts = self._forecasts
        is_made = forecasts is not None and forecasts.is_shown
        return float(is_made and not self._predicted().is_trusted)

    def _inflight_requests(self) -> Floats:
        fleet = self._fleet
        own = fleet.columns["inflight_requests"]
        return own + fleet.columns["foreign_requests"] if fleet.has_foreign else own

    def _inflight_prefill_s(self) -> Floats:
        return self._books.prefill_s(self._now, self._mean_uncached)

    def _inflight_uncached_tokens(self) -> Floats:
        return self._books.uncached_tokens(self._now, self._mean_uncached)

    def _inflight_output_tokens(self) -> Floats:
        return self._fleet.columns["inflight_output_tokens"]

    def _prefill_s_per_token(self) -> Floats:
        return self._fleet.columns["prefill_s_per_token"]

    def _request_s(self) -> Floats:
        return self._fleet.columns["request_s"]

    def _is_trial(self) -> Floats:
        return self._fleet.columns["is_trial"]

    def _matched_tokens(self) -> Floats | float:
        if self._held is not None:
            return self._exact_tokens(self._held)
        return self._estimated_tokens()

    def _estimated_tokens(self) -> Floats | float:
        match = self._match
        if match is None or not match.runs:
            return 0.0
        return match.tokens(self._request.prompt_tokens).take(self._fleet.slots)

    def _max_model_len(self) -> Floats:
        model = self._request.model
        lengths = [self._models.max_model_len(model, member.endpoint.id) for member in self._fleet]
        return np.array([float(length) if length else np.nan for length in lengths])

    def _plain_prefill_s(self) -> list[float]:
        now, waits = self._now, self._books.memory_s()
        work = [at - now if at > now else 0.0 for at in self._fleet.columns["clear_at"].tolist()]
        return work if waits is None else [work_s + wait_s for work_s, wait_s in zip(work, waits.tolist(), strict=True)]

    def _plain_matched(self) -> list[float] | float:
        match = self._match
        if self._held is not None:
            values: list[float] = self._exact_tokens(self._held).tolist()
            return values
        if match is None or not match.runs:
            return 0.0
        tokens = self._request.prompt_tokens
        return [float(min(match.held(member.slot) * BLOCK_TOKENS, tokens)) for member in self._fleet.rows]

    def _held_tokens(self) -> Floats | float:
        """What is there of the prompt's prefix: by the events alone where they are known, or else the estimate."""
        if self._held is None:
            return self._estimated_tokens()
        worth = self._worths(self._held)
        return np.where(np.isnan(worth), self._estimated_tokens(), worth)

    def _worths(self, held: Held) -> Floats:
        return held.worths(self._fleet.rows, self._fleet.columns["prefill_s_per_token"])

    def _exact_tokens(self, held: Held) -> Floats:
        """What each endpoint saves of the prompt's prefill: known from its events, or else estimated.

        Where it went before and is gone, a part of it counts all the same: sessions do not move for nothing.
        """
        worth, sent = self._worths(held), self._estimated_tokens()
        home = np.where(worth < sent, worth + HOME_RATIO * (sent - worth), worth)
        tokens: Floats = np.minimum(np.where(np.isnan(worth), sent, home), float(self._request.prompt_tokens))
        return tokens

    def _waiting(self) -> Floats:
        return self._scraped("waiting")

    def _running(self) -> Floats:
        return self._scraped("running")

    def _kv_usage(self) -> Floats:
        return self._scraped("kv_usage")

    def _scraped(self, name: str) -> Floats:
        """A scraped column in which what is too old is unknown."""
        column = self._fleet.columns[name]
        if self._is_stale is None:
            is_stale = self._fleet.stale(self._now - STALE_SIGNALS_S)
            self._is_stale = _NONE if is_stale is None else is_stale
        return column if self._is_stale is _NONE else np.where(self._is_stale, np.nan, column)


_MAKERS: dict[str, Callable[[Columns], Given]] = {
    "estimated_tokens": Columns._estimated_tokens,
    "held_tokens": Columns._held_tokens,
    "inflight_output_tokens": Columns._inflight_output_tokens,
    "inflight_prefill_s": Columns._inflight_prefill_s,
    "inflight_requests": Columns._inflight_requests,
    "inflight_uncached_tokens": Columns._inflight_uncached_tokens,
    "is_latency_unknown": Columns._is_latency_unknown,
    "is_trial": Columns._is_trial,
    "kv_usage": Columns._kv_usage,
    "matched_tokens": Columns._matched_tokens,
    "max_model_len": Columns._max_model_len,
    "predicted_tpot_s": Columns._predicted_tpot_s,
    "predicted_ttft_s": Columns._predicted_ttft_s,
    "prefill_s_per_token": Columns._prefill_s_per_token,
    "request_s": Columns._request_s,
    "strictest_tpot_slo_s": Columns._strictest_tpot_slo_s,
    "running": Columns._running,
    "waiting": Columns._waiting,
}

_FEW_MAKERS: dict[str, Callable[[Columns], Given]] = {
    **_MAKERS,
    "inflight_prefill_s": Columns._plain_prefill_s,
    "matched_tokens": Columns._plain_matched,
}
