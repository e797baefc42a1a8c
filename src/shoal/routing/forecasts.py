"""Predicted latency in the router: figures from its books, laws per kind of machine, and how well they did.

Owns which endpoints share a law (those with the same labels for the same model), what is noted of a request when it is
sent, and what its record teaches.  The laws themselves are `latency`; what is made of a prediction is `scheduling`.
Nothing here reads how long an answer will be: only the records of requests that are over say it.
"""

from collections.abc import Callable

import numpy as np

from shoal.latency import TPOT, TTFT, UNITS, Curve, Errors, Figure, Scale, Turn, Turns
from shoal.pool import Outcome, Request
from shoal.pool.outcome import Forecast
from shoal.prefix import Match
from shoal.prefix.hashing import REACH, Blocks, hashes_within
from shoal.routing.books import Flight
from shoal.routing.fleet import Fleet, Floats, Member
from shoal.routing.laws import Board, Law, Noted, Prediction
from shoal.routing.models import ModelTable
from shoal.routing.status import LatencyStatus
from shoal.scheduling.producers import PredictedLatencyProducer
from shoal.scheduling.slo import SLO_TPOT_HEADER, SLO_TTFT_HEADER, slo_s

# Below this many output tokens the mean time per token says more about the network than about decoding.
MIN_TPOT_TOKENS = 5
# Engines cache whole blocks; 16 tokens is what most of them use.
CACHE_BLOCK_TOKENS = 16
MAX_LAWS = 256
# Before its law rests on so many records, no machine is said to differ from it.
SETTLED_RECORDS = 40

Key = tuple[str, str]
"""(model, kind of machine)."""


