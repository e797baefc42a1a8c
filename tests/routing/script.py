"""A scripted pool: feeds a router events at given times, the way a host would."""

import msgspec
import numpy as np

from shoal.kernel import Chance
from shoal.pool import Api, Endpoint, EndpointState, Outcome, Request, ServedModel, Signals
from shoal.prefix import BLOCK_TOKENS
from shoal.prefix.hashing import hashes_within
from shoal.routing import Account, Arrived, Command, Ended, Forward, Recorded, Refuse, Router
from shoal.routing.config import load
from shoal.routing.events import EndpointChanged, EndpointJoined, LoadSeen, ModelsSeen


def blocks_of(text: str, tokens: int, after: int = 0) -> bytes:
    """Chained hashes of `tokens` tokens, behind `after` tokens, that only prompts with the same text there share."""
    count = hashes_within((after + tokens) // BLOCK_TOKENS) - hashes_within(after // BLOCK_TOKENS)
    seed = sum(ord(letter) * 31**place for place, letter in enumerate(text)) % 2**61
    values = [(seed * 1_000_003 + place * 7919) % 2**63 + 1 for place in range(count)]
    return np.array(values, np.uint64).tobytes()


def request_of(name: str, tokens: int, model: str = "m", **fields: object) -> Request:
    """A streaming chat request."""
    return Request(
        id=name,
        api=Api.CHAT,
        model=model,
        is_streaming=True,
        prompt_tokens=tokens,
        prompt_bytes=4 * tokens,
        **fields,  # type: ignore[arg-type]
    )


class Pool:
    """A router with endpoints e0..eN at 10.0.0.N:8000, all serving `model`."""

    def __init__(self, endpoints: int = 4, model: str = "m", config: str = "", seed: int = 1) -> None:
        self.router = Router(load(config, "test"), Chance(seed))
        self.now = 100.0
        self._count = 0
        for number in range(endpoints):
            self.join(f"e{number}", f"10.0.0.{number}:8000", (model,))

    def feed(self, event: object) -> list[Command]:
        return self.router.handle(event, self.now)  # type: ignore[arg-type]

    def join(
        self, name: str, address: str, models: tuple[str, ...] = ("m",), labels: dict[str, str] | None = None
    ) -> None:
        self.feed(EndpointJoined(Endpoint(id=name, address=address, labels=labels or {})))
        self.feed(ModelsSeen(name, tuple(ServedModel(id=model) for model in models)))
        self.feed(EndpointChanged(name, EndpointState.READY))

    def load(self, name: str, **figures: float) -> None:
        self.feed(LoadSeen(name, msgspec.convert(figures, Signals)))

    def send(self, prompt: str = "p", tokens: int = 640, model: str = "m", **fields: object) -> "Sent":
        self._count += 1
        request = request_of(f"r{self._count}", tokens, model, **fields)
        commands = self.feed(Arrived(request, blocks_of(prompt, tokens)))
        assert len(commands) == 1
        return Sent(self, request.id, commands[0])


class Sent:
    """One request on its way."""

    def __init__(self, pool: Pool, request_id: str, command: Command) -> None:
        self.pool = pool
        self.request_id = request_id
        self.command = command
        self.sent_at = pool.now

    @property
    def refused(self) -> Refuse:
        assert isinstance(self.command, Refuse)
        return self.command

    @property
    def forward(self) -> Forward:
        assert isinstance(self.command, Forward)
        return self.command

    @property
    def target(self) -> str:
        return self.forward.endpoints[0]

    def end(self) -> list[Command]:
        return self.pool.feed(Ended(self.request_id))

    def record(self, **fields: object) -> list[Command]:
        values: dict[str, object] = {"status": 200, "served_address": self.target, "ttft_s": 0.05, "duration_s": 0.2}
        outcome = Outcome(**{**values, **fields})  # type: ignore[arg-type]
        # Nobody hears of a first token before it came.
        self.pool.now = max(self.pool.now, self.sent_at + (outcome.ttft_s or 0.0))
        return self.pool.feed(Recorded(self.request_id, outcome))

    def finish(self, **fields: object) -> Account:
        self.end()
        (account,) = self.record(**fields)
        assert isinstance(account, Account)
        return account
