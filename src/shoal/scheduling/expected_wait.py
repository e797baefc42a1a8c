"""Shoal's own scorer: the seconds that a request costs on each endpoint.

One figure in one unit replaces loosely weighted ratios, so that a match is worth exactly the prefill that it
saves, on that endpoint's hardware, against the work that is already booked there.
"""

import math
from typing import Annotated, ClassVar

import numpy as np

from shoal.pool import Decision, FleetView, Request
from shoal.scheduling.columns import highest, is_known, known, lowest, own_tokens, worst_high
from shoal.scheduling.heat import Heat
from shoal.scheduling.plugin import FEW, Mask, Scores

_MANY = 32.0
"""Requests in flight from which on prices of a request that are close to each other count as equal."""
_FASTEST = 1e-9
"""Seconds per token below which a learned speed is no speed: a billion tokens per second."""


class ExpectedWaitScorer:
    """Prefers the endpoint where the request costs the fewest seconds.  Shoal's default profile is this alone.

    cost = price * own * speed + booked * speed + inflight * requestSeconds + crowding; score = 1 / (1 + cost).
    own: prompt tokens not expected in the endpoint's cache.  booked: uncached prompt tokens in flight there.
    booked * speed is `inflight_prefill_s` where that is known.
    speed: seconds of prefill per token, learned per endpoint; values closer than speedStep count as equal, so that
    noise does not decide between equal machines.  requestSeconds: learned; requestTokens * speed where unknown.
    inflight: differences of less than levelShare of the mean count as none, so that a burst of answers that end in one
    step of an engine does not send all who follow up back to that engine in step.  Of those above 32 each counts
    requestSeconds where these are more than half a speedStep from the median, and the median elsewhere: how an engine
    decodes beside others tells of long contexts where requests are few, and little where they are many.

    price = ownWeight * (1 - shared) / (1 + uses / halfPriceUses).  Above 1 it makes a request stay with a cache even at
    the price of a short wait, because a copy elsewhere pushes out something else; what is above 1 is counted at the
    median speed, as that loss does not depend on the endpoint's.  shared: the part of the other candidates that hold
    what the best match holds beyond the worst, 0 for one holder and 1 for all; what most of them hold may as well be
    held by the rest.  uses: how often the beginning that the best match holds was used in the last minute or so,
    requests within a quarter of a second of each other counted once; a copy of what is asked for again and again is
    paid for by all who use it.

    crowding = imbalanceWeight * spread * excess.  spread: the prefill seconds between the best and the worst match,
    all that affinity can save here.  excess: how far the endpoint's requests in flight, weighted by speed, are above
    the mean m, as (requests - m) / (m + imbalanceSlack).  So affinity gives way gradually, and is given up when the
    excess reaches price / imbalanceWeight, however long the prompt: a hot prefix spreads although each request by
    itself would find its holder cheaper.

    An endpoint on trial (its speed is not known yet) takes part as one of median speed, but scores 0 while its
    requests in flight are at least max(1, trialShare * mean of the others), unless most of the fleet is on trial.
    Unknown speeds are the fleet's median.
    """

    type: ClassVar[str] = "expected-wait-scorer"
    needs: ClassVar[tuple[str, ...]] = (
        "matched_tokens",
        "inflight_prefill_s",
        "inflight_requests",
        "prefill_s_per_token",
        "request_s",
        "is_trial",
    )

    def __init__(
        self,
        *,
        own_weight: Annotated[
            float, "price of this request's own uncached tokens against those in flight, while one endpoint holds them"
        ] = 4.0,
        imbalance_weight: Annotated[float, "how early affinity gives way to a crowd; 0 never"] = 3.6,
        imbalance_slack: Annotated[float, "requests in flight by which endpoints may differ at low load"] = 4.0,
        level_share: Annotated[
            float, "share of the mean by which requests in flight may be above the fewest and still count as equal"
        ] = 0.1,
        request_tokens: Annotated[float, "prefill tokens that one request in flight is worth, until learned"] = 75.0,
        default_seconds_per_token: Annotated[float, "prefill speed until any is learned"] = 1e-4,
        speed_step: Annotated[float, "ratio below which two speeds count as equal; 1 takes them as learned"] = 1.8,
        trial_share: Annotated[
            float, "share of the others' mean requests in flight that a trial endpoint takes"
        ] = 0.25,
        half_price_uses: Annotated[
            float, "uses of a prefix, of late, by which the price of one more copy halves; 0 never"
        ] = 30.0,
    ) -> None:
        if min(own_weight, imbalance_weight, level_share, request_tokens, trial_share, half_price_uses) < 0:
            raise ValueError(
                "ownWeight, imbalanceWeight, levelShare, requestTokens, trialShare and halfPriceUses must not be "
                "negative"
            )
        if imbalance_slack <= 0:
            raise ValueError(f"imbalanceSlack must be above 0, got {imbalance_slack}")
        if default_seconds_per_token <= 0:
            raise ValueError(f"defaultSecondsPerToken must be above 0, got {default_seconds_per_token}")
        if speed_step < 1:
            raise ValueError(f"speedStep must be at least 1, got {speed_step}")
        self._own_weight = own_weight
        self._imbalance_weight = imbalance_weight
        self._slack = imbalance_slack
        self._level_share = level_share
        self._request_tokens = request_tokens
        self._default_speed = default_seconds_per_token
        self._step = speed_step
        self._trial_share = trial_share
        self._half_price_uses = half_price_uses
        self._heat = Heat()

    def dispatched(self, request: Request, view: FleetView, decision: Decision, now: float) -> None:
        if not self._half_price_uses or not view.has("matched_tokens"):
            return
        matched = view.level("matched_tokens")
        if matched is None:
            matched = max(view.values("matched_tokens")) if len(view) <= FEW else highest(view.column("matched_tokens"))
        if matched > 0 and (prefix := view.beginning(matched)):
            self._heat.used(prefix, now)

    def endpoint_left(self, endpoint_id: str) -> None:
        pass

    def adopt(self, previous: object) -> None:
        if isinstance(previous, ExpectedWaitScorer):
            self._heat = previous._heat

    def score(self, request: Request, view: FleetView) -> Scores:
        few = self.score_few(request, view) if len(view) <= FEW else None
        return self._score_many(request, view) if few is None else np.array(few)

    def score_few(self, request: Request, view: FleetView) -> list[float] | None:
        """Score a few candidates of which all is known, none on trial, in plain numbers.

        The same formula as `_score_many`, and the same result to rounding; for a dozen candidates the calls of array
        operations would cost three times the arithmetic.
        """
        if not view.complete >= _NEEDED or view.level("is_trial") != 0.0:
            return None
        requests = view.values("inflight_requests")
        speeds = view.values("prefill_s_per_token")
        count, ordered = len(requests), sorted(speeds)
        median = ordered[(count - 1) // 2]
        if not median > _FASTEST:
            return None
        is_alike = self._step > 1 and ordered[-1] <= ordered[0] * self._step
        paces = [1.0] * count if is_alike else self._paces(speeds, median)
        level = min(requests) + self._level_share * sum(requests) / count
        price, weight, mean, tokens = self._own_weight, 0.0, 0.0, float(request.prompt_tokens)
        matched = view.level("matched_tokens")
        if matched is not None:
            own = [tokens - matched] * count
        else:
            own = [max(tokens - held, 0.0) for held in view.values("matched_tokens")]
            most = max(own)
            width = most - min(own)
            if width > 0:
                price *= 1.0 - ((count * most - sum(own)) / width - 1.0) / (count - 1)
                price /= self._sharers(view, tokens - min(own))
                mean = sum([busy * pace for busy, pace in zip(requests, paces, strict=True)]) / count
                weight = self._imbalance_weight * width * median / (mean + self._slack)
        paid, premium = min(price, 1.0) * median, max(price - 1.0, 0.0) * median
        prices = view.values("request_s")
        levelled = prices if max(max(requests), level) <= _MANY else self._levelled(prices)
        scores = []
        for busy, seconds, further, booked, alone, pace in zip(
            requests, prices, levelled, view.values("inflight_prefill_s"), own, paces, strict=True
        ):
            load = busy if busy > level else level
            ahead = load * seconds if load <= _MANY else _MANY * seconds + (load - _MANY) * further
            cost = booked + ahead + alone * (paid * pace + premium)
            if weight and busy * pace > mean:
                cost += weight * (busy * pace - mean)
            scores.append(1.0 / (1.0 + cost))
        return scores

    def _levelled(self, prices: list[float]) -> list[float]:
        """Each candidate's price of a request where there are many: the median's where it is close to it."""
        usual, near = sorted(prices)[(len(prices) - 1) // 2], math.sqrt(self._step)
        return [usual if usual / near <= price <= usual * near else price for price in prices]

    def _sharers(self, view: FleetView, held_tokens: float) -> float:
        """Return among how many the price of a copy is shared.  held_tokens: by the best match."""
        uses = self._heat.of(view.beginning(held_tokens)) if self._half_price_uses else 0.0
        return 1.0 + uses / self._half_price_uses if uses else 1.0

    def _paces(self, speeds: list[float], median: float) -> list[float]:
        """Each candidate's multiple of the median speed, rounded to steps."""
        if self._step <= 1:
            return [speed / median for speed in speeds]
        step = math.log(self._step)
        return [self._step ** round(math.log(max(speed / median, 1e-3)) / step) for speed in speeds]

    def _score_many(self, request: Request, view: FleetView) -> Scores:
        requests = _counted(view, "inflight_requests")
        trial, new = _trial(view)
        median, pace = self._speeds(view, trial, is_all_new=new == len(requests))
        mean = _mean(requests)
        level = lowest(requests) + self._level_share * mean
        cost: Scores = _booked_s(view, trial, pace, median)
        load, seconds = np.maximum(requests, level), self._request_seconds(view, median)
        cost = cost + load * seconds
        if not isinstance(seconds, float) and highest(load) > _MANY:
            near, usual = math.sqrt(self._step), _middle(_ascending(seconds))
            is_close = (seconds * near >= usual) & (seconds <= usual * near)
            cost += np.where(is_close, (usual - seconds) * np.maximum(load - _MANY, 0.0), 0.0)
        matched = view.level("matched_tokens")
        if matched is not None:
            cost += (request.prompt_tokens - matched) * self._own_s(self._own_weight, median, pace)
        elif isinstance(pace, float):
            self._add_own(request, view, cost, requests, mean, median, pace)
        else:
            busy = requests * pace
            self._add_own(request, view, cost, busy, _mean(busy), median, pace)
        scores: Scores = 1.0 / (1.0 + cost)
        # A fleet that is mostly new has no others to spare it: it shares the load at once.
        if trial is not None and 2 * new <= len(requests):
            limit = max(1.0, self._trial_share * _mean(requests[~trial]))
            scores[trial & (requests >= limit)] = 0.0
        return scores

    def _add_own(
        self,
        request: Request,
        view: FleetView,
        cost: Scores,
        busy: Scores,
        mean: float,
        median: float,
        pace: Scores | float,
    ) -> None:
        """Add what the request's own tokens cost, and the crowding that their difference allows.

        busy: requests in flight, weighted by speed; mean: of them.
        """
        own = own_tokens(request, view)
        most, least = highest(own), lowest(own)
        width = most - least
        price = self._own_weight
        if width > 0:
            holders = len(own) * most - float(np.add.reduce(own))
            price *= 1.0 - (holders / width - 1.0) / (len(own) - 1)
            price /= self._sharers(view, request.prompt_tokens - least)
        cost += own * self._own_s(price, median, pace)
        if width > 0 and self._imbalance_weight > 0:
            weight = self._imbalance_weight * width * median / (mean + self._slack)
            cost += weight * np.maximum(busy - mean, 0.0)

    @staticmethod
    def _own_s(price: float, median: float, pace: Scores | float) -> Scores | float:
        """Seconds charged for each own token: up to its price at the endpoint's speed, what is above at the median."""
        return min(price, 1.0) * median * pace + max(price - 1.0, 0.0) * median

    def _speeds(self, view: FleetView, trial: Mask | None, *, is_all_new: bool) -> tuple[float, Scores | float]:
        """Return the median seconds per token and each candidate's multiple of it, rounded to steps."""
        level = view.level("prefill_s_per_token")
        if level is not None and level > _FASTEST:
            return level, 1.0
        speed = known(view, "prefill_s_per_token")
        ordered = _ascending(speed if trial is None or is_all_new else speed[~trial])
        median = _middle(ordered)
        if not median > _FASTEST:
            return self._default_speed, 1.0
        if is_all_new:
            return median, 1.0
        if self._step > 1 and ordered[-1] <= ordered[0] * self._step:
            return median, 1.0
        if len(ordered) < len(speed):
            unknown = np.isnan(speed) if trial is None else np.isnan(speed) | trial
            speed = np.where(unknown, median, speed)
        if self._step <= 1:
            return median, speed / median
        steps = np.rint(np.log(np.maximum(speed / median, 1e-3)) / math.log(self._step))
        return median, self._step**steps

    def _request_seconds(self, view: FleetView, median_speed: float) -> Scores | float:
        """Return the seconds that a request in flight adds, per candidate."""
        seconds = known(view, "request_s")
        if view.is_complete("request_s") or is_known(seconds):
            return seconds
        median = _middle(_ascending(seconds))
        if math.isnan(median):
            return self._request_tokens * median_speed
        return np.where(np.isnan(seconds), median, seconds)


_NEEDED = frozenset(ExpectedWaitScorer.needs)


def _trial(view: FleetView) -> tuple[Mask | None, int]:
    """Return which candidates are on trial, None when none is, and how many."""
    level = view.level("is_trial")
    if level is not None and not level > 0:
        return None, 0
    mask: Mask = known(view, "is_trial") > 0
    count = int(np.count_nonzero(mask))
    return (mask, count) if count else (None, 0)


def _counted(view: FleetView, name: str) -> Scores:
    """Return a column of counts, unknown ones as the largest known, all 0 where none is known."""
    column = known(view, name)
    return column if view.is_complete(name) or is_known(column) else np.fmax(worst_high(column), 0.0)


def _booked_s(view: FleetView, trial: Mask | None, pace: Scores | float, median: float) -> Scores:
    """Return the seconds of prefill already booked on each candidate, to be read."""
    if view.has("inflight_prefill_s"):
        seconds: Scores = view.column("inflight_prefill_s")
        if trial is not None:
            # Booked at an assumed speed; it counts at the one that the fleet was seen to have.
            seconds = np.where(trial, _counted(view, "inflight_uncached_tokens") * median, seconds)
        return seconds
    booked: Scores = _counted(view, "inflight_uncached_tokens") * (pace * median)
    return booked


def _mean(column: Scores) -> float:
    return float(np.add.reduce(column)) / len(column)


def _ascending(column: Scores) -> Scores:
    """Return the known values in order."""
    # NaN sorts last.
    ordered = column.copy()
    ordered.sort()
    return ordered[: np.count_nonzero(ordered == ordered)] if math.isnan(ordered[-1]) else ordered


def _middle(ordered: Scores) -> float:
    """Return the lower median, NaN without any value; np.median costs ten times as much on a short column."""
    return float(ordered[(len(ordered) - 1) // 2]) if len(ordered) else math.nan
