"""Workloads of inference-perf, the benchmark of llm-d: its `shared_prefix` and `conversation_replay` data, its load.

Owns the reading of its configuration file (docs/config.md and docs/conversation_replay.md of
kubernetes-sigs/inference-perf, main of late 2026).  Names of fields are its own, so that what stands under
`data.shared_prefix` there is a recipe here.
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Literal

import msgspec
import numpy as np

from shoal.kernel import ConfigError, InvalidInput
from shoal.simulation.arrivals import Arrivals
from shoal.simulation.prompts import Prompt
from shoal.simulation.sessions import Session, Turn
from shoal.simulation.talks import Count, Seconds, Tokens, content
from shoal.wire.documents import read_document

MAX_MODEL_LEN = 225_000
"""Tokens at which inference-perf ends a conversation unless it is told otherwise."""

_MOST = 4_000_000
_MOST_REQUESTS = 100_000_000


class Distribution(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Lengths.  normal, lognormal (of this mean and deviation), uniform, poisson: within min and max.  fixed: mean."""

    type: Literal["normal", "lognormal", "uniform", "poisson", "fixed"] = "normal"
    min: float = 10
    max: float = 1024
    mean: float = 512
    std_dev: float = 200
    total_count: int | None = None

    def __post_init__(self) -> None:
        for name in ("min", "max", "mean", "std_dev"):
            if not 0 <= getattr(self, name) <= _MOST:
                raise ValueError(f"{name} must be 0 to {_MOST:,}, got {getattr(self, name):g}")
        if self.min > self.max:
            raise ValueError(f"min is {self.min:g} and max {self.max:g}")
        if self.type == "lognormal" and self.mean <= 0:
            raise ValueError("a lognormal distribution needs a mean above 0")

    def draw(self, rng: np.random.Generator) -> float:
        """Return one value."""
        match self.type:
            case "fixed":
                return self.mean
            case "uniform":
                return float(rng.uniform(self.min, self.max))
            case "poisson":
                value = float(rng.poisson(self.mean))
            case "lognormal":
                spread = math.log(1.0 + (self.std_dev / self.mean) ** 2)
                value = float(rng.lognormal(math.log(self.mean) - spread / 2, math.sqrt(spread)))
            case "normal":
                value = float(rng.normal(self.mean, self.std_dev))
        return min(self.max, max(self.min, value))


Length = Tokens | Distribution


class SharedPrefix(
    msgspec.Struct, frozen=True, kw_only=True, tag="shared_prefix", tag_field="shape", forbid_unknown_fields=True
):
    """Groups of prompts that share a beginning, in random order.

    requests: how many are sent, the prompts from the first again when they are used up; 0 for each once.
    enable_multi_turn_chat: the same question again is the next turn of its conversation.  pace_s: seconds after the
    turn before, but not before its answer.  seed: not read; the experiment has seeds.
    """

    num_groups: Count = 10
    num_prompts_per_group: Count = 10
    system_prompt_len: Length = 100
    question_len: Length = 50
    output_len: Length = 50
    question_distribution: Distribution | None = None
    output_distribution: Distribution | None = None
    enable_multi_turn_chat: bool = False
    max_model_len: Tokens = MAX_MODEL_LEN
    seed: int | None = None
    requests: Annotated[int, msgspec.Meta(ge=0, le=_MOST_REQUESTS)] = 0
    pace_s: Seconds = 0.0

    def __post_init__(self) -> None:
        if self.num_groups * self.num_prompts_per_group > _MOST_REQUESTS:
            raise ValueError(f"num_groups times num_prompts_per_group must be at most {_MOST_REQUESTS:,}")

    def make(self, rng: np.random.Generator) -> list[Session]:
        """Return one session per request, or with turns one per prompt."""
        asks: list[tuple[Prompt, int, int, int]] = []
        for _ in range(self.num_groups):
            opening = Prompt.empty(0).extend(content(rng), _length(self.system_prompt_len, rng))
            for _ in range(self.num_prompts_per_group):
                say = _length(self.question_distribution or self.question_len, rng)
                asks.append((opening, content(rng), say, _length(self.output_distribution or self.output_len, rng)))
        asks = [asks[place] for place in rng.permutation(len(asks))]
        requests = self.requests or len(asks)
        if not self.enable_multi_turn_chat:
            return [
                Session(f"one-{n}", partial(_asked, asks[n % len(asks)], 1, 0.0, self.max_model_len))
                for n in range(requests)
            ]
        rounds = [len(range(n, requests, len(asks))) for n in range(len(asks))]
        return [
            Session(f"chat-{n}", partial(_asked, ask, count, self.pace_s, self.max_model_len))
            for n, (ask, count) in enumerate(zip(asks, rounds, strict=True))
            if count
        ]


