"""One linear law from figures to seconds, learned record by record: recursive least squares with forgetting.

Owns the coefficients and their uncertainty.  Which figures there are is `features`; how one machine differs from its
kind is `scale`.
"""

from collections import deque

import numpy as np

from shoal.latency.features import Features, Floats

# One record's weight after n later ones is FORGETTING**n: half is forgotten after 230 records.
FORGETTING = 0.997
# A record further off than this share of what was expected counts as this far: a stall is no law.
MAX_SURPRISE = 0.5
# When so many records in a row are in their middle further off than this, the law has changed and is learned anew.
RUN = 12
CHANGED = 0.2
# How uncertain a law is that was taken over from another model or kind, against one never learned.
INHERITED_SPREAD = 0.5


class Curve:
    """seconds = figures . coefficients, no coefficient below 0: more work never makes an engine faster.

    Errors count relative to the time itself, so that short waits are learned as well as long ones.  A law that is
    learned costs a few dozen microseconds a record, so it needs no process of its own.
    """

    __slots__ = ("_covariance", "_features", "_most", "_recent", "coefficients", "records")

    def __init__(self, features: Features, parent: "Curve | None" = None) -> None:
        self._features = features
        self.records = 0
        self._most = features.spread**2
        self._recent: deque[float] = deque(maxlen=RUN)
        if parent is None:
            self.coefficients: Floats = features.prior.copy()
            self._covariance: Floats = np.diag(self._most)
        else:
            self.coefficients = parent.coefficients.copy()
            reach = np.maximum(parent.coefficients, 0.1 * features.spread) * INHERITED_SPREAD
            self._covariance = np.diag(np.minimum(reach**2, self._most))

    def predict(self, figures: Floats) -> float:
        """Return the seconds of one request.  figures: in their units, one each."""
        return max(float(np.add.reduce(figures * self.coefficients)), self._features.floor_s)

    def learn(self, figures: Floats, seconds: float) -> None:
        """Take in that a request of these figures took `seconds`; what is not finite or not positive is ignored."""
        if not (0.0 < seconds < 86_400.0 and np.isfinite(figures).all()):
            return
        self.records += 1
        weight = (self.predict(figures) * max(seconds, self._features.floor_s)) ** -0.5
        scaled = figures * weight
        surprise = seconds * weight - float(np.add.reduce(scaled * self.coefficients))
        # Sums in one order on every machine, so that a journal replays to the same figures; it is symmetric.
        reach = np.add.reduce(self._covariance * scaled[:, None])
        gain = reach / (FORGETTING + float(np.add.reduce(scaled * reach)))
        surprise = min(max(surprise, -MAX_SURPRISE), MAX_SURPRISE)
        self._recent.append(abs(surprise))
        self.coefficients = np.maximum(self.coefficients + gain * surprise, 0.0)
        self._covariance = (self._covariance - np.multiply.outer(gain, reach)) / FORGETTING
        if len(self._recent) == RUN and sorted(self._recent)[RUN // 2] > CHANGED:
            self._covariance = np.diag(self._most)
            self._recent.clear()
        else:
            self._bound()

    def _bound(self) -> None:
        """Keep what no record has told anything about as certain as it was at first: forgetting would blow it up."""
        variances = self._covariance.diagonal()
        if (variances > self._most).any():
            shrink = np.sqrt(np.minimum(self._most / np.maximum(variances, 1e-30), 1.0))
            self._covariance *= np.multiply.outer(shrink, shrink)
