"""What is counted of requests: a fold over events and commands, under llm-d's metric names where they mean the same.

Owns the families of requests and of the pool.  It keeps no request: all it needs stands in the events and commands.
"""

from collections.abc import Sequence

from shoal.measures.families import MAX_GATHERED, MAX_LABEL_SETS, OTHER, Counter, Family, Gauge, Histogram
from shoal.measures.latency import LatencyMetrics
from shoal.pool import EndpointState, Outcome, RefusalReason
from shoal.routing import Account, Arrived, Command, Event, Forward, PoolStatus, Refuse
from shoal.routing.commands import Evict, Hold, Waited
from shoal.routing.events import Evicted, Kept
from shoal.routing.status import FlowStatus

SECONDS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0, 15.0, 20.0, 30.0, 45.0,
    60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0,
)  # fmt: skip
DECISION_SECONDS = (0.00005, 0.0001, 0.0002, 0.0003, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
TPOT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.2, 0.5, 1.0)
BYTES = (64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0, 1048576.0, 4194304.0, 16777216.0, 67108864.0)
TOKENS = (1.0, 8.0, 32.0, 128.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0, 65536.0, 131072.0, 1048576.0)
# Signed: below zero the engine found more than was promised.
ERROR_BLOCKS = (-1024.0, -256.0, -64.0, -16.0, -4.0, -1.0, 1.0, 4.0, 16.0, 64.0, 256.0, 1024.0)
ERROR_BLOCK_TOKENS = 16
RATIOS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
REQUEST = ("model_name", "target_model_name", "fairness_id", "priority")
UNKNOWN_MODEL = "unknown"
DEFAULT_PRIORITY = "0"
_OUTCOMES = {
    RefusalReason.SATURATED: "RejectedCapacity",
    RefusalReason.NO_ENDPOINTS: "RejectedNoEndpoints",
    RefusalReason.TTL_EXPIRED: "EvictedTTL",
    RefusalReason.CLIENT_GONE: "EvictedContextCancelled",
}
"""llm-d's words for how a wait ended."""


class _Kind:
    """Lists on which the figures of requests with the same labels gather until they are counted together."""

    __slots__ = (
        "cached_tokens",
        "duration",
        "input_tokens",
        "output_tokens",
        "request_bytes",
        "response_bytes",
        "tpot",
        "ttft",
        "ttft_plain",
    )

    def __init__(self, fold: "Fold", key: tuple[str, ...]) -> None:
        self.duration = fold.duration.series(key).gathered
        self.request_bytes = fold.request_bytes.series(key).gathered
        self.response_bytes = fold.response_bytes.series(key).gathered
        self.input_tokens = fold.input_tokens.series(key).gathered
        self.output_tokens = fold.output_tokens.series(key).gathered
        self.cached_tokens = fold.cached_tokens.series(key).gathered
        self.ttft = fold.ttft.series((*key, "true")).gathered
        self.ttft_plain = fold.ttft.series((*key, "false")).gathered
        self.tpot = fold.tpot.series(key).gathered


