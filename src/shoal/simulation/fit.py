"""From what engines were seen to do to the coefficients of the model of them.

A model engine is sent what the real ones were sent, and its coefficients are changed until it answers when they did:
least squares on the relative errors of ttft and of the time of decoding, with a loss that far outliers do not rule.
Later requests of each endpoint are held out and tell how well it fits.  Owns the method; what journals say of engines
is `observed`'s, the formula is `engine.steptime`'s.
"""

from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import numpy as np
import numpy.typing as npt

from shoal.engine import Profile
from shoal.kernel import InvalidInput
from shoal.simulation.enginerun import EngineRun
from shoal.simulation.observed import Seen, Served

Floats = npt.NDArray[np.float64]

COEFFICIENTS = ("token", "pair", "weights", "kv_token", "overhead", "sequence", "request")
"""What is fitted, in seconds: of computing a token, of a pair of token and context, of reading the weights, and a token
of KV, of each step, of each sequence in it, and of a request before it is in the queue."""

LEAST_REQUESTS = 40
_HELD_OUT = 0.3
# An answer of few tokens says more of the moment at which it came than of the step.
_LEAST_DECODED = 8
_LEAST, _MOST = 1e-3, 50.0
_STEP = 0.1
# At a busy engine a first token comes up to a step sooner or later by chance: only means of so many are compared.
_TOGETHER = 25
# The time of decoding has in it which prefills of others just fell into it; a first token, or the mean of many, less.
_WEIGHT_FIRST = 3.0
_OUTLIER = 0.1
# As much as one request that is off by a hundredth for a coefficient that is a unit away from where it began: rules
# only what no request says anything of.
_PRIOR = 0.01
_EQUAL = 0.05
_ROUNDS = 3
_LIMIT_OF_CALLS = 12


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
    """One endpoint: its requests, which of them are learned from, and what was measured."""

    __slots__ = ("computed", "decode_s", "factor", "first_s", "is_alone", "is_held_out", "last_s", "name", "run")

    def __init__(self, seen: Seen, most: int, block_size: int) -> None:
        served = [each for each in seen.served if each.prompt_tokens > 0][:most]
        self.name = seen.endpoint.id
        self.factor = 1.0
        self.run = EngineRun(served, seen.block_size or block_size)
        clean = np.array([each.is_clean for each in served])
        self.first_s = np.where(clean, _numbers(served, lambda each: each.ttft_s), np.nan)
        self.last_s = np.where(clean, _numbers(served, lambda each: each.total_s), np.nan)
        self.computed = np.array([max(1, each.prompt_tokens - each.cached_tokens) for each in served])
        self.is_alone = _alone(served)
        has_decoded = np.array([each.output_tokens >= _LEAST_DECODED for each in served])
        self.decode_s = np.where(has_decoded, self.last_s - self.first_s, np.nan)
        # Of those that teach: an endpoint whose later ones are all load would have nothing to be judged by.
        taught = np.cumsum(~np.isnan(self.last_s))
        self.is_held_out = taught - 1 >= (1 - _HELD_OUT) * taught[-1]


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
    if _has_unequal(parts, _profile_of(found, base)):
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
            most = _ROUNDS + _LIMIT_OF_CALLS * (1 + len(COEFFICIENTS))
            self._progress(min(1.0, self._calls / most))


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
    for _ in range(_ROUNDS):
        profile = _profile_of(seconds, base)
        firsts, decodes = [], []
        for part in parts:
            first_s, decode_s = part.run.times(profile, part.factor)
            known = ~part.is_held_out
            firsts.append(_ratios(part.first_s, first_s, known))
            decodes.append(_ratios(part.decode_s, decode_s, known))
        told()
        first, decode = _median(np.concatenate(firsts)), _median(np.concatenate(decodes))
        seconds = seconds * np.array([first, first, *[decode or first] * 4, 1.0])
    return seconds


def _has_unequal(parts: Sequence[_Part], profile: Profile) -> bool:
    """Note who is slower or faster than the others; returns whether anybody is."""
    ratios = []
    for part in parts:
        _, decode_s = part.run.times(profile)
        own = _ratios(part.decode_s, decode_s, ~part.is_held_out)
        ratios.append(_median(own) if len(own) >= _TOGETHER else 1.0)
    middle = _median(np.array(ratios))
    for part, ratio in zip(parts, ratios, strict=True):
        part.factor = ratio / middle if abs(ratio / middle - 1.0) > _EQUAL else 1.0
    return any(part.factor != 1.0 for part in parts)


