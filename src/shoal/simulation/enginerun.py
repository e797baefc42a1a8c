"""One engine model given what a real engine was sent, to compare when both answer.

Owns the run of one engine alone.  Requests find in the cache what they found then; which blocks those were does not
matter, and the cache never overflows.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shoal.engine import Aborted, Engine, EngineConfig, Event, Finish, Profile, Submitted, Ticked
from shoal.simulation.observed import Served

Floats = npt.NDArray[np.float64]

_NO_END_OF_BLOCKS = 1 << 40
_LONGEST_ANSWER = 100_000
_EARLIER_S = 1e5


class EngineRun:
    """Requests of one engine, to be served by models of it again and again.

    served: in the order in which they were sent.  block_size: of its cache.
    """

    __slots__ = ("_block_size", "_events", "_places", "_primer", "served")

    def __init__(self, served: Sequence[Served], block_size: int) -> None:
        self.served = served
        self._block_size = block_size
        self._places = {each.request_id: place for place, each in enumerate(served)}
        start = served[0].sent_s
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
            calls.append((each.sent_s - start, 0, place, submitted))
            if each.left_s is not None:
                at = max(each.left_s, each.sent_s) - start
                calls.append((at, 1, place, Aborted(request_id=each.request_id)))
        self._events = [(at, event) for at, _, _, event in sorted(calls, key=lambda call: call[:3])]

    def times(self, profile: Profile, slow_factor: float = 1.0) -> tuple[Floats, Floats]:
        """Return the seconds from sending to the first token, and from there to the last, as this engine would do them.

        NaN for requests that were left.  A request waits for the end of the step in progress, which falls anywhere: the
        half of that step is taken in the place of the rest of it, so that a figure does not hang on a moment.
        """
        config = EngineConfig(
            profile=profile, num_blocks=_NO_END_OF_BLOCKS, block_size=self._block_size, slow_factor=slow_factor
        )
        engine = Engine(config, is_streaming=False)
        first, decode = np.full(len(self.served), np.nan), np.full(len(self.served), np.nan)
        chance = np.zeros(len(self.served))
        start = self.served[0].sent_s

        def until(now: float, event: Event | None) -> None:
            while (deadline := engine.deadline()) is not None and deadline <= now:
                keep(engine.handle(Ticked(), deadline))
            if event is not None:
                was_idle = engine.deadline() is None
                keep(engine.handle(event, now))
                if isinstance(event, Submitted) and not was_idle and (deadline := engine.deadline()) is not None:
                    chance[self._places[event.request_id]] = engine.step_s / 2 - (deadline - now)

        def keep(commands: Sequence[object]) -> None:
            for command in commands:
                if isinstance(command, Finish) and command.reason != "abort" and command.request_id:
                    place = self._places[command.request_id]
                    at = command.first_token_at if command.first_token_at is not None else command.finished_at
                    first[place] = at - (self.served[place].sent_s - start)
                    decode[place] = command.finished_at - at

        until(-_EARLIER_S, self._primer)
        for at, event in self._events:
            until(at + profile.request_s, event)
        until(float("inf"), None)
        return first + chance, decode
