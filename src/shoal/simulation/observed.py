"""What journals say of engines: who they were, what each was sent, and when it answered.

Owns the reading.  What clients did is `recorded`'s, what follows from it for a model of the engine is `fit`'s.
"""

from collections.abc import Iterable

from shoal.pool import Endpoint, EndpointState, Outcome, Signals
from shoal.routing import Account, Arrived, Ended, Event, Forward, Recorded, Refuse, events
from shoal.routing.journal import Opening, Step
from shoal.simulation.recorded import open_journals
from shoal.simulation.traces import MAX_TOKENS

_MAX_BLOCKS, _LONGEST_S = 1 << 40, 1e7
_FULL_RATIO = 0.9
"""KV cache in use at which an engine may begin to hold requests back; what it does then says nothing of its steps."""


class Served:
    """One request as its engine had it.

    sent_s: when it went there, on the clock of the journal.  ttft_s, total_s: from then to the first token and to the
    last, None when they are not known.  left_s: when its client left, None when it stayed.  cached_tokens: as the
    engine says, else what the router believed (`is_cached_told`).  is_clean: whether it was sent there once, to an
    engine that was not full, and answered in whole: others are load, and nothing is learned from them.  is_answered:
    whether it got a whole answer at all.
    """

    __slots__ = (
        "arrived_s",
        "cached_tokens",
        "ended_s",
        "is_answered",
        "is_cached_told",
        "is_clean",
        "left_s",
        "output_tokens",
        "prompt_tokens",
        "request_id",
        "sent_s",
        "total_s",
        "ttft_s",
    )

    def __init__(self, request_id: str, arrived_s: float, prompt_tokens: int) -> None:
        self.request_id = request_id
        self.arrived_s = arrived_s
        self.prompt_tokens = _within(prompt_tokens, MAX_TOKENS)
        self.sent_s = arrived_s
        self.ended_s: float | None = None
        self.ttft_s: float | None = None
        self.total_s: float | None = None
        self.left_s: float | None = None
        self.cached_tokens = 0
        self.is_cached_told = False
        self.output_tokens = 1
        self.is_answered = False
        self.is_clean = False


class Seen:
    """One endpoint of the journal.

    up: when it began to answer (True) and when it no longer did, in order.  num_blocks, block_size: 0 when it did not
    say.  models: as it names them.  served: its requests, in the order in which they were sent.
    """

    __slots__ = ("block_size", "endpoint", "is_full", "models", "num_blocks", "served", "up")

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.up: list[tuple[float, bool]] = []
        self.num_blocks = 0
        self.block_size = 0
        self.models: tuple[str, ...] = ()
        self.is_full = False
        self.served: list[Served] = []

    def note(self, now: float, is_up: bool) -> None:
        """Take that it answers, or does not."""
        if (self.up[-1][1] if self.up else False) != is_up:
            self.up.append((now, is_up))

    def see(self, signals: Signals) -> None:
        """Take a reading of its metrics."""
        self.num_blocks = _within(signals.num_blocks, _MAX_BLOCKS) or self.num_blocks
        self.block_size = _within(signals.block_size_tokens, MAX_TOKENS) or self.block_size
        self.is_full = (signals.kv_usage_ratio or 0.0) > _FULL_RATIO