class Fold:
    """Counts everything that goes in and out of a router."""

    def __init__(self, pool_name: str = "shoal") -> None:
        self._pool_name = pool_name
        counter, histogram = Counter, Histogram
        self.requests = counter("llm_d_epp_request", "Requests.", REQUEST)
        self.errors = counter("llm_d_epp_request_error", "Requests that failed.", (*REQUEST, "error_code"))
        self.duration = histogram("llm_d_epp_request_duration_seconds", "Arrival to last byte.", SECONDS, REQUEST)
        self.request_bytes = histogram("llm_d_epp_request_size_bytes", "Request bodies.", BYTES, REQUEST)
        self.response_bytes = histogram("llm_d_epp_response_size_bytes", "Response bodies.", BYTES, REQUEST)
        self.input_tokens = histogram("llm_d_epp_request_input_tokens", "Prompt tokens reported.", TOKENS, REQUEST)
        self.output_tokens = histogram(
            "llm_d_epp_request_output_tokens", "Completion tokens, reported or estimated.", TOKENS, REQUEST
        )
        self.cached_tokens = histogram(
            "llm_d_epp_request_cached_tokens", "Prompt tokens that the engine found in its cache.", TOKENS, REQUEST
        )
        self.ttft = histogram(
            "llm_d_epp_request_ttft_seconds", "Arrival to the first body byte.", SECONDS, (*REQUEST, "streaming")
        )
        self.tpot = histogram(
            "llm_d_epp_request_streaming_tpot_seconds", "Mean seconds per output token.", TPOT_SECONDS, REQUEST
        )
        self.decision = histogram("llm_d_epp_scheduler_e2e_duration_seconds", "Decision time.", DECISION_SECONDS)
        self.hit_ratio = histogram(
            "llm_d_epp_prefix_indexer_hit_ratio", "Share of the prompt expected in the cache.", RATIOS
        )
        self.cache_error = histogram(
            "shoal_cache_prediction_error_blocks",
            "Blocks of 16 tokens promised of the engine's cache, less those that it reports.",
            ERROR_BLOCKS,
        )
        self.attempts = counter(
            "llm_d_epp_scheduler_attempts",
            "Requests by who served them.",
            ("status", "target_model_name", "endpoint_name"),
        )
        self.predicted_cached = counter("shoal_predicted_cached_tokens", "Tokens the index expected in the cache.")
        self.reported_cached = counter("shoal_reported_cached_tokens", "Tokens the engines reported as cached.")
        self.estimated_tokens = counter("shoal_estimated_completion_tokens", "Completion tokens no engine reported.")
        self.moved = counter("shoal_request_moved", "Requests served by another endpoint than the chosen one.")
        self.retried = counter("shoal_request_retries", "Attempts beyond the first.")
        self.unrecorded = counter("shoal_request_unrecorded", "Requests whose record never came.")
        self.passed_unrouted = counter(
            "shoal_request_unrouted", "Requests that no picker saw (fail-open).", ("status",)
        )
        self.unplaced = counter("shoal_request_unplaced", "Requests left to the failure mode by a fault of the picker.")
        self.cut = counter("shoal_response_cut", "Answers that broke after they had begun.")
        self.client_gone = counter("shoal_client_gone", "Requests whose client left first.")
        self._flow_families()
        self._pool_gauges()
        self._latency = LatencyMetrics()
        self._cache_errors = self.cache_error.series().gathered
        self._histograms = [metric for metric in vars(self).values() if isinstance(metric, Histogram)]
        self._kinds: dict[tuple[str, ...], _Kind] = {}
        self._unsettled = 0

    def _flow_families(self) -> None:
        waited = ("fairness_id", "priority", "outcome", "inference_pool", "model_name", "target_model_name")
        self.queued = Histogram(
            "llm_d_epp_flow_control_request_queue_duration_seconds", "In the queue.", SECONDS, waited
        )
        self.waits = Counter(
            "llm_d_epp_flow_control_requests", "How waits ended.", ("outcome", "priority", "inference_pool")
        )
        self.evictions = Counter("shoal_evictions", "Running requests asked to give way.", ("result",))
        self.tenant_tokens = Counter("shoal_tenant_tokens", "Tokens by who used them.", ("fairness_id", "kind"))
        pool, band = ("inference_pool",), ("priority", "inference_pool")
        queue = ("fairness_id", "priority", "inference_pool")
        self.queue_size = Gauge("llm_d_epp_flow_control_queue_size", "Requests that wait.", queue)
        self.queue_bytes = Gauge("llm_d_epp_flow_control_queue_bytes", "Bytes that wait.", band)
        self.saturation = Gauge(
            "llm_d_epp_flow_control_pool_saturation", "Mean of the endpoints, 1 is full.", pool, "max"
        )
        self.band_requests = Gauge(
            "llm_d_epp_flow_control_capacity_utilization_requests", "Share of what may wait.", band, "max"
        )
        self.band_bytes = Gauge(
            "llm_d_epp_flow_control_capacity_utilization_bytes", "Share of the bytes that may wait.", band, "max"
        )
        self.all_requests = Gauge(
            "llm_d_epp_flow_control_global_capacity_utilization_requests", "Share of what may wait in all.", pool, "max"
        )
        self.all_bytes = Gauge(
            "llm_d_epp_flow_control_global_capacity_utilization_bytes", "Share of the bytes in all.", pool, "max"
        )

    def _pool_gauges(self) -> None:
        gauge, name = Gauge, ("name",)
        endpoint = ("name", "model_server_endpoint")
        self.running = gauge("llm_d_epp_request_running", "Requests in flight.", name)
        self.ready = gauge("llm_d_epp_ready_endpoints", "Endpoints that are offered requests.", name, "max")
        self.queue = gauge("llm_d_epp_per_endpoint_queue_size", "Waiting on the engine.", endpoint, "max")
        self.queue_mean = gauge("llm_d_epp_average_queue_size", "Mean of waiting.", name, "max")
        self.running_mean = gauge("llm_d_epp_average_running_requests", "Mean of running.", name, "max")
        self.kv_mean = gauge("llm_d_epp_average_kv_cache_utilization", "Mean of KV use.", name, "max")
        self.index_entries = gauge("llm_d_epp_prefix_indexer_size", "Blocks in the index.", ("plugin_name",))
        self.inflight = gauge("llm_d_epp_inflight_requests", "In flight by endpoint.", ("endpoint_name",))
        self.inflight_tokens = gauge(
            "llm_d_epp_inflight_tokens", "Uncached prompt tokens in flight by endpoint.", ("endpoint_name",)
        )
        self.open = gauge("shoal_flights_open", "Requests with an open booking or a missing record.")
        self.index_bytes = gauge("shoal_index_bytes", "Bytes of the prefix index in use.")
        self.index_budget = gauge("shoal_index_budget_bytes", "Byte budget of the prefix index.")
        self.exact_bytes = gauge("shoal_exact_index_bytes", "Bytes of the exact index in use.")
        self.exact_budget = gauge("shoal_exact_index_budget_bytes", "Byte budget of the exact index, 0 without one.")
        self.endpoint_state = gauge("shoal_endpoint_up", "1 while offered.", ("endpoint_name", "state"), "max")
        self.endpoint_requests = Counter("shoal_endpoint_requests", "Requests sent, by endpoint.", ("endpoint_name",))
        self.endpoint_failures = Counter("shoal_endpoint_failures", "Failures, by endpoint.", ("endpoint_name",))
        self.expected = gauge("shoal_sessions_expected", "Sessions that said they will be back.")
        self.returns = Counter("shoal_session_returns", "What was done for sessions that will be back.", ("result",))
        self.orphans = Counter("shoal_record_orphans", "Records of requests that this picker does not know.")

    def observe(self, event: Event, commands: Sequence[Command]) -> None:
        """Count one step of the router."""
        key = ("", "", "", DEFAULT_PRIORITY)
        if type(event) is Arrived:
            request = event.request
            model, priority = request.model, DEFAULT_PRIORITY
            for command in commands:
                if isinstance(command, Forward | Refuse | Hold) and command.request_id == request.id:
                    priority = str(command.priority)
                if type(command) is Refuse and command.refusal.reason is RefusalReason.MODEL_NOT_FOUND:
                    # Names that clients invent are one label, or they would use up the label sets of the real ones.
                    model = UNKNOWN_MODEL
            key = (model, model, request.tenant_id, priority)
            self.requests.add(key)
            self._kind(key).request_bytes.append(request.body_bytes)
            self._unsettled += 1
            if self._unsettled >= MAX_GATHERED:
                self._settle()
        elif type(event) is Evicted or type(event) is Kept:
            self.evictions.add(("requeued" if type(event) is Evicted else "kept",))
        for command in commands:
            if type(command) is Account:
                self._account(command)
            elif type(command) is Refuse:
                self._refused(command, key)
            elif type(command) is Forward:
                if command.waited is not None:
                    self._waited(command.waited, "Dispatched")
            elif type(command) is Evict:
                self.evictions.add(("asked",))

    def _refused(self, command: Refuse, key: tuple[str, ...]) -> None:
        reason, waited = command.refusal.reason, command.waited
        if waited is not None:
            key = (waited.model, waited.target_model, waited.tenant_id, str(waited.priority))
            self._waited(waited, _OUTCOMES.get(reason, "RejectedOther"))
        if reason is not RefusalReason.CLIENT_GONE:
            self.errors.add((*key, str(reason)))

    def _waited(self, waited: Waited, outcome: str) -> None:
        priority, pool = str(waited.priority), self._pool_name
        self.waits.add((outcome, priority, pool))
        key = (waited.tenant_id, priority, outcome, pool, waited.model, waited.target_model)
        self.queued.observe(waited.queue_s, key)

    def _kind(self, key: tuple[str, ...]) -> "_Kind":
        """Where the figures of one kind of request gather."""
        kind = self._kinds.get(key)
        if kind is None:
            if len(self._kinds) >= MAX_LABEL_SETS:
                key = (OTHER,) * len(key)
            kind = self._kinds.setdefault(key, _Kind(self, key))
        return kind

    def _settle(self) -> None:
        """Count what has gathered; every so many requests, whether or not anybody reads."""
        self._unsettled = 0
        for histogram in self._histograms:
            histogram.settle()

    def refused_at_door(self, reason: RefusalReason) -> None:
        """Count a refusal that the host gave before the router was asked: no key, too large, unreadable."""
        self.requests.add(("", "", "", DEFAULT_PRIORITY))
        self.errors.add(("", "", "", DEFAULT_PRIORITY, str(reason)))

    def unrouted(self, outcome: Outcome) -> None:
        """Count a request that passed without any picker (fail-open)."""
        self.passed_unrouted.add((str(outcome.status),))

    def _account(self, account: Account) -> None:
        outcome = account.outcome
        if not account.is_recorded:
            self.unrecorded.add()
            return
        if account.forecast is not None:
            self._latency.account(account)
        key = (account.model, account.target_model, account.tenant_id, str(account.priority))
        self._use(account)
        kind = self._kind(key)
        ttft_s, status = outcome.ttft_s, outcome.status
        kind.duration.append(outcome.duration_s)
        kind.response_bytes.append(outcome.response_bytes)
        self.attempts.add((str(status), account.target_model, account.endpoint_id))
        if ttft_s is not None:
            (kind.ttft if account.is_streaming else kind.ttft_plain).append(ttft_s)
        if outcome.prompt_tokens is not None:
            kind.input_tokens.append(outcome.prompt_tokens)
        if account.prompt_tokens:
            self._predicted(account.predicted_cached_tokens, account.prompt_tokens)
        if outcome.cached_tokens is not None:
            kind.cached_tokens.append(outcome.cached_tokens)
            if outcome.cached_tokens:
                self.reported_cached.add(amount=outcome.cached_tokens)
            if not account.is_moved:
                error_tokens = account.predicted_cached_tokens - outcome.cached_tokens
                self._cache_errors.append(error_tokens / ERROR_BLOCK_TOKENS)
        if outcome.completion_tokens is not None:
            self._output(account, kind, outcome.completion_tokens)
        if (
            account.is_moved
            or outcome.attempts > 1
            or status >= 400
            or outcome.is_cut
            or outcome.is_client_gone
            or outcome.is_upstream_failure
        ):
            self._faults(account, key)
        self._unsettled += 1

    def _use(self, account: Account) -> None:
        """Add up what a tenant used, of answers that were cut too; what the engine did not say is the estimate."""
        outcome = account.outcome
        if not outcome.is_charged:
            return
        prompt, cached = outcome.prompt_tokens, outcome.cached_tokens
        for kind, tokens in (
            ("prompt", account.prompt_tokens if prompt is None else prompt),
            ("cached", account.predicted_cached_tokens if prompt is None and cached is None else cached),
            ("completion", outcome.completion_tokens),
        ):
            if tokens:
                self.tenant_tokens.add((account.tenant_id, kind), tokens)

    def _predicted(self, cached: int, tokens: int) -> None:
        if cached:
            self.predicted_cached.add(amount=cached)
        self.hit_ratio.observe(cached / tokens)

    def _output(self, account: Account, kind: "_Kind", tokens: int) -> None:
        outcome = account.outcome
        kind.output_tokens.append(tokens)
        if outcome.is_estimated:
            self.estimated_tokens.add(amount=tokens)
        if account.is_streaming and tokens > 1 and outcome.ttft_s is not None:
            kind.tpot.append(max(0.0, outcome.duration_s - outcome.ttft_s) / (tokens - 1))

    def _faults(self, account: Account, key: tuple[str, ...]) -> None:
        outcome = account.outcome
        if account.is_moved:
            self.moved.add()
        if outcome.attempts > 1:
            self.retried.add(amount=outcome.attempts - 1)
        if outcome.is_cut:
            self.cut.add()
        if outcome.is_client_gone:
            self.client_gone.add()
        if outcome.is_cut or outcome.is_upstream_failure or outcome.status >= 400:
            self.errors.add((*key, "cut" if outcome.is_cut else str(outcome.status)))

    def families(self, status: PoolStatus) -> list[Family]:
        """Every family, the gauges of the pool taken from `status`."""
        self._take(status)
        metrics = [metric for metric in vars(self).values() if isinstance(metric, Counter | Gauge | Histogram)]
        return [metric.family() for metric in metrics] + self._latency.families(status)

    def _take_flow(self, flow: FlowStatus) -> None:
        pool = self._pool_name
        for gauge in (self.queue_size, self.queue_bytes, self.band_requests, self.band_bytes):
            gauge.clear()
        if not flow.is_on:
            return
        self.saturation.set(flow.saturation, (pool,))
        if flow.max_requests:
            self.all_requests.set(flow.requests / flow.max_requests, (pool,))
        if flow.max_bytes:
            self.all_bytes.set(flow.size_bytes / flow.max_bytes, (pool,))
        for band in flow.bands:
            priority = str(band.priority)
            named = sum(band.tenants.values())
            tenants = {**band.tenants, **({OTHER: band.requests - named} if band.requests > named else {})}
            # An autoscaler has to see that nothing waits as well.
            for tenant, requests in (tenants or {"": 0}).items():
                self.queue_size.set(requests, (tenant, priority, pool))
            self.queue_bytes.set(band.size_bytes, (priority, pool))
            if band.max_requests:
                self.band_requests.set(band.requests / band.max_requests, (priority, pool))
            if band.max_bytes:
                self.band_bytes.set(band.size_bytes / band.max_bytes, (priority, pool))

    def _take(self, status: PoolStatus) -> None:
        name = (self._pool_name,)
        offered = [e for e in status.endpoints if e.state in (EndpointState.READY, EndpointState.HALF_OPEN)]
        self._take_flow(status.flow)
        self.running.set(status.inflight, name)
        self.ready.set(len(offered), name)
        self.open.set(status.unclosed)
        self.orphans.stand_at(status.orphan_records)
        self.expected.set(status.returns.expected)
        for result in ("kept", "spared", "lost"):
            self.returns.stand_at(getattr(status.returns, result), (result,))
        self.index_entries.set(status.index_entries, ("approx-prefix-cache-producer",))
        if status.exact_budget_bytes:
            self.index_entries.set(status.exact_entries, ("precise-prefix-cache-producer",))
        self.exact_bytes.set(status.exact_bytes)
        self.exact_budget.set(status.exact_budget_bytes)
        self.index_bytes.set(status.index_bytes)
        self.index_budget.set(status.index_budget_bytes)
        for gauge, values in (
            (self.queue_mean, [e.waiting for e in offered]),
            (self.running_mean, [e.running for e in offered]),
            (self.kv_mean, [e.kv_usage_ratio for e in offered]),
        ):
            seen = [value for value in values if value is not None]
            gauge.set(sum(seen) / len(seen) if seen else float("nan"), name)
        for gauge in (
            self.queue, self.inflight, self.inflight_tokens, self.endpoint_state,
        ):  # fmt: skip
            gauge.clear()
        for endpoint in status.endpoints:
            waiting = float("nan") if endpoint.waiting is None else endpoint.waiting
            self.queue.set(waiting, (self._pool_name, endpoint.id))
            self.inflight.set(endpoint.inflight_requests, (endpoint.id,))
            self.inflight_tokens.set(endpoint.inflight_uncached_tokens, (endpoint.id,))
            self.endpoint_state.set(float(endpoint in offered), (endpoint.id, str(endpoint.state)))
            self.endpoint_requests.stand_at(endpoint.requests_total, (endpoint.id,))
            self.endpoint_failures.stand_at(endpoint.failures_total, (endpoint.id,))
