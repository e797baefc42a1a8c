"""Prefill on one engine and decode on another: when it is done so, and how long KV is on its way.

Owns the links between engines.  Which engine prefills and which decodes is the routers' choice.
"""

from enum import StrEnum
from typing import Annotated

import msgspec

from shoal.simulation.talks import Seconds


class Role(StrEnum):
    """What an engine does: prefill for others, decode what others prefilled, or all of a request by itself."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class Handover(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a prompt is prefilled by another engine than the one that decodes.

    least_tokens: tokens of a prompt that the router does not believe in the cache of the engine that decodes, from
    which on; below it that engine prefills by itself.  latency_s: of a transfer beside its bytes over the bandwidth.
    config: of the router that places prefills, as a path until it is read and then its text; "" for that of the others.
    """

    least_tokens: Annotated[int, msgspec.Meta(ge=1, le=1_000_000_000)] = 1
    latency_s: Seconds = 0.001
    config: str = ""


class Links:
    """The links of engines, each with one transfer after the other at either end.  latency_s: of each transfer."""

    __slots__ = ("_free_at", "_latency_s")

    def __init__(self, latency_s: float) -> None:
        self._latency_s = latency_s
        self._free_at: dict[str, float] = {}

    def send(self, sender: str, receiver: str, seconds: float, now: float) -> float:
        """Return when what takes `seconds`, and may begin at `now`, has come from one engine to another."""
        begins = max(now, self._free_at.get(sender, 0.0), self._free_at.get(receiver, 0.0))
        self._free_at[sender] = self._free_at[receiver] = begins + seconds
        return begins + seconds + self._latency_s
