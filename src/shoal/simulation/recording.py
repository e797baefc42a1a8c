"""Journals of the twin: what its routers were told and commanded, in the form that a live pool writes.

Owns the keeping; the form is `routing.journal`'s.
"""

from collections.abc import Sequence

from shoal.routing import Command, Event
from shoal.routing.journal import MAGIC, Opening, Step, encode
from shoal.simulation.cluster import ClusterConfig


class Recording:
    """A journal per router of a cluster; give it to the cluster as `on_step`."""

    __slots__ = ("_frames",)

    def __init__(self, config: ClusterConfig) -> None:
        texts = [config.router] * config.routers
        if config.has_roles:
            texts += [config.prefill_router] * config.routers
        self._frames = [
            [MAGIC, encode(Opening(config.seed + number, text, config.routers > 1, 0, f"{number}"))]
            for number, text in enumerate(texts)
        ]

    def __call__(self, number: int, now: float, event: Event, commands: Sequence[Command]) -> None:
        """Take a step of a router."""
        self._frames[number].append(encode(Step(now, event, commands)))

    def files(self) -> list[bytes]:
        """Return the journals, one per router."""
        return [b"".join(frames) for frames in self._frames]
