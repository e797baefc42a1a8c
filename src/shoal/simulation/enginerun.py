"""One engine model given what a real engine was sent: which steps it takes, and when it answers.

Owns the run of one engine alone, and the sums of its steps that each request waits for.  Requests find in the cache
what they found then; which blocks those were does not matter, and the cache never overflows.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shoal.engine import Aborted, Engine, EngineConfig, Event, Finish, Profile, Submitted, Ticked
from shoal.engine.counters import Counters
from shoal.engine.steptime import StepTime
from shoal.simulation.observed import Served

Floats = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]

_NO_END_OF_BLOCKS = 1 << 40
_LONGEST_ANSWER = 100_000
_EARLIER_S = 1e5


class Terms(NamedTuple):
    """What the times of requests are made of: `first @ seconds` to the first token, `decode @ seconds` to the last.

    first, decode: how often each coefficient is in them, shape (requests, 7) in the order of `fit.COEFFICIENTS`; NaN
    for requests without an end.  gaps: the same of what lies between tokens, shape (gaps, 7).  wait_s: seconds of the
    step in progress when each request came, 0 where there was none.
    """

    first: Floats
    decode: Floats
    gaps: Floats
    wait_s: Floats


class Gaps(NamedTuple):
    """What passed between the ends of two steps of a busy engine, as tokens of any requests tell.

    before, after: the steps, shape (gaps,).  seen_s: seconds from the end of one to the end of the other.
    """

    before: Numbers
    after: Numbers
    seen_s: Floats


class Steps:
    """The steps that a model engine took, and which of them each request waited for.

    A request waits for its first token through `request_s`, half of the step in progress when it came (the rest of that
    step falls anywhere, and a figure must not hang on a moment) and whole steps; then through more steps for its last.
    Between two tokens, whosever they are, lie whole steps alone.  woken: the steps that an idle engine began with.
    """

    __slots__ = ("_begin", "_first", "_last", "_progress", "_slow_factor", "_sums", "_woken")

    def __init__(
        self,
        sums: Floats,
        slow_factor: float,
        progress: Numbers,
        begin: Numbers,
        first: Numbers,
        last: Numbers,
        woken: Sequence[int],
    ) -> None:
        self._woken = np.array(woken, np.int64)
        self._sums = sums
        self._slow_factor = slow_factor
        self._progress = progress
        self._begin = begin
        self._first = first
        self._last = last

    def gaps(self, first_s: Floats, last_s: Floats, seconds: Floats, least_s: float) -> Gaps:
        """Return the gaps between tokens that take at least so many seconds with these coefficients.

        first_s, last_s: when the first and the last token of each request came, NaN where nobody knows.  Which gaps are
        taken must not hang on when tokens came: those that came late would make them all too long.
        """
        steps, came_s = np.concatenate([self._first, self._last]), np.concatenate([first_s, last_s])
        is_known = (steps >= 0) & ~np.isnan(came_s)
        order = np.flatnonzero(is_known)[np.argsort(steps[is_known], kind="stable")]
        steps, came_s = steps[order], came_s[order]
        ends_s = (self._until(seconds) @ seconds)[steps + 1].tolist()
        woken = np.searchsorted(self._woken, steps, side="right").tolist()
        before, after = [], []
        last = 0
        for place in range(1, len(order)):
            if woken[place] != woken[last]:
                last = place
            elif ends_s[place] - ends_s[last] >= least_s:
                before.append(last)
                after.append(place)
                last = place
        return Gaps(steps[before], steps[after], came_s[after] - came_s[before])

    def terms(self, seconds: Floats, gaps: Gaps | None = None) -> Terms:
        """Return what the times are made of with these coefficients, which say what bounds each step."""
        until = self._until(seconds)
        of_step = np.diff(until, axis=0)
        wait = np.where(self._progress[:, None] >= 0, of_step[self._progress], 0.0)
        has_end = self._last[:, None] >= 0
        first = until[self._first + 1] - until[self._begin] + wait / 2
        first[:, 6] = 1.0
        decode = until[self._last + 1] - until[self._first + 1]
        between = until[:0] if gaps is None else until[gaps.after + 1] - until[gaps.before + 1]
        return Terms(np.where(has_end, first, np.nan), np.where(has_end, decode, np.nan), between, wait @ seconds)

    def _until(self, seconds: Floats) -> Floats:
        """Return what the steps before each one are made of, and all of them, shape (steps + 1, 7)."""
        tokens, pairs, reads, context, sequences = self._sums
        is_compute = tokens * seconds[0] + pairs * seconds[1] > reads * seconds[2] + context * seconds[3]
        of_step = np.stack(
            [
                tokens * is_compute,
                pairs * is_compute,
                reads * ~is_compute,
                context * ~is_compute,
                np.ones_like(tokens),
                sequences,
                np.zeros_like(tokens),
            ],
            axis=1,
        )
        of_step *= self._slow_factor
        return np.concatenate([np.zeros((1, 7)), np.cumsum(of_step, axis=0)])


class Guide(NamedTuple):
    """How far times of first tokens and of decoding are from what they say, as shares of them."""

    first_ratio: float = 0.0
    decode_ratio: float = 0.0


class EngineRun:
    """Requests of one engine, to be served by models of it again and again.

    served: in the order in which they were sent.  block_size: of its cache.
    """

    __slots__ = ("_block_size", "_events", "_primer", "answers", "served")

    def __init__(self, served: Sequence[Served], block_size: int) -> None:
        self.served = served
        self.answers = _Answers(served)
        self._block_size = block_size
        most = max(min(each.cached_tokens, each.prompt_tokens - 1) for each in served) // block_size
        chain = tuple(range(1, most + 1))
        self._primer = Submitted(
            request_id="", prompt_tokens=most * block_size + 1, output_tokens=1, block_hashes=chain
        )
        calls: list[tuple[float, int, int, Event]] = []
        for place, each in enumerate(served):
            cached = min(each.cached_tokens, each.prompt_tokens - 1) // block_size
            left = each.left_s is not None
            submitted = Submitted(
                request_id=each.request_id,
                prompt_tokens=max(1, each.prompt_tokens),
                output_tokens=_LONGEST_ANSWER if left else each.output_tokens,
                block_hashes=chain[:cached],
            )
            at = each.sent_s - served[0].sent_s
            calls.append((at, 0, place, submitted))
            if each.left_s is not None:
                left_at = max(each.left_s - served[0].sent_s, at)
                calls.append((left_at, 1, place, Aborted(request_id=each.request_id)))
        self._events = [(at, event) for at, _, _, event in sorted(calls, key=lambda call: call[:3])]

    def steps(self, profile: Profile, slow_factor: float = 1.0, guide: Guide | None = None) -> Steps:
        """Return the steps that an engine with this profile takes.

        guide: how well the times of first and last tokens are known.  With it requests come when the model has got as
        far as the real engine had when they came there, by those tokens, so that the steps are nearly those that were
        even where the profile is wrong; without it they come at the times at which they were sent.
        """
        config = EngineConfig(
            profile=profile, num_blocks=_NO_END_OF_BLOCKS, block_size=self._block_size, slow_factor=slow_factor
        )
        walk = _Walk(config, self.answers, guide)
        walk.begin(self._primer)
        for at, event in self._events:
            walk.go(at + profile.request_s, event)
        return walk.finish()

    def times(self, profile: Profile, seconds: Floats, slow_factor: float = 1.0) -> tuple[Floats, Floats]:
        """Return the seconds from sending to the first token, and from there to the last, as this engine would do them.

        seconds: the profile's coefficients.  NaN for requests that were left.
        """
        terms = self.steps(profile, slow_factor).terms(seconds)
        return terms.first @ seconds, terms.decode @ seconds


class _Answers:
    """When the real engine gave first and last tokens, in seconds from the first request on; NaN where nobody knows."""

    __slots__ = ("decode_s", "first_s", "last_s", "places", "ttft_s")

    def __init__(self, served: Sequence[Served]) -> None:
        sent_s = np.array([each.sent_s for each in served]) - served[0].sent_s
        has_left = np.array([each.left_s is not None for each in served])
        self.ttft_s = np.array([np.nan if each.ttft_s is None else each.ttft_s for each in served])
        total_s = np.array([np.nan if each.total_s is None else each.total_s for each in served])
        self.first_s = np.where(has_left, np.nan, sent_s + self.ttft_s)
        self.last_s = np.where(has_left, np.nan, sent_s + total_s)
        self.decode_s = total_s - np.nan_to_num(self.ttft_s)
        self.places = {each.request_id: place for place, each in enumerate(served)}

    def within_s(self, guide: Guide) -> tuple[Floats, Floats]:
        """Return how far the times of first and of last tokens may be off."""
        first_s = guide.first_ratio * self.ttft_s
        return first_s, np.hypot(np.nan_to_num(first_s), guide.decode_ratio * self.decode_s)


class _Walk:
    """One run of a model engine through the requests.

    lag_s: how much later it is here than it was there, at the last token whose times are known on both sides.
    """

    __slots__ = (
        "_answers",
        "_begin",
        "_engine",
        "_first",
        "_is_guided",
        "_lag_s",
        "_last",
        "_marks",
        "_now",
        "_passed",
        "_progress",
        "_slow_factor",
        "_taken",
        "_unbegun",
        "_within_s",
        "_woken",
    )

    def __init__(self, config: EngineConfig, answers: _Answers, guide: Guide | None) -> None:
        self._answers = answers
        self._is_guided = guide is not None
        self._within_s = answers.within_s(guide or Guide(0.0, 0.0))
        self._marks = sorted(
            (at, place, is_last)
            for is_last, times in enumerate((answers.first_s, answers.last_s))
            for place, at in enumerate((times + self._within_s[is_last]).tolist())
            if at == at
        )
        self._slow_factor = config.slow_factor
        self._taken = _Taken(config.profile)
        self._engine = Engine(config, is_streaming=False, step_time=self._taken)
        self._taken.counters = self._engine.counters
        self._progress, self._begin, self._first, self._last = np.full((4, len(answers.places)), -1)
        self._unbegun: dict[str, int] = {}
        self._woken: list[int] = []
        self._passed = 0
        self._lag_s = 0.0
        self._now = -_EARLIER_S

    def begin(self, primer: Submitted) -> None:
        """Fill the cache, long before the first request comes."""
        self._engine.handle(primer, self._now)
        while self._tick():
            pass

    def go(self, at: float, event: Event) -> None:
        """Go on until `event` comes, and take it.  at: when it came to the real engine."""
        if self._is_guided:
            self._catch_up(at)
        while (deadline := self._engine.deadline()) is not None and deadline <= at + self._lag_s:
            self._tick()
        is_idle = self._engine.deadline() is None
        if is_idle:
            self._lag_s = max(0.0, self._now - at)
        self._now = max(self._now, at + self._lag_s)
        self._keep(self._engine.handle(event, self._now))
        if isinstance(event, Submitted):
            place = self._answers.places[event.request_id]
            self._unbegun[event.request_id] = place
            steps = self._engine.counters.steps
            self._begin[place] = steps if is_idle else steps + 1
            self._progress[place] = -1 if is_idle else steps
            if is_idle:
                self._woken.append(steps)
        elif isinstance(event, Aborted):
            self._unbegun.pop(event.request_id, None)

    def finish(self) -> Steps:
        """Go on to the end and return the steps."""
        while self._tick():
            pass
        return Steps(
            self._taken.sums(), self._slow_factor, self._progress, self._begin, self._first, self._last, self._woken
        )

    def _catch_up(self, at: float) -> None:
        """Give the tokens that were there before `at`."""
        marks = self._marks
        while self._passed < len(marks) and marks[self._passed][0] <= at:
            _, place, is_last = marks[self._passed]
            self._passed += 1
            # What it does not serve, as what is longer than its limit, ends before it begins.
            while (self._last[place] < 0 if is_last else place in self._unbegun.values()) and self._tick():
                pass

    def _tick(self) -> bool:
        """End the step in progress, or several; returns whether there was one."""
        deadline = self._engine.deadline()
        if deadline is None:
            return False
        self._now = deadline
        self._keep(self._engine.handle(Ticked(), deadline))
        for request_id, place in list(self._unbegun.items()):
            if self._engine.has_begun(request_id):
                del self._unbegun[request_id]
                self._pass(self._answers.first_s[place], self._within_s[0][place])
        return True

    def _keep(self, commands: Sequence[object]) -> None:
        for command in commands:
            if isinstance(command, Finish) and command.reason != "abort" and command.request_id:
                # Nothing is preempted, so each further token is of a further step.
                place = self._answers.places[command.request_id]
                self._last[place] = self._engine.counters.steps - 1
                self._first[place] = self._last[place] - max(0, command.output_tokens - 1)
                self._pass(self._answers.last_s[place], self._within_s[1][place])

    def _pass(self, real_s: float, within_s: float) -> None:
        """A token is there that came at `real_s`, give or take `within_s`."""
        if self._is_guided and real_s == real_s:
            further_s = self._now - real_s - self._lag_s
            self._lag_s += further_s - min(max(further_s, -within_s), within_s)


class _Taken(StepTime):
    """The times of steps, and of which steps they were asked."""

    __slots__ = ("_asked", "_expert_ratio", "counters")

    def __init__(self, profile: Profile) -> None:
        super().__init__(profile)
        self.counters = Counters()
        self._expert_ratio = profile.expert_bytes / profile.weight_bytes
        self._asked: list[tuple[int, int, int, int, float]] = []

    def seconds(self, *, sequences: int, tokens: int, context_tokens: int, pairs: float) -> float:
        self._asked.append((self.counters.steps, sequences, tokens, context_tokens, pairs))
        return super().seconds(sequences=sequences, tokens=tokens, context_tokens=context_tokens, pairs=pairs)

    def sums(self) -> Floats:
        """Return tokens, pairs, reads of the weights, context and sequences of each step, shape (5, steps).

        Of steps that were taken at once the first was asked for; each has as much more context as it has sequences.
        """
        asked = np.array(self._asked, np.float64)
        begins, count = asked[:, 0], self.counters.steps
        times = np.diff(np.append(begins, count)).astype(np.int64)
        further = np.arange(count) - np.repeat(begins, times)
        sequences, tokens, context, pairs = np.repeat(asked[:, 1:], times, axis=0).T
        reads = 1.0 + self._expert_ratio * (1.0 - self._missed_ratio**tokens)
        return np.stack([tokens, pairs + further * sequences, reads, context + further * sequences, sequences])