class Forecasts:
    """Predictions for the requests of one router.  settings: None turns it off; what was learned stays."""

    __slots__ = (
        "_boards", "_fleet", "_generation", "_kept", "_laws", "_models", "_ratios", "_scales", "_settings",
        "_strictest", "_turns",
    )  # fmt: skip

    def __init__(self, settings: PredictedLatencyProducer | None, fleet: Fleet, models: ModelTable) -> None:
        self._settings = settings
        self._fleet = fleet
        self._models = models
        self._laws: dict[Key, Law] = {}
        self._scales: dict[tuple[str, str], tuple[Scale, Scale]] = {}
        self._boards: dict[str, Board] = {}
        self._generation = -1
        # By model: the engine's tokens over estimated ones, and how much of an answer comes back.
        self._ratios: dict[str, float] = {}
        self._kept: dict[str, float] = {}
        self._turns = Turns()
        self._strictest: dict[str, dict[str, float]] = {}

    @property
    def is_on(self) -> bool:
        """Whether anybody reads predictions."""
        return self._settings is not None

    @property
    def is_shown(self) -> bool:
        """Whether predictions are given to plugins, or only made and judged."""
        return self._settings is not None and self._settings.predict_in_produce

    def configure(self, settings: PredictedLatencyProducer | None) -> None:
        """Go on with other settings."""
        self._settings = settings
        self._generation = -1

    # ------------------------------------------------------------------ predicting

    def predict(
        self, request: Request, column: Callable[[str], Floats], match: Match | None, blocks: Blocks
    ) -> Prediction:
        """Predict for every row.  column: a column of the books by name.  blocks: the prompt's hashes."""
        model = self._base(request.model)
        board = self._board(model)
        figures, tokens = board.figures, float(request.prompt_tokens)
        held, own = column("matched_tokens"), figures[Figure.OWN_TOKENS]
        np.subtract(tokens, held, out=own)
        np.maximum(own, 1.0, out=own)
        turn = self._apply_turn(request, model, match, blocks, own)
        # Own tokens look at all before them: the held ones, and on average half of their own.
        pairs = figures[Figure.ATTENTION_PAIRS]
        np.multiply(own, -0.5, out=pairs)
        pairs += tokens
        pairs *= own
        np.divide(column("inflight_prefill_s"), column("prefill_s_per_token"), out=figures[Figure.AHEAD_TOKENS])
        figures[Figure.INFLIGHT_REQUESTS] = column("inflight_requests")
        figures[Figure.INFLIGHT_OUTPUT_TOKENS] = column("inflight_output_tokens")
        # NaN is unknown: an engine that does not say it waits is judged by the books alone.
        np.fmax(column("kv_usage"), 0.0, out=figures[Figure.KV_USAGE])
        np.fmax(column("waiting"), 0.0, out=figures[Figure.WAITING])
        figures[Figure.CONTEXT_TOKENS] = tokens
        return Prediction(model, board, turn)

    def _apply_turn(
        self, request: Request, model: str, match: Match | None, blocks: Blocks, own: Floats
    ) -> Turn | None:
        """Set what is left to prefill behind an earlier turn, where that is known; returns that turn."""
        if match is None or not match.runs:
            return None
        deepest = hashes_within(int(match.blocks.max()))
        if not 0 < deepest <= len(blocks):
            return None
        turn = self._turns.find(request.session_id, int(blocks[deepest - 1]))
        member = None if turn is None else self._fleet.get(turn.endpoint_id)
        if turn is None or member is None or not turn.is_followed_by(request.prompt_tokens):
            return None
        # The index may know that the endpoint has lost it.
        if match.held(member.slot) < REACH[deepest]:
            return None
        kept = turn.held_tokens(self._kept.get(model, 0.5))
        kept -= kept % CACHE_BLOCK_TOKENS
        # The law counts as the estimate does, which is off by the model's ratio.
        ratio = self._ratios.get(model, 1.0)
        own[member.row] = max((request.prompt_tokens * turn.tokens_ratio - kept) / ratio, 1.0)
        return turn

    def _base(self, name: str) -> str:
        """The base model of a name: adapters share its laws."""
        first = self._fleet.endpoints[0].id if self._fleet.endpoints else ""
        return self._models.base_at(first) or name if self._models.is_adapter(name, first) else name

    # ------------------------------------------------------------------ who shares a law

    def _board(self, model: str) -> Board:
        fleet = self._fleet
        if self._generation != fleet.generation:
            self._generation = fleet.generation
            self._boards.clear()
            self._strictest = {name: each for name, each in self._strictest.items() if fleet.get(name) and each}
            self._scales = {key: each for key, each in self._scales.items() if fleet.get(key[0])}
        board = self._boards.get(model)
        if board is None:
            laws: dict[Key, Law] = {}
            keys = [(model, self._kind(member)) for member in fleet.rows]
            for key in keys:
                laws.setdefault(key, self._law(key))
            places = {key: place for place, key in enumerate(laws)}
            scales = [self._scale(member.endpoint.id, model) for member in fleet.rows]
            board = self._boards[model] = Board(
                list(laws.values()),
                [places[key] for key in keys],
                np.array([[ttft.factor for ttft, _ in scales], [tpot.factor for _, tpot in scales]]),
            )
        return board

    def _kind(self, member: Member) -> str:
        settings, labels = self._settings, member.endpoint.labels
        if settings is None:
            return ""
        names = (settings.accelerator_label, settings.endpoint_role_label)
        return "/".join([labels.get(name, "") for name in names if name])

    def _law(self, key: Key) -> Law:
        law = self._laws.get(key)
        if law is None:
            if len(self._laws) >= MAX_LAWS:
                del self._laws[next(iter(self._laws))]
            parent = self._parent(key)
            law = self._laws[key] = Law(
                Curve(TTFT, parent.ttft if parent else None),
                Curve(TPOT, parent.tpot if parent else None),
                Errors(),
                Errors(),
            )
        return law

    def _parent(self, key: Key) -> Law | None:
        """The law to begin from: of the same model, else of the same kind, the one with the most records."""
        model, kind = key
        for place, wanted in ((0, model), (1, kind)):
            found = [law for other, law in self._laws.items() if other[place] == wanted and law.ttft.records]
            if found:
                return max(found, key=lambda law: law.ttft.records)
        return None

    def _scale(self, endpoint_id: str, model: str) -> tuple[Scale, Scale]:
        return self._scales.setdefault((endpoint_id, model), (Scale(), Scale()))

    # ------------------------------------------------------------------ a request's way

    def sent(self, flight: Flight, made: Prediction, member: Member) -> None:
        """Note what was predicted of the endpoint that a request goes to."""
        row, request = member.row, flight.request
        forecast = Forecast(
            ttft_s=round(float(made.ttft_s[row]), 6),
            tpot_s=round(float(made.tpot_s[row]), 7),
            slo_ttft_s=slo_s(request, SLO_TTFT_HEADER),
            slo_tpot_s=slo_s(request, SLO_TPOT_HEADER),
            is_trusted=made.is_trusted,
        )
        flight.noted = noted = Noted(made, row, member, forecast)
        rows = [self._fleet.at(name).row for name in flight.decision.candidates]
        noted.ttft_s, noted.tpot_s = made.ttft_s[rows], made.tpot_s[rows]
        if noted.forecast.slo_tpot_s is not None:
            self._strictest.setdefault(member.endpoint.id, {})[request.id] = noted.forecast.slo_tpot_s

    def ended(self, flight: Flight) -> None:
        """The request does not run any more."""
        noted = flight.noted
        if noted is not None and noted.forecast.slo_tpot_s is not None:
            running = self._strictest.get(noted.member.endpoint.id)
            if running is not None:
                running.pop(flight.request.id, None)

    def strictest_tpot_slo_s(self) -> Floats | float:
        """The lowest tpot that a running request of each row asked for, infinite where none did."""
        if not any(self._strictest.values()):
            return float("inf")
        running = [self._strictest.get(member.endpoint.id) for member in self._fleet.rows]
        return np.array([min(each.values()) if each else np.inf for each in running])

    def learn(self, flight: Flight, outcome: Outcome) -> None:
        """Take in a record; only streams that the chosen endpoint served at the first try teach anything."""
        noted, request = flight.noted, flight.request
        ttft_s = outcome.ttft_s if outcome.engine_ttft_s is None else outcome.engine_ttft_s
        if noted is None or ttft_s is None or outcome.status != 200 or not request.is_streaming or outcome.attempts > 1:
            return
        served = noted.member
        if outcome.served_address != served.endpoint.address:
            return
        # Data planes measure from the arrival; what a request waited in the pool's own queue is no engine's time.
        queue_s = flight.dispatched_at - flight.arrived_at
        ttft_s, duration_s = max(ttft_s - queue_s, TTFT.floor_s), outcome.duration_s - queue_s
        self._note_turn(flight, served, outcome)
        if outcome.prompt_tokens and request.prompt_tokens:
            self._correct(noted, request.prompt_tokens, outcome.prompt_tokens, outcome.cached_tokens)
        law, forecast, figures = noted.law, noted.forecast, noted.figures / UNITS
        ttft_scale, tpot_scale = self._scale(served.endpoint.id, noted.model)
        law.ttft_errors.note(forecast.ttft_s, ttft_s)
        _teach(law.ttft, ttft_scale, figures, ttft_s)
        tokens = outcome.completion_tokens or 0
        if tokens >= MIN_TPOT_TOKENS and not outcome.is_cut and not outcome.is_client_gone:
            tpot_s = max(duration_s - ttft_s, 1e-6) / (tokens - 1)
            law.tpot_errors.note(forecast.tpot_s, tpot_s)
            _teach(law.tpot, tpot_scale, figures, tpot_s)
        board = self._boards.get(noted.model)
        if board is not None and served.row >= 0 and self._generation == self._fleet.generation:
            board.scales[:, served.row] = ttft_scale.factor, tpot_scale.factor
            board.refresh()

    def _correct(self, noted: Noted, estimated: int, prompt: int, cached: int | None) -> None:
        """Learn how the engine counts, and put the figures right by it.  prompt, cached: its own count."""
        model = noted.model
        ratio = min(max(prompt / estimated, 0.1), 10.0)
        known = self._ratios.get(model)
        self._ratios[model] = ratio = ratio if known is None else known + 0.02 * (ratio - known)
        if cached is None:
            return
        if noted.turn is not None:
            kept = self._kept.get(model, 0.5)
            self._kept[model] = kept + 0.2 * (noted.turn.kept_ratio(cached) - kept)
        # The law is of what was really prefilled; how well that is foreseen is another matter.
        own = max(prompt - cached, 1) / ratio
        noted.figures[Figure.OWN_TOKENS] = own
        noted.figures[Figure.ATTENTION_PAIRS] = own * (prompt / ratio - 0.5 * own)

    def _note_turn(self, flight: Flight, served: Member, outcome: Outcome) -> None:
        request = flight.request
        if len(flight.blocks) < 8 or outcome.is_cut or outcome.is_client_gone:
            return
        last = int.from_bytes(flight.blocks[-8:], "little")
        turn = Turn(
            served.endpoint.id,
            request.prompt_tokens,
            outcome.prompt_tokens or request.prompt_tokens,
            outcome.completion_tokens or 0,
        )
        is_follow_up = flight.noted is not None and flight.noted.turn is not None
        self._turns.note(request.session_id, last, turn, is_follow_up=is_follow_up)

    def reports(self) -> list[LatencyStatus]:
        """How well each law does, where it was tried."""
        found = []
        for (model, kind), law in self._laws.items():
            for what, errors in (("ttft", law.ttft_errors), ("tpot", law.tpot_errors)):
                report = errors.report()
                if report.records:
                    found.append(LatencyStatus(model=model, kind=kind, what=what, **report._asdict()))
        return found


def _teach(curve: Curve, scale: Scale, figures: Floats, seconds: float) -> None:
    """Teach the law what its kind needs, and then the machine's factor how this one differs."""
    if curve.records >= SETTLED_RECORDS:
        scale.learn(seconds, curve.predict(figures))
    curve.learn(figures, seconds / scale.factor)
