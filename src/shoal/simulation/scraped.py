"""From an engine's metrics pages to the coefficients of the model of it, as far as sums tell them.

A page has sums since the start: between two scrapes they give the mean time of a decoded token, the mean time of a
prefill, and of what sizes steps and requests were.  The formula of a step gives the same means for the mean step, and
its speeds are changed until they agree.  Means tell how fast compute and memory are and not more: what a token costs
against a pair of tokens, or the weights against KV, stays as in the base.  `fit` learns more from a journal, which has
each request.  Owns the method; the names of metrics are `wire.engine_totals`'.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from shoal.engine import Profile
from shoal.engine.steptime import StepTime
from shoal.kernel import InvalidInput
from shoal.simulation.fit import Error
from shoal.wire.engine_totals import Totals

Floats = npt.NDArray[np.float64]

SPEEDS = ("compute", "memory", "overhead")
"""What is fitted: the time of tokens and their pairs, of weights and KV, of each step and each sequence in it."""

LEAST_REQUESTS = 20
"""Of a window; means of fewer say little."""
_FEWEST_TO_HOLD_OUT = 4
_HELD_OUT = 0.3
# What the mean step is off from the mean of steps, at best.
_LEAST_SCATTER = 0.03
# What no window says anything of stands within a factor of e of the base.
_PRIOR = 1.0
_TOLD = 0.5
_MOST = 5.0
_ROUNDS = 30


class ScrapedFit(msgspec.Struct, frozen=True, kw_only=True):
    """What was found.

    factors: what is fitted of `SPEEDS` takes so many times as long as in the base; the others are kept.  spread: half
    the width of the 95 % interval of each factor as a share of it.  request_s: before the queue, as measured.
    requests, windows: that were used; held_out: windows of these that were not fitted to, 0 when there were too few.
    decode, prefill: errors of the mean time of a decoded token and of a prefill, on windows held out, or else on all.
    """

    profile: Profile
    factors: dict[str, float]
    spread: dict[str, float]
    request_s: float
    requests: int
    windows: int
    held_out: int
    decode: Error
    prefill: Error


class _Window:
    """What came between two scrapes, as means.

    decode_s, prefill_s: of a token after the first, and of a request from the queue to its first token.
    """

    __slots__ = (
        "_met_share", "_own", "_plain", "_prefill", "_prefills_per_request", "_share", "decode_s", "prefill_s",
        "requests",
    )  # fmt: skip

    def __init__(self, totals: Totals, seconds: float, most_running: float) -> None:
        self.requests = totals.requests
        decoded = max(totals.output_tokens - totals.requests, 1.0)
        self.decode_s = totals.decode_s / decoded
        self.prefill_s = totals.prefill_s / totals.requests
        prompt, computed, output = (
            each / totals.requests for each in (totals.prompt_tokens, totals.computed_tokens, totals.output_tokens)
        )
        counted = totals.prefills
        prefills = _prefill_steps(totals, most_running) if np.isnan(counted) else min(max(counted, 1.0), totals.steps)
        # Little's law; requests come at any moment, so a prefill meets as many others as there are on average.
        met = min(totals.decode_s / seconds, decoded / prefills)
        beside = met if totals.is_mixed else 0.0
        per_step = totals.requests / prefills
        context = prompt + output / 2
        cached = prompt - computed
        pairs = computed * cached + _mean_square(totals, computed) / 2

        def prefill(requests: float) -> dict[str, float]:
            return {
                "sequences": beside + max(1.0, requests),
                "tokens": beside + computed * requests,
                "context_tokens": beside * context + max(1.0, requests) * cached,
                "pairs": beside * context + pairs * requests,
            }

        self._prefill, self._own = prefill(per_step), prefill(_beside_its_like(per_step))
        alone = max(decoded - prefills * beside, 0.0)
        running = max(1.0, alone / max(totals.steps - prefills, 1.0))
        self._plain = {
            "sequences": running,
            "tokens": running,
            "context_tokens": running * context,
            "pairs": running * context,
        }
        self._share = alone / decoded
        # Where prefill has steps of its own, those that decode wait for them, and get their token afterwards.
        self._met_share = 1 - self._share if totals.is_mixed else prefills * met / decoded
        self._prefills_per_request = max(1.0, 1.0 / per_step)

    def said(self, profile: Profile) -> tuple[float, float]:
        """Return what the mean times would be of an engine with this profile."""
        step_time = StepTime(profile)
        plain_s, prefill_s, own_s = (
            step_time.seconds(**step)  # type: ignore[arg-type]
            for step in (self._plain, self._prefill, self._own)
        )
        return self._share * plain_s + self._met_share * prefill_s, self._prefills_per_request * own_s


def fit_scrapes(scrapes: Sequence[tuple[float, Totals]], base: Profile, *, name: str = "") -> ScrapedFit:
    """Return the profile whose steps take the mean times that an engine's metrics pages say.

    scrapes: when each page was taken, in seconds, and what was counted until then; of one engine, in order.
    base: where to begin, and what is kept.  Raises InvalidInput for too few requests between them.
    """
    windows = _windows(scrapes)
    held_out = round(_HELD_OUT * len(windows)) if len(windows) >= _FEWEST_TO_HOLD_OUT else 0
    known = windows[: len(windows) - held_out]
    free = list(SPEEDS)
    while True:
        logs, spread = _solved(known, base, free)
        worst = int(np.argmax(spread))
        if spread[worst] <= _TOLD or len(free) == 1:
            break
        free.pop(worst)
    before_s = _before_s(scrapes)
    profile = _changed(base, free, logs)
    profile = msgspec.structs.replace(profile, request_s=before_s, name=name or f"{base.name}-fitted")
    judged = windows[len(windows) - held_out :] if held_out else windows
    said = np.array([window.said(profile) for window in judged])
    seen = np.array([(window.decode_s, window.prefill_s) for window in judged])
    weights = [window.requests for window in judged]
    return ScrapedFit(
        profile=profile,
        factors=dict(zip(free, np.exp(logs).tolist(), strict=True)),
        spread=dict(zip(free, spread.tolist(), strict=True)),
        request_s=before_s,
        requests=round(sum(window.requests for window in windows)),
        windows=len(windows),
        held_out=held_out,
        decode=_error(seen[:, 0], said[:, 0], weights),
        prefill=_error(seen[:, 1], said[:, 1], weights),
    )


def _windows(scrapes: Sequence[tuple[float, Totals]]) -> list[_Window]:
    most_running = max((each.running for _, each in scrapes), default=0.0)
    windows = []
    before_at, before = scrapes[0] if scrapes else (0.0, None)
    finished = 0.0
    for at, each in scrapes[1:]:
        assert before is not None
        since = each.since(before)
        if since.steps < 0 or since.requests < 0:
            # It began anew.
            before_at, before = at, each
            continue
        if since.requests >= LEAST_REQUESTS and _has_means(since) and at > before_at:
            windows.append(_Window(since, at - before_at, most_running))
            before_at, before = at, each
        finished = max(finished, since.requests)
    if not windows:
        raise InvalidInput(
            f"{len(scrapes)} scrapes with {finished:.0f} finished requests between them; at least two are needed, with "
            f"{LEAST_REQUESTS} requests of more than one token between them, whose prefill and decode took time, of "
            "one engine that was not started anew"
        )
    return windows


def _has_means(since: Totals) -> bool:
    """Whether times and tokens were counted from which means can be taken."""
    return since.output_tokens > since.requests and min(since.decode_s, since.prefill_s) > 0


def _before_s(scrapes: Sequence[tuple[float, Totals]]) -> float:
    """Return the mean time of a request before its queue, since the engine's start."""
    last = scrapes[-1][1]
    return max(0.0, (last.first_s - last.queue_s - last.prefill_s) / max(last.requests, 1.0))


