"""Sessions by recipe: the shapes of traffic that routers differ on, in tokens.

Owns the recipes.  The same recipe and seed give the same sessions; traces of real traffic are `traces`'.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Literal

import msgspec
import numpy as np

from shoal.simulation.prompts import Prompt
from shoal.simulation.sessions import Session, Turn

Range = tuple[int, int]


class MultiTurn(
    msgspec.Struct, frozen=True, kw_only=True, tag="multi-turn", tag_field="shape", forbid_unknown_fields=True
):
    """Chats that share system prompts.  think_s: mean pause before a turn."""

    sessions: int = 128
    turns: Range = (4, 8)
    systems: int = 8
    system_tokens: int = 2_000
    say_tokens: Range = (100, 400)
    reply_tokens: Range = (50, 300)
    think_s: float = 2.0

    def make(self, rng: np.random.Generator) -> list[Session]:
        """Return the sessions."""
        root = Prompt.empty(0)
        openings = [root.extend(_content(rng), self.system_tokens) for _ in range(self.systems)]
        return [
            Session(f"chat-{n}", partial(_talk, openings[n % self.systems], self._plan(rng), _content(rng)))
            for n in range(self.sessions)
        ]

    def _plan(self, rng: np.random.Generator) -> tuple[tuple[int, int, float], ...]:
        return tuple(
            (_draw(rng, self.say_tokens), _draw(rng, self.reply_tokens), float(rng.exponential(self.think_s)))
            for _ in range(_draw(rng, self.turns))
        )


class Hot(msgspec.Struct, frozen=True, kw_only=True, tag="hot", tag_field="shape", forbid_unknown_fields=True):
    """One prompt that everybody sends, each with a short question of their own."""

    requests: int = 600
    prompt_tokens: int = 6_000
    say_tokens: Range = (20, 60)
    reply_tokens: Range = (50, 200)

    def make(self, rng: np.random.Generator) -> list[Session]:
        """Return the sessions."""
        opening = Prompt.empty(0).extend(_content(rng), self.prompt_tokens)
        return [
            Session(f"one-{n}", _question(rng, opening, self.say_tokens, self.reply_tokens))
            for n in range(self.requests)
        ]


class Zipf(msgspec.Struct, frozen=True, kw_only=True, tag="zipf", tag_field="shape", forbid_unknown_fields=True):
    """Questions about documents; the k-th most popular one is asked about with weight k ** -exponent."""

    requests: int = 800
    documents: int = 200
    document_tokens: int = 4_000
    exponent: float = 0.9
    say_tokens: Range = (20, 100)
    reply_tokens: Range = (50, 200)

    def make(self, rng: np.random.Generator) -> list[Session]:
        """Return the sessions."""
        root = Prompt.empty(0)
        pages = [root.extend(_content(rng), self.document_tokens) for _ in range(self.documents)]
        weights = np.arange(1, self.documents + 1, dtype=np.float64) ** -self.exponent
        chosen = rng.choice(self.documents, size=self.requests, p=weights / weights.sum()).tolist()
        return [
            Session(f"one-{n}", _question(rng, pages[which], self.say_tokens, self.reply_tokens))
            for n, which in enumerate(chosen)
        ]


class Rollouts(
    msgspec.Struct, frozen=True, kw_only=True, tag="rollouts", tag_field="shape", forbid_unknown_fields=True
):
    """RL rollouts: `samples` answers to each of `prompts` prompts at once, some of them very long."""

    prompts: int = 64
    samples: int = 8
    prompt_tokens: Range = (500, 3_000)
    reply_tokens_mean: int = 400
    reply_sigma: Annotated[float, msgspec.Meta(ge=0)] = 0.8

    def make(self, rng: np.random.Generator) -> list[Session]:
        """Return the sessions, all of one prompt after each other."""
        made = []
        for which in range(self.prompts):
            prompt = Prompt.empty(0).extend(_content(rng), _draw(rng, self.prompt_tokens))
            for sample in range(self.samples):
                reply = max(1, round(rng.lognormal(np.log(self.reply_tokens_mean), self.reply_sigma)))
                made.append(Session(f"{which}-{sample}", partial(_once, prompt, reply)))
        return made


class Agents(msgspec.Struct, frozen=True, kw_only=True, tag="agents", tag_field="shape", forbid_unknown_fields=True):
    """Agent loops: one system prompt for all, a context that grows with each tool's result, short pauses for tools."""

    sessions: int = 64
    turns: Range = (10, 30)
    system_tokens: int = 8_000
    tool_tokens: Range = (200, 2_000)
    reply_tokens: Range = (50, 400)
    tool_s: float = 1.5

    def make(self, rng: np.random.Generator) -> list[Session]:
        """Return the sessions."""
        opening = Prompt.empty(0).extend(_content(rng), self.system_tokens)
        return [
            Session(
                f"agent-{n}",
                partial(
                    _talk,
                    opening,
                    tuple(
                        (
                            _draw(rng, self.tool_tokens),
                            _draw(rng, self.reply_tokens),
                            float(rng.exponential(self.tool_s)),
                        )
                        for _ in range(_draw(rng, self.turns))
                    ),
                    _content(rng),
                ),
            )
            for n in range(self.sessions)
        ]


