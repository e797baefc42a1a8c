"""Several routers over the same engines in virtual time, as one pool with several pickers has them.

Each request goes to a router by chance; what the routers tell each other arrives a fixed delay later, or never.
"""

import heapq
import itertools
from typing import NamedTuple

import numpy as np

from shoal.engine import Engine, EngineConfig, Finish, Submitted
from shoal.engine import Ticked as StepEnded
from shoal.kernel import Chance
from shoal.pool import Api, Endpoint, EndpointState, Outcome, Request, ServedModel, Signals
from shoal.prefix import BLOCK_TOKENS
from shoal.prefix.hashing import REACH, hashes_within
from shoal.routing import Arrived, Ended, Forward, Recorded, Router, events
from shoal.routing.config import load

ENGINE = EngineConfig(num_blocks=400, block_size=BLOCK_TOKENS)
"""25,600 tokens of cache, as the embedded engine has."""

SCRAPE_S = 0.5


class Talk(NamedTuple):
    """A chat: the blocks of its system prompt by hash, and how many tokens each turn adds."""

    blocks: tuple[int, ...]
    turn_tokens: tuple[int, ...]
    reply_tokens: int
    seed: int


class Result(NamedTuple):
    """hit_ratio: share of prompt tokens found in caches.  imbalance: requests of the busiest engine over the mean.

    p50_s: of ttft.  is_idle: whether no router has anything in flight at the end.
    """

    hit_ratio: float
    imbalance: float
    p50_s: float
    is_idle: bool


def talks(seed: int, *, chats: int = 160, turns: int = 6, systems: int = 16, system_blocks: int = 16) -> list[Talk]:
    """Chats that share system prompts, of 1,000 to 2,500 tokens."""
    rng = np.random.default_rng(seed)
    openings = [tuple(rng.integers(1, 2**62, system_blocks).tolist()) for _ in range(systems)]
    return [
        Talk(
            openings[int(rng.integers(systems))],
            tuple(rng.integers(150, 350, turns).tolist()),
            int(rng.integers(16, 48)),
            int(rng.integers(1, 2**31)),
        )
        for _ in range(chats)
    ]