def _prefill_steps(totals: Totals, most_running: float) -> float:
    """Return how many steps had prefill in them: those of more tokens than there are sequences that decode."""
    least = 2 * max(most_running, totals.output_tokens / max(totals.steps, 1.0), 1.0)
    bound = min((each for each in totals.sizes if each >= least), default=np.inf)
    larger = totals.steps - totals.sizes.get(bound, totals.steps)
    smaller = totals.prompts.get(min((each for each in totals.prompts if each >= bound), default=np.inf), 0.0)
    return min(max(larger + smaller, 1.0), totals.steps)


def _beside_its_like(per_step: float) -> float:
    """Return how many prefills are in the step of a request, where there are `per_step` in the mean one that has any.

    Steps gather what comes by chance: more come together than the mean, and as many more requests are among those.
    """
    others = 0.0
    for _ in range(_ROUNDS if per_step > 1.0 else 0):
        others = per_step * -np.expm1(-max(others, per_step - 1.0))
    return others + 1.0 if per_step > 1.0 else per_step


def _mean_square(totals: Totals, mean: float) -> float:
    """Return the mean of the squares of computed tokens, from the middles of the buckets that they fell into."""
    bounds = sorted(each for each in totals.prompts if each < np.inf)
    counts = np.diff([0.0, *(totals.prompts[each] for each in bounds)])
    middles = (np.array(bounds) + np.array([0.0, *bounds[:-1]])) / 2 if bounds else np.zeros(0)
    if not counts.sum() or not (counts * middles).sum():
        return mean * mean
    variation = (counts * middles**2).sum() * counts.sum() / (counts * middles).sum() ** 2
    return float(mean * mean * variation)


