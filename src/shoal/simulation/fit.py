"""From what engines were seen to do to the coefficients of the model of them.

A model engine is sent what the real ones were sent, at the moments of its work at which they came there: so the steps
that it takes are about those that were.  The time of a request is a sum of steps, and that of a step of coefficients:
least squares on the relative errors of ttft and of the time of decoding, each weighed by its own scatter, with a loss
that far outliers do not rule; then again with the steps of what was found, until it stays.  Later requests of each
endpoint are held out and tell how well it fits.  Owns the method; what journals say of engines is `observed`'s, which
steps a request waits for is `enginerun`'s, the formula is `engine.steptime`'s.
"""

import math
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from shoal.engine import Profile
from shoal.kernel import InvalidInput
from shoal.simulation.enginerun import EngineRun, Guide, Steps
from shoal.simulation.observed import Seen, Served

Floats = npt.NDArray[np.float64]

COEFFICIENTS = ("token", "pair", "weights", "kv_token", "overhead", "sequence", "request")
"""What is fitted, in seconds: of computing a token, of a pair of token and context, of reading the weights, and a token
of KV, of each step, of each sequence in it, and of a request before it is in the queue."""

LEAST_REQUESTS = 40
_HELD_OUT = 0.3
# An answer of few tokens says more of the moment at which it came than of the step.
_LEAST_DECODED = 8
# Gaps between tokens are so long that what the clocks are off is a twentieth of them.  Clocks that are off by more than
# a hundredth of a second mix up between which tokens a step was; then gaps say nothing.
_LEAST_GAP_S, _MOST_GAP_S = 0.05, 0.25
_CLEAR = 20.0
_LEAST, _MOST = 1e-3, 50.0
_SHORTEST_S = 1e-5
_FEWEST_TO_COMPARE = 25
_LEAST_SCATTER, _MOST_SCATTER = 0.005, 0.3
# Of the squares of errors that are normal, in their variance.
_MEDIAN_OF_SQUARES = 0.455
# As much as one request that is off by a tenth of the scatter for a coefficient that is a unit away from where it
# began: rules only what no request says anything of.
_PRIOR = 0.1
_EQUAL = 0.05
_SAME_FACTOR = 0.005
_ROUNDS_OF_FACTORS = 4
_ROUNDS_OF_SCALE = 2
_MOST_ROUNDS = 10
_STAYED = 0.003


class Error(msgspec.Struct, frozen=True, kw_only=True):
    """How far the fitted model is from requests that it was not fitted to, as shares of what was measured.

    median, p90: of the absolute errors.  mean: of the model's mean against the measured one, negative when too small.
    """

    requests: int
    median: float
    p90: float
    mean: float


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """What was found.

    factors: of endpoints whose steps take that many times as long as the profile's.  fitted, held_out: requests.
    ttft, decode, e2e: errors on those held out.  spread: of each coefficient, half the width of its 95 % interval as a
    share of it; above 0.5 the traffic says little of it, and it stands near the base profile's.
    """

    profile: Profile
    factors: dict[str, float]
    fitted: int
    held_out: int
    ttft: Error | None
    decode: Error | None
    e2e: Error
    spread: dict[str, float]
    is_cached_told: bool