def _solved(parts: Sequence[_Part], start: Floats, base: Profile, told: Callable[[], None]) -> tuple[Floats, Floats]:
    """Return the seconds with the least squares, and the spread of each."""
    from scipy.optimize import least_squares

    units = _units(start)
    begun = np.clip(start / units, 2 * _LEAST, _MOST / 2)
    errors = partial(_errors, parts, units, begun, base, told)
    found = least_squares(
        errors,
        begun,
        jac=partial(_slopes, errors),
        bounds=(_LEAST, _MOST),
        loss="soft_l1",
        f_scale=_OUTLIER,
        xtol=1e-3,
        ftol=1e-2,
        max_nfev=_LIMIT_OF_CALLS,
    )
    residuals = found.fun[: -len(start)]
    noise = max(1e-3, float(np.median(np.abs(residuals)) * 1.4826))
    slopes = np.asarray(found.jac, np.float64)
    information = slopes.T @ slopes / noise**2
    spread = 1.96 * np.sqrt(np.diag(np.linalg.pinv(information))) / found.x
    return units * found.x, spread


def _errors(
    parts: Sequence[_Part], units: Floats, begun: Floats, base: Profile, told: Callable[[], None], counts: Floats
) -> Floats:
    """Return the errors with so many units of each coefficient."""
    profile = _profile_of(units * counts, base)
    errors = []
    for part in parts:
        first_s, decode_s = part.run.times(profile, part.factor)
        known = ~part.is_held_out
        errors.append(_WEIGHT_FIRST * _relative(part.first_s, first_s, known & part.is_alone))
        busy = known & ~part.is_alone & ~np.isnan(part.first_s)
        errors.append(_WEIGHT_FIRST * _together(part.computed[busy], part.first_s[busy], first_s[busy]))
        errors.append(_relative(part.decode_s, decode_s, known))
        without_first = known & np.isnan(part.first_s)
        errors.append(_relative(part.last_s, first_s + decode_s, without_first))
    told()
    return np.concatenate([*errors, _PRIOR * (counts - begun)])


def _together(computed: npt.NDArray[np.int64], seen_s: Floats, said_s: Floats) -> Floats:
    """Return the errors of the means of requests that computed about as many tokens of their prompts."""
    order = np.argsort(computed, kind="stable")
    groups = np.array_split(order, max(1, len(order) // _TOGETHER)) if len(order) else []
    return np.array([np.log(max(said_s[group].mean(), 1e-5) / max(seen_s[group].mean(), 1e-5)) for group in groups])


def _slopes(errors: Callable[[Floats], Floats], counts: Floats) -> Floats:
    """Differences over steps that are wide enough for a model whose answers jump where a request just misses a step."""
    here = errors(counts)
    columns = []
    for place, count in enumerate(counts.tolist()):
        there = counts.copy()
        there[place] += _STEP * max(1.0, count)
        columns.append((errors(there) - here) / (there[place] - count))
    return np.stack(columns, axis=1)


# ---------------------------------------------------------------------- how well it fits


def _judged(parts: Sequence[_Part], profile: Profile, spread: Floats) -> Fit:
    pairs: dict[str, list[tuple[Floats, Floats]]] = {"ttft": [], "decode": [], "e2e": []}
    fitted = held_out = 0
    for part in parts:
        first_s, decode_s = part.run.times(profile, part.factor)
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


def _alone(served: Sequence[Served]) -> npt.NDArray[np.bool_]:
    """Return which requests came when their engine had nothing to do; those wait for no step."""
    alone, busy_until = [], -np.inf
    for each in served:
        alone.append(each.sent_s > busy_until)
        known = [at for at in (each.ended_s, each.left_s, each.sent_s + (each.total_s or 0.0)) if at is not None]
        busy_until = max(busy_until, *known)
    return np.array(alone)


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


def _relative(seen_s: Floats, said_s: Floats, chosen: npt.NDArray[np.bool_]) -> Floats:
    chosen = chosen & ~np.isnan(seen_s)
    return np.log(np.maximum(said_s[chosen], 1e-5) / np.maximum(seen_s[chosen], 1e-5))


def _ratios(seen_s: Floats, said_s: Floats, chosen: npt.NDArray[np.bool_]) -> Floats:
    return np.exp(-_relative(seen_s, said_s, chosen))


def _median(values: Floats) -> float:
    return float(np.clip(np.median(values), 0.02, 50.0)) if len(values) else 1.0


def _numbers(served: Sequence[Served], read: Callable[[Served], float | None]) -> Floats:
    values = [read(each) for each in served]
    return np.array([np.nan if value is None else value for value in values], np.float64)
