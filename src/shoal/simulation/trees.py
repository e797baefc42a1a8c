"""Agents that start agents: a tree of sessions, each with a context of its own that grows.

Owns the recipe.  An agent calls tools for a while, starts several others at once with a task each, waits for all of
them, takes their results into its context, and goes on.
"""

from collections.abc import Iterator
from functools import partial
from typing import Annotated

import msgspec
import numpy as np

from shoal.simulation.prompts import Prompt
from shoal.simulation.sessions import Fork, Session, Turn
from shoal.simulation.talks import Count, Range, Seconds, Tokens, content, draw, ordered

MAX_DEPTH = 4


class AgentTree(
    msgspec.Struct, frozen=True, kw_only=True, tag="agent-tree", tag_field="shape", forbid_unknown_fields=True
):
    """Agents with subagents.

    rounds: how often an agent forks; between forks it has `turns` turns, and so has it before the first one and after
    the last.  fan_out: subagents of a fork.  depth: 1 for subagents that start none of their own.  All agents of one
    level share a system prompt of system_tokens, subagents one of sub_system_tokens; inherits_context: subagents begin
    with all that their parent knows instead.  result_tokens: what the parent takes over of each.
    """

    sessions: Count = 24
    rounds: Range = (1, 3)
    turns: Range = (2, 6)
    fan_out: Range = (2, 5)
    sub_turns: Range = (3, 10)
    depth: Annotated[int, msgspec.Meta(ge=1, le=MAX_DEPTH)] = 1
    system_tokens: Tokens = 8_000
    sub_system_tokens: Tokens = 3_000
    inherits_context: bool = False
    task_tokens: Range = (100, 800)
    tool_tokens: Range = (200, 2_000)
    reply_tokens: Range = (50, 400)
    result_tokens: Range = (100, 600)
    tool_s: Seconds = 1.5

    def __post_init__(self) -> None:
        ordered(self)

    def make(self, rng: np.random.Generator) -> list[Session]:
        """Return one session per tree; its subagents are sessions of its forks."""
        root = Prompt.empty(0)
        main = root.extend(content(rng), self.system_tokens)
        sub = root.extend(content(rng), self.sub_system_tokens)
        return [
            Session(f"tree-{n}", partial(self._agent, f"tree-{n}", main, sub, content(rng), self.depth))
            for n in range(self.sessions)
        ]

    def _agent(self, name: str, opening: Prompt, sub: Prompt, seed: int, depth: int) -> Iterator[Turn | Fork]:
        """Yield what one agent does; its seed says all, so that it is the same each time."""
        rng = np.random.default_rng(seed)
        prompt = opening.extend(content(rng), draw(rng, self.task_tokens))
        is_sub = depth < self.depth
        rounds = draw(rng, self.rounds) if depth else 0
        for number in range(rounds + 1):
            for turn in range(draw(rng, self.sub_turns if is_sub else self.turns)):
                is_first = not number and not turn
                tool = (0, 0) if is_first else (content(rng), draw(rng, self.tool_tokens))
                reply = draw(rng, self.reply_tokens)
                pause_s = 0.0 if is_first else float(rng.exponential(self.tool_s))
                asked, prompt = prompt.grow(tool, (content(rng), reply))
                yield Turn(asked, reply, pause_s, whole=prompt)
            if number == rounds:
                return
            begins = prompt if self.inherits_context else sub
            names = [f"{name}/{number}.{n}" for n in range(draw(rng, self.fan_out))]
            yield Fork(
                tuple(Session(each, partial(self._agent, each, begins, sub, content(rng), depth - 1)) for each in names)
            )
            for _ in names:
                prompt = prompt.extend(content(rng), draw(rng, self.result_tokens))