Recipe = MultiTurn | Hot | Zipf | Rollouts | Agents


class Arrivals(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When sessions begin.

    closed: as soon as one of `concurrency` clients is free.  poisson: at `rate_per_s` on average.  bursty: the same, in
    bursts, gaps gamma-distributed with coefficient of variation `cv`.  diurnal: poisson with a rate that swings by
    `swing` over `period_s`.
    """

    kind: Literal["closed", "poisson", "bursty", "diurnal"] = "closed"
    rate_per_s: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    concurrency: Annotated[int, msgspec.Meta(ge=1)] = 32
    cv: Annotated[float, msgspec.Meta(gt=0)] = 3.0
    swing: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.5
    period_s: Annotated[float, msgspec.Meta(gt=0)] = 600.0

    def spread(self, sessions: list[Session], rng: np.random.Generator) -> list[Session]:
        """Return the sessions with their times; those of a trace keep theirs."""
        if self.kind == "closed" or not sessions or sessions[0].arrives_s is not None:
            return sessions
        shape = 1.0 if self.kind != "bursty" else 1.0 / self.cv**2
        now, spread = 0.0, []
        for session in sessions:
            rate = self.rate_per_s
            if self.kind == "diurnal":
                rate *= 1.0 + self.swing * float(np.sin(2 * np.pi * now / self.period_s))
            now += float(rng.gamma(shape, 1.0 / (shape * max(rate, 1e-6))))
            spread.append(session._replace(arrives_s=now))
        return spread


def _talk(prompt: Prompt, plan: tuple[tuple[int, int, float], ...], content: int) -> Iterator[Turn]:
    """Say, be answered, say more: the answer is part of the next prompt."""
    for number, (say, reply, think_s) in enumerate(plan):
        prompt = prompt.extend(content + 2 * number, say)
        yield Turn(prompt, reply, think_s if number else 0.0)
        prompt = prompt.extend(content + 2 * number + 1, reply)


def _question(rng: np.random.Generator, opening: Prompt, say: Range, reply: Range) -> Callable[[], Iterator[Turn]]:
    return partial(_talk, opening, ((_draw(rng, say), _draw(rng, reply), 0.0),), _content(rng))


def _once(prompt: Prompt, reply: int) -> Iterator[Turn]:
    yield Turn(prompt, reply)


def _content(rng: np.random.Generator) -> int:
    return int(rng.integers(1, 2**62))


def _draw(rng: np.random.Generator, bounds: Range) -> int:
    low, high = bounds
    return int(rng.integers(low, high + 1))
