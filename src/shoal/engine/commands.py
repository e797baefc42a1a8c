"""What an engine tells its host to do."""

from typing import NamedTuple

import msgspec

from shoal.engine.changes import CacheChanged


class Emit(NamedTuple):
    """Hand new tokens to their requests, once per step.

    tokens: (request_id, how many); empty after a step of prefill chunks only.  step_tokens: tokens that the step
    computed, prefill and decode together.
    """

    tokens: list[tuple[str, int]]
    step_tokens: int


class Finish(msgspec.Struct, frozen=True, kw_only=True):
    """A request is done and holds no block any more.

    reason: `length`, `stop` or `abort`.  cached_tokens: prompt tokens found in the prefix cache when it was first
    admitted.  Times are on the machine's clock; admitted_at and first_token_at are None when it never came so far.
    """

    request_id: str
    reason: str
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    preemptions: int
    arrived_at: float
    admitted_at: float | None
    first_token_at: float | None
    finished_at: float


class Refuse(msgspec.Struct, frozen=True, kw_only=True):
    """A request can never fit into the KV cache, or its id is taken."""

    request_id: str
    message: str


class ConfirmReset(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the prefix cache was emptied; it was not when a request still holds blocks.

    is_forced: as it was asked for.
    """

    is_done: bool
    is_forced: bool = False


class ConfirmPause(msgspec.Struct, frozen=True):
    """A pause is complete, or was ended before it was."""


Command = Emit | Finish | Refuse | ConfirmReset | ConfirmPause | CacheChanged
