"""`python -m bench.latency_models`: recursive least squares beside gradient boosting on the same requests.

Needs scikit-learn, which Shoal itself does not.  Both predict each request from what is known when it is sent, and
learn from the records that have come by then; boosting is fitted anew after every so many.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from bench.fleets import PREDICTING, Floats, sessions, two_kinds
from shoal.latency import Figure
from shoal.pool import Outcome
from shoal.routing.books import Flight
from shoal.routing.forecasts import Forecasts

REFIT_EVERY = 50
KEPT = 2_000


class Record(NamedTuple):
    """foreseen: figures when it was sent.  seen: with the tokens that were really prefilled.  ours_s: what we said."""

    foreseen: Floats
    seen: Floats
    ttft_s: float
    ours_s: float


def gather(seed: int, rate: float) -> list[Record]:
    """Run the fleet and keep what was predicted and learned, in the order of the records."""
    records: list[Record] = []
    learn: Callable[[Forecasts, Flight, Outcome], None] = Forecasts.learn

    def watched(self: Forecasts, flight: Flight, outcome: Outcome) -> None:
        noted = flight.noted
        assert noted is not None
        kind = float(noted.member.endpoint.id.startswith("v6e"))
        foreseen = np.append(noted.figures, kind)
        learn(self, flight, outcome)
        records.append(Record(foreseen, np.append(noted.figures, kind), outcome.ttft_s or 0.0, noted.forecast.ttft_s))

    setattr(Forecasts, "learn", watched)  # noqa: B010
    try:
        cluster, _ = two_kinds(PREDICTING, seed)
        cluster.run(sessions(np.random.default_rng(seed), 400, rate))
    finally:
        setattr(Forecasts, "learn", learn)  # noqa: B010
    return records


def boosted(records: list[Record], make: Callable[[], Any]) -> tuple[Floats, list[float], float]:
    """Return each request's error (NaN before the first fit), the CPU seconds of each fit, and those of 100 rows."""
    errors = np.full(len(records), np.nan)
    fits: list[float] = []
    model: Any = None
    predict_s = 0.0
    for start in range(0, len(records), REFIT_EVERY):
        following = records[start : start + REFIT_EVERY]
        if model is not None:
            rows = np.array([each.foreseen for each in following])
            measured = np.array([each.ttft_s for each in following])
            errors[start : start + len(rows)] = np.abs(np.exp(model.predict(rows)) / measured - 1.0)
            hundred = np.resize(rows, (100, len(Figure) + 1))
            began = time.process_time()
            model.predict(hundred)
            predict_s = time.process_time() - began
        seen = records[: start + REFIT_EVERY][-KEPT:]
        began = time.process_time()
        model = make().fit(np.array([each.seen for each in seen]), np.log([each.ttft_s for each in seen]))
        fits.append(time.process_time() - began)
    return errors, fits, predict_s


def main() -> None:
    """Print one line for each way and load."""
    from sklearn.ensemble import GradientBoostingRegressor, HistGradientBoostingRegressor

    parser = argparse.ArgumentParser(prog="bench.latency_models", description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="*", default=[3, 5])
    arguments = parser.parse_args()
    ways: dict[str, Callable[[], Any]] = {
        "gradient boosting": lambda: GradientBoostingRegressor(
            n_estimators=200, learning_rate=0.05, max_depth=4, subsample=0.8, loss="absolute_error", random_state=1
        ),
        "histogram boosting": lambda: HistGradientBoostingRegressor(
            max_iter=200, learning_rate=0.05, max_depth=6, min_samples_leaf=10, loss="absolute_error", random_state=1
        ),
    }
    for rate in (4.0, 8.0):
        for seed in arguments.seeds:
            records = gather(seed, rate)
            ours = np.array([abs(each.ours_s / each.ttft_s - 1.0) for each in records])
            _print("recursive least squares", rate, seed, ours, "")
            for name, make in ways.items():
                errors, fits, predict_s = boosted(records, make)
                cost = f"fit {max(fits) * 1e3:.0f} ms at most, 100 rows {predict_s * 1e6:.0f} us"
                _print(name, rate, seed, errors, cost)


def _print(name: str, rate: float, seed: int, errors: Floats, cost: str) -> None:
    spans = ((100, 300), (300, 600), (600, None))
    medians = ", ".join(f"{a} to {b or 'end'}: {np.nanmedian(errors[a:b]):.3f}" for a, b in spans)
    print(f"{name:24} {rate:g}/s seed {seed}  median error of requests {medians}  {cost}", flush=True)


if __name__ == "__main__":
    main()