class ConversationReplay(
    msgspec.Struct, frozen=True, kw_only=True, tag="conversation_replay", tag_field="shape", forbid_unknown_fields=True
):
    """Conversations with one shared beginning and one of their own, turn after turn with pauses for tools.

    requests: how many are sent in all; a conversation that has ended begins again with the same prompts.  0 for each
    once.  seed: not read; the experiment has seeds.
    """

    num_conversations: Count = 100
    shared_system_prompt_len: Annotated[int, msgspec.Meta(ge=0, le=_MOST)] = 0
    dynamic_system_prompt_len: Distribution | None = None
    turns_per_conversation: Distribution | None = None
    input_tokens_per_turn: Distribution | None = None
    output_tokens_per_turn: Distribution | None = None
    tool_call_latency_sec: Distribution | None = None
    max_model_len: Tokens = MAX_MODEL_LEN
    seed: int | None = None
    requests: Annotated[int, msgspec.Meta(ge=0, le=_MOST_REQUESTS)] = 0

    def make(self, rng: np.random.Generator) -> list[Session]:
        """Return the conversations, as often as there are requests for."""
        shared = Prompt.empty(0).extend(content(rng), self.shared_system_prompt_len)
        plans: list[tuple[Prompt, int, tuple[tuple[int, int, float], ...]]] = []
        for _ in range(self.num_conversations):
            own = _length(self.dynamic_system_prompt_len, rng) if self.dynamic_system_prompt_len else 0
            opening = shared.extend(content(rng), own)
            count = _length(self.turns_per_conversation or 10, rng)
            plans.append((opening, content(rng), tuple(self._turn(rng) for _ in range(count))))
        sessions: list[Session] = []
        left = self.requests or sum(len(turns) for _, _, turns in plans)
        while left > 0:
            opening, said, turns = plans[len(sessions) % len(plans)]
            name, reply = f"chat-{len(sessions)}", content(rng)
            sessions.append(Session(name, partial(self._talk, opening, said, reply, turns[:left])))
            left -= len(turns[:left])
        return sessions

    def _turn(self, rng: np.random.Generator) -> tuple[int, int, float]:
        pause = self.tool_call_latency_sec
        say, reply = _length(self.input_tokens_per_turn or 256, rng), _length(self.output_tokens_per_turn or 256, rng)
        return say, reply, max(0.0, pause.draw(rng)) if pause else 0.0

    def _talk(
        self, prompt: Prompt, said: int, replied: int, turns: tuple[tuple[int, int, float], ...]
    ) -> Iterator[Turn]:
        pause_s = 0.0
        for number, (say, reply, tool_s) in enumerate(turns):
            asked, prompt = prompt.grow((said + number, say), (replied + number, reply))
            if prompt.tokens > self.max_model_len:
                return
            yield Turn(asked, reply, pause_s, reply, whole=prompt)
            pause_s = tool_s


class _Stage(msgspec.Struct):
    rate: float | None = None
    duration: float | None = None
    concurrency_level: int | None = None
    num_requests: int | None = None


