"""Sessions by recipe: the shapes of traffic that routers differ on, in tokens.

Owns the recipes.  The same recipe and seed give the same sessions.  Agents that start agents are `trees'`, the specs of
inference-perf `inferenceperf`'s, traces of real traffic `traces'`.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Annotated

import msgspec
import numpy as np

from shoal.simulation.arrivals import Arrivals
from shoal.simulation.inferenceperf import ConversationReplay, SharedPrefix
from shoal.simulation.prompts import Prompt
from shoal.simulation.sessions import Fork, Session, Turn
from shoal.simulation.talks import Count, Range, Seconds, Tokens, content, draw, ordered, question, talk
from shoal.simulation.trees import AgentTree


class MultiTurn(
    msgspec.Struct, frozen=True, kw_only=True, tag="multi-turn", tag_field="shape", forbid_unknown_fields=True
):
    """Chats that share system prompts.  think_s: mean pause before a turn."""

    sessions: Count = 128
    turns: Range = (4, 8)
    systems: Count = 8
    system_tokens: Tokens = 2_000
    say_tokens: Range = (100, 400)
    reply_tokens: Range = (50, 300)
    think_s: Seconds = 2.0

    def __post_init__(self) -> None:
        ordered(self)

    def make(self, rng: np.random.Generator) -> list[Session]:
        """Return the sessions."""
        root = Prompt.empty(0)
        openings = [root.extend(content(rng), self.system_tokens) for _ in range(self.systems)]
        return [
            Session(f"chat-{n}", partial(talk, openings[n % self.systems], self._plan(rng), content(rng)))
            for n in range(self.sessions)
        ]

    def _plan(self, rng: np.random.Generator) -> tuple[tuple[int, int, float], ...]:
        return tuple(
            (draw(rng, self.say_tokens), draw(rng, self.reply_tokens), float(rng.exponential(self.think_s)))
            for _ in range(draw(rng, self.turns))
        )


class Hot(msgspec.Struct, frozen=True, kw_only=True, tag="hot", tag_field="shape", forbid_unknown_fields=True):
    """One prompt that everybody sends, each with a short question of their own."""

    requests: Count = 600
    prompt_tokens: Tokens = 6_000
    say_tokens: Range = (20, 60)
    reply_tokens: Range = (50, 200)

    def __post_init__(self) -> None:
        ordered(self)

    def make(self, rng: np.random.Generator) -> list[Session]:
        """Return the sessions."""
        opening = Prompt.empty(0).extend(content(rng), self.prompt_tokens)
        return [
            Session(f"one-{n}", question(rng, opening, self.say_tokens, self.reply_tokens))
            for n in range(self.requests)
        ]


class Zipf(msgspec.Struct, frozen=True, kw_only=True, tag="zipf", tag_field="shape", forbid_unknown_fields=True):
    """Questions about documents; the k-th most popular one is asked about with weight k ** -exponent."""

    requests: Count = 800
    documents: Count = 200
    document_tokens: Tokens = 4_000
    exponent: Annotated[float, msgspec.Meta(ge=0)] = 0.9
    say_tokens: Range = (20, 100)
    reply_tokens: Range = (50, 200)

    def __post_init__(self) -> None:
        ordered(self)

    def make(self, rng: np.random.Generator) -> list[Session]:
        """Return the sessions."""
        root = Prompt.empty(0)
        pages = [root.extend(content(rng), self.document_tokens) for _ in range(self.documents)]
        weights = np.arange(1, self.documents + 1, dtype=np.float64) ** -self.exponent
        chosen = rng.choice(self.documents, size=self.requests, p=weights / weights.sum()).tolist()
        return [
            Session(f"one-{n}", question(rng, pages[which], self.say_tokens, self.reply_tokens))
            for n, which in enumerate(chosen)
        ]


class Rollouts(
    msgspec.Struct, frozen=True, kw_only=True, tag="rollouts", tag_field="shape", forbid_unknown_fields=True
):
    """RL rollouts: `samples` answers to each of `prompts` prompts at once, some of them very long.

    The length of an answer is lognormal: reply_tokens_mean is its median, reply_sigma its spread (1 is a long tail);
    max_tokens cuts it, 0 for no limit.  turns: an environment answers each but the last with tool_tokens after tool_s
    on average.  steps: training steps; the rollouts of each begin together when the last of the step before has ended
    and weights were updated for update_s, and no client waits for another; 0 for one stream of rollouts.
    """

    prompts: Count = 64
    samples: Count = 8
    prompt_tokens: Range = (500, 3_000)
    reply_tokens_mean: Tokens = 400
    reply_sigma: Annotated[float, msgspec.Meta(ge=0, le=5)] = 0.8
    max_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    turns: Range = (1, 1)
    tool_tokens: Range = (100, 1_000)
    tool_s: Seconds = 1.0
    steps: Annotated[int, msgspec.Meta(ge=0)] = 0
    update_s: Seconds = 5.0

    def __post_init__(self) -> None:
        ordered(self)
        if self.steps > self.prompts:
            raise ValueError(f"steps must be at most the prompts ({self.prompts}), got {self.steps}")

    def make(self, rng: np.random.Generator) -> list[Session]:
        """Return the sessions, all of one prompt after each other; with `steps` the one of the trainer."""
        made = []
        for which in range(self.prompts):
            prompt = Prompt.empty(0).extend(content(rng), draw(rng, self.prompt_tokens))
            made += [Session(f"{which}-{sample}", self._rollout(rng, prompt, sample)) for sample in range(self.samples)]
        if not self.steps:
            return made
        edges = np.linspace(0, self.prompts, self.steps + 1).astype(int) * self.samples
        forks = [
            Fork(tuple(made[first:last]), self.update_s if first else 0.0) for first, last in pairwise(edges.tolist())
        ]
        return [Session("trainer", partial(iter, forks))]

    def _rollout(self, rng: np.random.Generator, prompt: Prompt, sample: int) -> Callable[[], Iterator[Turn | Fork]]:
        turns = draw(rng, self.turns) if self.turns != (1, 1) else 1
        if turns == 1:
            return partial(talk, prompt, ((0, self._reply(rng), 0.0),), sample, self.max_tokens)
        plan = []
        for number in range(turns):
            say = draw(rng, self.tool_tokens) if number else 0
            plan.append((say, self._reply(rng), float(rng.exponential(self.tool_s))))
        return partial(talk, prompt, tuple(plan), content(rng), self.max_tokens)

    def _reply(self, rng: np.random.Generator) -> int:
        reply = max(1, round(rng.lognormal(np.log(self.reply_tokens_mean), self.reply_sigma)))
        return min(reply, self.max_tokens) if self.max_tokens else reply


class Agents(msgspec.Struct, frozen=True, kw_only=True, tag="agents", tag_field="shape", forbid_unknown_fields=True):
    """Agent loops: one system prompt for all, a context that grows with each tool's result, short pauses for tools."""

    sessions: Count = 64
    turns: Range = (10, 30)
    system_tokens: Tokens = 8_000
    tool_tokens: Range = (200, 2_000)
    reply_tokens: Range = (50, 400)
    tool_s: Seconds = 1.5

    def __post_init__(self) -> None:
        ordered(self)

    def make(self, rng: np.random.Generator) -> list[Session]:
        """Return the sessions."""
        opening = Prompt.empty(0).extend(content(rng), self.system_tokens)
        return [
            Session(
                f"agent-{n}",
                partial(
                    talk,
                    opening,
                    tuple(
                        (
                            draw(rng, self.tool_tokens),
                            draw(rng, self.reply_tokens),
                            float(rng.exponential(self.tool_s)),
                        )
                        for _ in range(draw(rng, self.turns))
                    ),
                    content(rng),
                ),
            )
            for n in range(self.sessions)
        ]