def _solved(windows: Sequence[_Window], base: Profile, free: Sequence[str]) -> tuple[Floats, Floats]:
    """Return the logarithms of the factors of `free`, and the spread of each factor."""
    from scipy.optimize import least_squares

    seen = np.log([(window.decode_s, window.prefill_s) for window in windows])

    def errors(logs: Floats) -> Floats:
        profile = _changed(base, free, logs)
        return (np.log([window.said(profile) for window in windows]) - seen).ravel()

    scatter = _LEAST_SCATTER
    for _ in range(3):
        found = least_squares(
            lambda logs, scatter=scatter: np.concatenate([errors(logs) / scatter, logs / _PRIOR]),
            np.zeros(len(free)),
            bounds=(-_MOST, _MOST),
            loss="soft_l1",
        )
        scatter = max(_LEAST_SCATTER, float(np.sqrt(np.median(errors(found.x) ** 2) / 0.455)))
    slopes = np.asarray(found.jac, np.float64)
    spread: Floats = 1.96 * np.sqrt(np.diag(np.linalg.inv(slopes.T @ slopes)))
    return np.asarray(found.x, np.float64), spread


def _changed(base: Profile, free: Sequence[str], logs: Floats) -> Profile:
    """Return the base with other speeds."""
    factors = dict.fromkeys(SPEEDS, 1.0) | dict(zip(free, np.exp(logs).tolist(), strict=True))
    return msgspec.structs.replace(
        base,
        flops_ratio=base.flops_ratio / factors["compute"],
        bytes_ratio=base.bytes_ratio / factors["memory"],
        overhead_s=base.overhead_s * factors["overhead"],
        sequence_s=base.sequence_s * factors["overhead"],
    )


def _error(seen: Floats, said: Floats, weights: Sequence[float]) -> Error:
    errors = np.abs(said / seen - 1.0)
    return Error(
        requests=round(sum(weights)),
        median=float(np.median(errors)),
        p90=float(np.percentile(errors, 90)),
        mean=float(np.average(said, weights=weights) / np.average(seen, weights=weights) - 1.0),
    )