class Pickers:
    """routers: 1 or more.  delay_s: of what they tell each other, None for silence between them."""

    def __init__(self, routers: int, engines: int, delay_s: float | None, seed: int = 1, config: str = "") -> None:
        self.now = 0.0
        self.routers = [
            Router(load(config, "pickers"), Chance(seed + number), shares_pool=routers > 1) for number in range(routers)
        ]
        self._engines = [Engine(ENGINE) for _ in range(engines)]
        self._delay_s = delay_s
        self._rng = np.random.default_rng(seed)
        self._order = itertools.count()
        self._later: list[tuple[float, int, int, events.Event]] = []
        self._waiting: dict[str, tuple[Talk, int, list[int], int]] = {}
        self._count = 0
        self.samples: list[tuple[float, int, int, int, float]] = []
        for router in self.routers:
            for number in range(engines):
                name = f"e{number}"
                router.handle(events.EndpointJoined(Endpoint(id=name, address=f"10.0.0.{number}:80")), 0.0)
                router.handle(events.ModelsSeen(name, (ServedModel(id="m"),)), 0.0)
                router.handle(events.EndpointChanged(name, EndpointState.READY), 0.0)
        if delay_s is not None and routers > 1:
            for number, router in enumerate(self.routers):
                router.outbox.open()
                for other in range(routers):
                    if other != number:
                        router.handle(events.PeerJoined(str(other)), 0.0)

    def run(self, plan: list[Talk], concurrency: int) -> Result:
        """Have `concurrency` clients go through the chats, one turn after the other."""
        self._plan = iter(plan)
        for _ in range(concurrency):
            self._next_chat()
        scrape_at = 0.0
        while self._waiting:
            ends = [(engine.deadline(), number) for number, engine in enumerate(self._engines)]
            step_at, number = min((at, number) for at, number in ends if at is not None)
            if self._later and self._later[0][0] <= step_at:
                at, _, router, event = heapq.heappop(self._later)
                self.now = max(self.now, at)
                self.routers[router].handle(event, self.now)
                continue
            self.now = max(self.now, step_at)
            if self.now >= scrape_at:
                scrape_at = self.now + SCRAPE_S
                self._scrape()
            for command in self._engines[number].handle(StepEnded(), self.now):
                if isinstance(command, Finish):
                    self._finished(command, number)
        while self._later:
            at, _, router, event = heapq.heappop(self._later)
            self.now = max(self.now, at)
            self.routers[router].handle(event, self.now)
        self._scrape()
        return self._result()

    # ------------------------------------------------------------------ inside

    def _next_chat(self) -> None:
        talk = next(self._plan, None)
        if talk is not None:
            self._turn(talk, 0, list(talk.blocks))

    def _turn(self, talk: Talk, turn: int, blocks: list[int]) -> None:
        added = talk.turn_tokens[turn] // BLOCK_TOKENS
        place = len(blocks)
        blocks = blocks + [talk.seed * 100_000 + place + each for each in range(added)]
        tokens = len(blocks) * BLOCK_TOKENS + 17
        router = int(self._rng.integers(len(self.routers)))
        self._count += 1
        request = Request(
            id=f"r{self._count}", api=Api.CHAT, model="m", is_streaming=True, prompt_tokens=tokens,
            prompt_bytes=4 * tokens, max_output_tokens=talk.reply_tokens,
        )  # fmt: skip
        hashes = [blocks[REACH[each + 1] - 1] for each in range(hashes_within(len(blocks)))]
        self._waiting[request.id] = (talk, turn, blocks, router)
        (command,) = self.routers[router].handle(Arrived(request, np.array(hashes, np.uint64).tobytes()), self.now)
        assert isinstance(command, Forward)
        self._tell()
        number = int(command.endpoints[0].split(":")[0].rpartition(".")[2])
        self._engines[number].handle(
            Submitted(
                request_id=request.id, prompt_tokens=tokens, output_tokens=talk.reply_tokens,
                max_tokens=talk.reply_tokens, block_hashes=tuple(blocks),
            ),
            self.now,
        )  # fmt: skip

    def _finished(self, finish: Finish, number: int) -> None:
        talk, turn, blocks, router = self._waiting[finish.request_id]
        ttft_s = (finish.first_token_at or self.now) - finish.arrived_at
        outcome = Outcome(
            status=200, served_address=f"10.0.0.{number}:80", attempts=1, ttft_s=ttft_s,
            duration_s=self.now - finish.arrived_at, prompt_tokens=finish.prompt_tokens,
            completion_tokens=finish.output_tokens, cached_tokens=finish.cached_tokens,
        )  # fmt: skip
        self.samples.append((finish.arrived_at, number, finish.prompt_tokens, finish.cached_tokens, ttft_s))
        self.routers[router].handle(Ended(finish.request_id), self.now)
        self.routers[router].handle(Recorded(finish.request_id, outcome), self.now)
        self._tell()
        if turn + 1 < len(talk.turn_tokens):
            self._turn(talk, turn + 1, blocks)
        else:
            self._next_chat()
        del self._waiting[finish.request_id]

    def _tell(self) -> None:
        if self._delay_s is None:
            return
        for sender, router in enumerate(self.routers):
            news = tuple(router.outbox.take())
            for receiver in range(len(self.routers)):
                if news and receiver != sender:
                    told = events.PeerTold(str(sender), news)
                    heapq.heappush(self._later, (self.now + self._delay_s, next(self._order), receiver, told))

    def _scrape(self) -> None:
        for number, engine in enumerate(self._engines):
            signals = Signals(
                waiting=float(engine.num_waiting), running=float(engine.num_running),
                kv_usage_ratio=engine.pool.usage_ratio, num_blocks=engine.num_blocks,
                block_size_tokens=engine.block_size,
            )  # fmt: skip
            for router in self.routers:
                router.handle(events.LoadSeen(f"e{number}", signals), self.now)

    def _result(self) -> Result:
        prompt = sum(sample[2] for sample in self.samples)
        cached = sum(sample[3] for sample in self.samples)
        served = [sum(sample[1] == number for sample in self.samples) for number in range(len(self._engines))]
        idle = all(status.inflight == status.peers.bookings == 0 for status in [each.status() for each in self.routers])
        return Result(
            cached / prompt,
            max(served) * len(served) / sum(served),
            float(np.median([sample[4] for sample in self.samples])),
            idle,
        )