Single = MultiTurn | Hot | Zipf | Rollouts | Agents | AgentTree | SharedPrefix | ConversationReplay


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of a mix.  arrivals: of its own, None for the experiment's.  begins_s: before which none of it comes.

    headers: of each of its requests.
    """

    workload: Single
    tenant: str = ""
    arrivals: Arrivals | None = None
    begins_s: Seconds = 0.0
    headers: dict[str, str] = {}

    def __post_init__(self) -> None:
        if self.arrivals is not None and self.arrivals.kind == "closed":
            raise ValueError("arrivals of a part cannot be closed: clients are the experiment's")
        if self.begins_s and self.arrivals is None:
            raise ValueError("begins_s needs arrivals of the part's own")


class Mix(msgspec.Struct, frozen=True, kw_only=True, tag="mix", tag_field="shape", forbid_unknown_fields=True):
    """Several kinds of traffic at once, as of a tenant who floods the pool and of one who does not."""

    parts: Annotated[tuple[Part, ...], msgspec.Meta(min_length=1, max_length=100)]

    def make(self, rng: np.random.Generator) -> list[Session]:
        """Return the sessions of all parts, those without arrivals of their own in turns."""
        timed: list[Session] = []
        others: list[list[Session]] = []
        for number, part in enumerate(self.parts):
            headers = {name.lower(): value for name, value in part.headers.items()}
            made = [
                session._replace(id=f"{number}.{session.id}", tenant=part.tenant, headers=headers)
                for session in part.workload.make(rng)
            ]
            if part.arrivals is None:
                others.append(made)
                continue
            spread = part.arrivals.spread(made, rng)
            timed += [session._replace(arrives_s=(session.arrives_s or 0.0) + part.begins_s) for session in spread]
        return timed + _in_turns(others)


def _in_turns(lists: list[list[Session]]) -> list[Session]:
    """Return what is in all lists, each spread evenly over the whole."""
    placed = [
        ((place + 0.5) / len(each), number, each[place])
        for number, each in enumerate(lists)
        for place in range(len(each))
    ]
    return [session for _, _, session in sorted(placed, key=lambda entry: entry[:2])]


Recipe = Single | Mix