class _Part:
    """One endpoint: its requests, what was measured, and which of it is learned from.

    first, decode, last: places of the known times that teach; of the last token only where the first is not known.
    tokens_s: when first and last tokens came that teach, NaN for others.
    """

    __slots__ = (
        "decode",
        "decode_s",
        "factor",
        "first",
        "first_s",
        "is_held_out",
        "last",
        "last_s",
        "name",
        "run",
        "tokens_s",
    )

    def __init__(self, seen: Seen, most: int, block_size: int) -> None:
        served = [each for each in seen.served if each.prompt_tokens > 0][:most]
        self.name = seen.endpoint.id
        self.factor = 1.0
        self.run = EngineRun(served, seen.block_size or block_size)
        clean = np.array([each.is_clean for each in served])
        self.first_s = np.where(clean, _numbers(served, lambda each: each.ttft_s), np.nan)
        self.last_s = np.where(clean, _numbers(served, lambda each: each.total_s), np.nan)
        has_decoded = np.array([each.output_tokens >= _LEAST_DECODED for each in served])
        self.decode_s = np.where(has_decoded, self.last_s - self.first_s, np.nan)
        # Of those that teach: an endpoint whose later ones are all load would have nothing to be judged by.
        taught = np.cumsum(~np.isnan(self.last_s))
        self.is_held_out = taught - 1 >= (1 - _HELD_OUT) * taught[-1]
        has_first = ~np.isnan(self.first_s)
        self.first = np.flatnonzero(has_first & ~self.is_held_out)
        self.decode = np.flatnonzero(~np.isnan(self.decode_s) & ~self.is_held_out)
        self.last = np.flatnonzero(~np.isnan(self.last_s) & ~has_first & ~self.is_held_out)
        sent_s = np.array([each.sent_s - served[0].sent_s for each in served])
        sent_s[self.is_held_out] = np.nan
        self.tokens_s = sent_s + self.first_s, sent_s + self.last_s