class _Load(msgspec.Struct):
    type: str = "constant"
    stages: list[_Stage] = []


def read_perf(text: str, stage: int = 0) -> tuple[SharedPrefix | ConversationReplay, Arrivals]:
    """Read a configuration file of inference-perf and return one stage of its load.  stage: from 0.

    Its server, metrics and reports are not read.  Raises InvalidInput that names what cannot be played here.
    """
    try:
        document = read_document(text, "")
    except ConfigError as error:
        raise InvalidInput(f"not a configuration of inference-perf: {error}") from None
    try:
        data = document["data"]
        kind = data["type"]
        load = msgspec.convert(document.get("load", {}), _Load)
        if kind not in ("shared_prefix", "conversation_replay"):
            raise InvalidInput(f"data.type: {kind!r} cannot be played; shared_prefix and conversation_replay can")
        own = {key: value for key, value in (data.get(kind) or {}).items() if key != "multimodal"}
        recipe = msgspec.convert({"shape": kind, **own}, SharedPrefix | ConversationReplay)
    except (TypeError, KeyError, AttributeError) as error:
        raise InvalidInput(f"not a configuration of inference-perf: {error!r}") from None
    except msgspec.ValidationError as error:
        raise InvalidInput(str(error)) from None
    if not load.stages:
        raise InvalidInput("load.stages: give at least one stage; sweeps are `shoal twin run --load`")
    if not 0 <= stage < len(load.stages):
        raise InvalidInput(f"there are {len(load.stages)} stages, 0 to {len(load.stages) - 1}, and no {stage}")
    return _staged(recipe, load.type, load.stages[stage])


def _staged(
    recipe: SharedPrefix | ConversationReplay, kind: str, stage: _Stage
) -> tuple[SharedPrefix | ConversationReplay, Arrivals]:
    if kind == "concurrent":
        clients, requests = stage.concurrency_level or 0, stage.num_requests or 0
        if clients < 1 or not 1 <= requests <= _MOST_REQUESTS:
            raise InvalidInput("load.stages: a stage of `concurrent` needs concurrency_level and num_requests above 0")
        return msgspec.structs.replace(recipe, requests=requests), Arrivals(kind="closed", concurrency=clients)
    if kind not in ("constant", "poisson"):
        raise InvalidInput(f"load.type: {kind!r} cannot be played; constant, poisson and concurrent can")
    if not (stage.rate and stage.duration and 0 < stage.rate < math.inf and 0 < stage.duration < math.inf):
        raise InvalidInput(f"load.stages: a stage of `{kind}` needs a rate and a duration above 0 and finite")
    if stage.rate * stage.duration > _MOST_REQUESTS:
        raise InvalidInput(f"load.stages: rate times duration must be at most {_MOST_REQUESTS:,} requests")
    if isinstance(recipe, ConversationReplay):
        raise InvalidInput("load.type: conversation_replay is driven by clients; set `concurrent`")
    requests = max(1, round(stage.rate * stage.duration))
    pace_s = recipe.num_groups * recipe.num_prompts_per_group / stage.rate
    arrivals = Arrivals(kind="constant" if kind == "constant" else "poisson", rate_per_s=stage.rate)
    return msgspec.structs.replace(recipe, requests=requests, pace_s=pace_s), arrivals


def _length(length: int | Distribution, rng: np.random.Generator) -> int:
    return max(1, round(length.draw(rng))) if isinstance(length, Distribution) else length


def _asked(ask: tuple[Prompt, int, int, int], rounds: int, pace_s: float, most: int) -> Iterator[Turn]:
    """Ask the same again and again; each time all that was said before goes first."""
    prompt, said, say, reply = ask
    for number in range(rounds):
        asked, prompt = prompt.grow((said, say), (said + 1, reply))
        if prompt.tokens > most:
            return
        yield Turn(asked, reply, at_s=number * pace_s, max_tokens=reply, whole=prompt)