class Pool:
    """What journals say of a pool.

    seen: its endpoints by id.  config: text of its last configuration.  routers: how many pickers wrote.  begin_s,
    end_s: of the journal, on its clock.
    """

    __slots__ = ("_by_address", "_open", "begin_s", "config", "end_s", "routers", "seen")

    def __init__(self) -> None:
        self.seen: dict[str, Seen] = {}
        self.config = ""
        self.routers = 0
        self.begin_s = 0.0
        self.end_s = 0.0
        self._by_address: dict[str, Seen] = {}
        self._open: dict[str, tuple[Served, Seen | None]] = {}

    def begin(self, opening: Opening) -> None:
        """A file begins."""
        self.config = opening.config_text
        self.routers += not opening.part

    def take(self, step: Step) -> None:
        """Take one step of a router."""
        now, event = step.now, step.event
        self.begin_s = min(self.begin_s, now) if self.end_s else now
        self.end_s = max(self.end_s, now)
        if isinstance(event, Arrived):
            self._open[event.request.id] = (Served(event.request.id, now, event.request.prompt_tokens), None)
        elif isinstance(event, Ended) and event.request_id in self._open:
            self._open[event.request_id][0].ended_s = now
            if event.outcome is not None:
                self._measure(*self._open[event.request_id], event.outcome)
        elif isinstance(event, Recorded) and event.request_id in self._open:
            self._measure(*self._open[event.request_id], event.outcome)
        else:
            self._of_fleet(event, now)
        for command in step.commands:
            if isinstance(command, Forward) and command.request_id in self._open:
                self._send(self._open[command.request_id][0], command, now)
            elif isinstance(command, Account) and command.request_id in self._open:
                self._close(self._open.pop(command.request_id)[0], command)
            elif isinstance(command, Refuse):
                self._open.pop(command.request_id, None)

    @property
    def unfinished(self) -> int:
        """Requests whose end is not in the journal."""
        return len(self._open)

    def finish(self) -> None:
        """All files are read."""
        for seen in self.seen.values():
            seen.served.sort(key=lambda each: (each.sent_s, each.request_id))

    def _of_fleet(self, event: Event, now: float) -> None:
        if isinstance(event, events.EndpointJoined):
            seen = self.seen.setdefault(event.endpoint.id, Seen(event.endpoint))
            seen.endpoint = event.endpoint
            self._by_address[event.endpoint.address] = seen
            seen.note(now, event.state is not EndpointState.LOADING)
            return
        seen_ = self.seen.get(getattr(event, "endpoint_id", ""))
        if seen_ is None:
            if isinstance(event, events.Configured):
                self.config = event.text
        elif isinstance(event, events.EndpointChanged):
            seen_.note(now, event.state is not EndpointState.LOADING)
        elif isinstance(event, events.EndpointLeft):
            seen_.note(now, False)
        elif isinstance(event, events.LoadSeen):
            seen_.see(event.signals)
        elif isinstance(event, events.ModelsSeen):
            seen_.models = tuple(model.id for model in event.models)

    def _send(self, served: Served, command: Forward, now: float) -> None:
        seen = self._by_address.get(command.endpoints[0]) if command.endpoints else None
        served.sent_s = now
        served.is_clean = seen is not None and not seen.is_full
        self._open[served.request_id] = (served, seen)

    def _measure(self, served: Served, seen: Seen | None, outcome: Outcome) -> None:
        """Take the record of a request."""
        server = self._by_address.get(outcome.served_address)
        served.prompt_tokens = _within(outcome.prompt_tokens, MAX_TOKENS) or served.prompt_tokens
        served.output_tokens = _within(outcome.completion_tokens, MAX_TOKENS) or 1
        if outcome.cached_tokens is not None:
            served.cached_tokens, served.is_cached_told = _within(outcome.cached_tokens, MAX_TOKENS), True
        if outcome.is_client_gone or outcome.is_cut:
            served.left_s = served.ended_s
        if server is None:
            return
        served.is_answered = outcome.status == 200 and not outcome.is_cut
        is_known = outcome.status == 200 and outcome.prompt_tokens and outcome.completion_tokens
        served.is_clean = bool(
            served.is_clean and server is seen and outcome.attempts == 1 and is_known and served.left_s is None
        )
        at_engine_s = outcome.ttft_s if outcome.engine_ttft_s is None else outcome.engine_ttft_s
        times_s = outcome.ttft_s, at_engine_s, outcome.duration_s
        if outcome.ttft_s is not None and at_engine_s is not None and _are_possible(times_s):
            served.ttft_s = max(0.0, at_engine_s - (served.sent_s - served.arrived_s))
            served.total_s = served.ttft_s + max(0.0, outcome.duration_s - outcome.ttft_s)
        server.served.append(served)

    def _close(self, served: Served, account: Account) -> None:
        if not served.is_cached_told:
            served.cached_tokens = _within(account.predicted_cached_tokens, MAX_TOKENS)
        if not account.is_streaming:
            served.ttft_s = None


def observe(files: Iterable[bytes]) -> Pool:
    """Return what journals say of their pool.

    files: whole files, as `recorded.asked` takes them.  Raises InvalidInput.
    """
    pool = Pool()
    for opening, steps in open_journals(files):
        pool.begin(opening)
        for step in steps:
            pool.take(step)
    pool.finish()
    return pool


def _within(count: int | None, most: int) -> int:
    """A count as far as there can be one, 0 for none: a journal that was not written here may say anything."""
    return min(max(0, count or 0), most)


def _are_possible(times_s: Iterable[float | None]) -> bool:
    """Whether none of these times is below 0, above a third of a year, or no number."""
    return all(each is None or 0.0 <= each <= _LONGEST_S for each in times_s)
