"""What is counted of predicted latency, under llm-d's names: predictions, what was measured, SLOs missed, errors.

Owns these families alone; that a request is over is told by `fold`.  How long predicting takes is not among them: the
core has no clock, and a bar of the benchmarks measures it.
"""

from shoal.measures.families import Counter, Family, Gauge, Histogram
from shoal.routing import Account, PoolStatus

PLUGIN = "predicted-latency-producer"
_LABELS = ("plugin_name", "plugin_type", "model_name", "target_model_name")
_TTFT_SECONDS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0, 15.0, 30.0, 60.0, 300.0,
)  # fmt: skip
_TPOT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.2, 0.5, 1.0)


class LatencyMetrics:
    """Families of requests whose latency was predicted."""

    def __init__(self) -> None:
        self.predicted_ttft = Histogram(
            "llm_d_epp_request_predicted_ttft_seconds", "Predicted time to first token.", _TTFT_SECONDS, _LABELS
        )
        self.predicted_tpot = Histogram(
            "llm_d_epp_request_predicted_tpot_seconds", "Predicted time per output token.", _TPOT_SECONDS, _LABELS
        )
        self.violations = Counter(
            "llm_d_epp_request_slo_violation", "Requests that missed what their client asked for.", (*_LABELS, "type")
        )
        self.measured = Gauge(
            "llm_d_epp_inference_request_metric", "The last measured value.", (*_LABELS, "type"), "max"
        )
        law = ("model_name", "kind", "type")
        self.error = Gauge(
            "shoal_latency_error_ratio", "Median of |predicted - measured| / measured, lately.", law, "max"
        )
        self.mape = Gauge("shoal_latency_mape_ratio", "Mean of the same.", law, "max")
        self.coverage = Gauge(
            "shoal_latency_coverage_ratio", "Share that stayed below the predicted 0.9 quantile.", law, "max"
        )
        self.trusted = Gauge("shoal_latency_trusted", "Workers that decide by the prediction.", law)

    def account(self, account: Account) -> None:
        """Count one request that is over."""
        forecast, outcome = account.forecast, account.outcome
        if forecast is None:
            return
        key = (PLUGIN, PLUGIN, account.model, account.target_model)
        self.predicted_ttft.observe(forecast.ttft_s, key)
        self.predicted_tpot.observe(forecast.tpot_s, key)
        if not account.is_streaming or outcome.ttft_s is None or outcome.status != 200:
            return
        tokens = outcome.completion_tokens or 0
        tpot_s = max(0.0, outcome.duration_s - outcome.ttft_s) / (tokens - 1) if tokens > 1 else None
        for what, seconds, slo_s in (
            ("ttft", outcome.ttft_s, forecast.slo_ttft_s),
            ("tpot", tpot_s, forecast.slo_tpot_s),
        ):
            if seconds is None:
                continue
            self.measured.set(seconds, (*key, what))
            if slo_s is not None and seconds > slo_s:
                self.violations.add((*key, what))

    def families(self, status: PoolStatus) -> list[Family]:
        """Every family; none where nothing is predicted."""
        gauges = (self.error, self.mape, self.coverage, self.trusted)
        for gauge in gauges:
            gauge.clear()
        for law in status.latency:
            key = (law.model, law.kind, law.what)
            for gauge, value in zip(
                gauges, (law.median_ratio, law.mape, law.coverage_ratio, float(law.is_trusted)), strict=True
            ):
                gauge.set(value, key)
        return [metric.family() for metric in vars(self).values()]