def fit(
    seen: Sequence[Seen],
    base: Profile,
    *,
    most_requests: int = 1_500,
    name: str = "",
    progress: Callable[[float], None] | None = None,
) -> Fit:
    """Return the profile with which a model engine answers as these endpoints did; all are of one model and hardware.

    base: where to begin; its limits of a step (tokens, sequences) are taken as they are.  most_requests: of each
    endpoint's first ones so many in all are used.  progress: told of the share that is done (0 to 1), a guess.  Raises
    InvalidInput when there is too little to learn from.
    """
    busy = [each for each in seen if any(served.is_clean for served in each.served)]
    parts = [_Part(each, max(1, most_requests // max(1, len(busy))), base.block_size) for each in busy]
    learned = sum(int((~np.isnan(part.last_s) & ~part.is_held_out).sum()) for part in parts)
    if learned < LEAST_REQUESTS:
        raise InvalidInput(
            f"{learned} requests to learn from; at least {LEAST_REQUESTS} are needed that were answered at the first "
            "try, with their usage (clients ask for it with stream_options.include_usage; the pool does so by itself)"
        )
    if not any((~np.isnan(part.last_s) & part.is_held_out).any() for part in parts):
        raise InvalidInput(
            "every endpoint has too few requests to hold some of them out; give a longer journal, or more --requests"
        )
    told = _Told(progress)
    start = _rescaled(parts, _seconds_of(base), base, told)
    found, spread = _solved(parts, start, base, told)
    for _ in range(_ROUNDS_OF_FACTORS):
        if not _has_changed(parts, found, base):
            break
        found, spread = _solved(parts, found, base, told)
    profile = msgspec.structs.replace(_profile_of(found, base), name=name or f"{base.name}-fitted")
    return _judged(parts, profile, spread)


class _Told:
    """Counts calls of the model, to guess how much is done."""

    __slots__ = ("_calls", "_progress")

    def __init__(self, progress: Callable[[float], None] | None) -> None:
        self._progress = progress
        self._calls = 0

    def __call__(self) -> None:
        self._calls += 1
        if self._progress is not None:
            self._progress(min(1.0, self._calls / (_ROUNDS_OF_SCALE + _MOST_ROUNDS)))


# ---------------------------------------------------------------------- profiles as seconds


def _seconds_of(profile: Profile) -> Floats:
    flops_per_s = profile.peak_flops_per_s * profile.flops_ratio
    bytes_per_s = profile.peak_bytes_per_s * profile.bytes_ratio
    return np.array(
        [
            profile.flops_per_token / flops_per_s,
            profile.flops_per_pair / flops_per_s,
            profile.weight_bytes / bytes_per_s,
            profile.kv_bytes_per_token / bytes_per_s,
            profile.overhead_s,
            profile.sequence_s,
            profile.request_s,
        ]
    )


def seconds_of(profile: Profile) -> dict[str, float]:
    """Return the coefficients of a profile by their names."""
    return dict(zip(COEFFICIENTS, _seconds_of(profile).tolist(), strict=True))


def _units(seconds: Floats) -> Floats:
    """Return what to count each coefficient in: as large as it is, or as large as one is that is felt."""
    token, _, weights, *_ = seconds.tolist()
    return np.maximum(seconds, [token, token * 3e-5, weights, weights * 1e-6, weights / 10, weights / 200, 5e-3])


def _profile_of(seconds: Floats, base: Profile) -> Profile:
    """The base with other coefficients: the model's sizes stay, the shares of the peaks change."""
    token, pair, weights, kv_token, overhead, sequence, request = seconds.tolist()
    flops_per_s, bytes_per_s = base.flops_per_token / token, base.weight_bytes / weights
    return msgspec.structs.replace(
        base,
        flops_per_pair=pair * flops_per_s,
        flops_ratio=flops_per_s / base.peak_flops_per_s,
        kv_bytes_per_token=kv_token * bytes_per_s,
        stored_bytes_per_token=base.stored_bytes_per_token or base.kv_bytes_per_token,
        bytes_ratio=bytes_per_s / base.peak_bytes_per_s,
        overhead_s=overhead,
        sequence_s=sequence,
        request_s=request,
    )


# ---------------------------------------------------------------------- the search


def _rescaled(parts: Sequence[_Part], seconds: Floats, base: Profile, told: Callable[[], None]) -> Floats:
    """Bring compute and memory to about the right speed."""
    for _ in range(_ROUNDS_OF_SCALE):
        profile = _profile_of(seconds, base)
        firsts, decodes = [], []
        for part in parts:
            terms = part.run.steps(profile, guide=Guide()).terms(seconds)
            firsts.append(_ratios(part.first_s, terms.first @ seconds, part.first))
            decodes.append(_ratios(part.decode_s, terms.decode @ seconds, part.decode))
        told()
        first, decode = _median(np.concatenate(firsts)), _median(np.concatenate(decodes))
        seconds = seconds * np.array([first, first, *[decode or first] * 4, 1.0])
    return seconds


def _has_changed(parts: Sequence[_Part], seconds: Floats, base: Profile) -> bool:
    """Note who is slower or faster than the others; returns whether that is another than before."""
    ratios = []
    for part in parts:
        decode_s = part.run.steps(_profile_of(seconds, base), guide=Guide()).terms(seconds).decode @ seconds
        own = _ratios(part.decode_s, decode_s, part.decode)
        ratios.append(_median(own) if len(own) >= _FEWEST_TO_COMPARE else 1.0)
    middle, has_changed = _median(np.array(ratios)), False
    for part, ratio in zip(parts, ratios, strict=True):
        factor = ratio / middle if abs(ratio / middle - 1.0) > _EQUAL else 1.0
        has_changed |= abs(factor - part.factor) > _SAME_FACTOR
        part.factor = factor
    return has_changed


def _solved(parts: Sequence[_Part], start: Floats, base: Profile, told: Callable[[], None]) -> tuple[Floats, Floats]:
    """Return the seconds with the least squares, and the spread of each."""
    units = _units(start)
    begun = counts = np.clip(start / units, 2 * _LEAST, _MOST / 2)
    guide, least_gap_s = Guide(), math.inf
    for _ in range(_MOST_ROUNDS):
        profile = _profile_of(units * counts, base)
        steps = [part.run.steps(profile, part.factor, guide) for part in parts]
        squares = _Squares(parts, steps, units, begun, counts, least_gap_s)
        told()
        before, counts = counts, squares.solve(counts)
        guide, least_gap_s = squares.guide(counts), squares.clear_s(counts)
        if np.all(np.abs(counts - before) < _STAYED * np.maximum(counts, before)):
            break
    return units * counts, squares.spread(counts)


class _Squares:
    """The errors of all requests that teach, given the steps that each waited for.

    units: seconds that the coefficients are counted in.  begun: how many of them were the first guess.  counts: as
    of now.  least_gap_s: shorter gaps between tokens are not looked at.
    """

    __slots__ = ("_begun", "_gaps", "_parts", "_steps", "_units", "_weights")

    def __init__(
        self,
        parts: Sequence[_Part],
        steps: Sequence[Steps],
        units: Floats,
        begun: Floats,
        counts: Floats,
        least_gap_s: float,
    ) -> None:
        self._parts = parts
        self._steps = steps
        self._gaps = [
            each.gaps(*part.tokens_s, units * counts, least_gap_s) for part, each in zip(parts, steps, strict=True)
        ]
        self._units = units
        self._begun = begun
        self._weights: Floats = np.ones(0)

    def solve(self, counts: Floats) -> Floats:
        """Return the counts with the least squares, looked for from `counts` on."""
        from scipy.optimize import least_squares

        self._weights = self._weighed(counts)
        found = least_squares(
            lambda x: self._errors(x)[0],
            counts,
            jac=lambda x: self._errors(x)[1],
            bounds=(_LEAST, _MOST),
            loss="soft_l1",
        )
        return np.asarray(found.x, np.float64)

    def spread(self, counts: Floats) -> Floats:
        """Return half the width of the 95 % interval of each count as a share of it, from how far errors scatter."""
        errors, slopes = self._errors(counts)
        trust = 1.0 / np.sqrt(1.0 + errors**2)
        inverse = np.linalg.pinv(slopes.T @ (slopes * trust[:, None]))
        scatter = slopes * (errors * trust)[:, None]
        spread: Floats = 1.96 * np.sqrt(np.diag(inverse @ (scatter.T @ scatter) @ inverse)) / counts
        return spread

    def guide(self, counts: Floats) -> Guide:
        """Return how far off the times are that were seen."""
        logs, _, kinds, waits = self._logs(counts)
        first, decode, _ = (math.sqrt(max(0.0, _scatter(logs, waits, kinds == kind))) for kind in range(3))
        return Guide(first, decode)

    def clear_s(self, counts: Floats) -> float:
        """Return how long a gap between tokens must be to say something, infinite when none does."""
        seconds = self._units * counts
        off_s = [np.zeros(0)]
        for part, steps in zip(self._parts, self._steps, strict=True):
            gaps = steps.gaps(*part.tokens_s, seconds, _LEAST_GAP_S)
            off_s.append(np.abs(steps.terms(seconds, gaps).gaps @ seconds - gaps.seen_s))
        every_s = np.concatenate(off_s)
        clear_s = max(_LEAST_GAP_S, _CLEAR * float(np.median(every_s))) if len(every_s) else math.inf
        return clear_s if clear_s <= _MOST_GAP_S else math.inf

    def _errors(self, counts: Floats) -> tuple[Floats, Floats]:
        """Return errors in the sizes that they are expected to have, and their slopes."""
        logs, slopes, _, _ = self._logs(counts)
        own = _PRIOR * (counts - self._begun)
        return (
            np.concatenate([logs * self._weights, own]),
            np.concatenate([slopes * self._weights[:, None], _PRIOR * np.eye(len(counts))]),
        )

    def _weighed(self, counts: Floats) -> Floats:
        """Return one over the size that each error is expected to have: the scatter of its kind, and of its wait."""
        logs, _, kinds, waits = self._logs(counts)
        variances = waits**2
        for kind in np.unique(kinds):
            own = kinds == kind
            variances[own] += np.clip(_scatter(logs, waits, own), _LEAST_SCATTER**2, _MOST_SCATTER**2)
        return 1.0 / np.sqrt(variances)

    def _logs(self, counts: Floats) -> tuple[Floats, Floats, npt.NDArray[np.int64], Floats]:
        """Return the logarithms of said over seen, their slopes, kinds, and what chance does to each by a wait."""
        seconds = self._units * counts
        logs, slopes, kinds, waits = [], [], [], []
        for part, steps, gaps in zip(self._parts, self._steps, self._gaps, strict=True):
            terms = steps.terms(seconds, gaps)
            for kind, (places, seen_s, said, wait_s) in enumerate(
                (
                    (part.first, part.first_s, terms.first, terms.wait_s),
                    (part.decode, part.decode_s, terms.decode, np.zeros_like(terms.wait_s)),
                    (part.last, part.last_s, terms.first + terms.decode, terms.wait_s),
                    (np.arange(len(gaps.seen_s)), gaps.seen_s, terms.gaps, np.zeros_like(gaps.seen_s)),
                )
            ):
                said_s = np.maximum(said[places] @ seconds, _SHORTEST_S)
                least_s = np.maximum(seen_s[places], _SHORTEST_S)
                logs.append(np.log(said_s / least_s))
                slopes.append(said[places] * self._units / said_s[:, None])
                kinds.append(np.full(len(places), kind))
                # A step in progress ends at any moment of it: the deviation of what is even between two bounds.
                waits.append(wait_s[places] / least_s / np.sqrt(12.0))
        return np.concatenate(logs), np.concatenate(slopes), np.concatenate(kinds), np.concatenate(waits)


def _scatter(logs: Floats, waits: Floats, chosen: npt.NDArray[np.bool_]) -> float:
    """Return the variance of errors beyond that of the waits, as if they were normal; outliers do not rule it."""
    if not chosen.any():
        return 0.0
    return float(np.median(logs[chosen] ** 2) / _MEDIAN_OF_SQUARES - np.median(waits[chosen] ** 2))


# ---------------------------------------------------------------------- how well it fits


def _judged(parts: Sequence[_Part], profile: Profile, spread: Floats) -> Fit:
    seconds = _seconds_of(profile)
    pairs: dict[str, list[tuple[Floats, Floats]]] = {"ttft": [], "decode": [], "e2e": []}
    fitted = held_out = 0
    for part in parts:
        first_s, decode_s = part.run.times(profile, seconds, part.factor)
        is_known = ~np.isnan(part.last_s)
        fitted += int((is_known & ~part.is_held_out).sum())
        held_out += int((is_known & part.is_held_out).sum())
        for name, seen_s, said_s in (
            ("ttft", part.first_s, first_s),
            ("decode", part.decode_s, decode_s),
            ("e2e", part.last_s, first_s + decode_s),
        ):
            chosen = part.is_held_out & ~np.isnan(seen_s)
            pairs[name].append((seen_s[chosen], said_s[chosen]))
    e2e = _error(pairs["e2e"])
    assert e2e is not None, "`fit` holds some out"
    return Fit(
        profile=profile,
        factors={part.name: part.factor for part in parts if part.factor != 1.0},
        fitted=fitted,
        held_out=held_out,
        ttft=_error(pairs["ttft"]),
        decode=_error(pairs["decode"]),
        e2e=e2e,
        spread=dict(zip(COEFFICIENTS, spread.tolist(), strict=True)),
        is_cached_told=all(each.is_cached_told for part in parts for each in part.run.served if each.is_clean),
    )


def _error(pairs: Sequence[tuple[Floats, Floats]]) -> Error | None:
    seen = np.concatenate([one for one, _ in pairs])
    said = np.concatenate([other for _, other in pairs])
    if not len(seen):
        return None
    errors = np.abs(said / np.maximum(seen, 1e-6) - 1.0)
    return Error(
        requests=len(seen),
        median=float(np.median(errors)),
        p90=float(np.percentile(errors, 90)),
        mean=float(said.mean() / seen.mean() - 1.0),
    )


def _ratios(seen_s: Floats, said_s: Floats, places: npt.NDArray[np.intp]) -> Floats:
    return np.maximum(seen_s[places], _SHORTEST_S) / np.maximum(said_s[places], _SHORTEST_S)


def _median(values: Floats) -> float:
    return float(np.clip(np.median(values), 0.02, 50.0)) if len(values) else 1.0


def _numbers(served: Sequence[Served], read: Callable[[Served], float | None]) -> Floats:
    values = [read(each) for each in served]
    return np.array([np.nan if value is None else value for value in values], np.float64)
