"""Who publishes KV events, and the same by rows of the fleet, for array operations over a thousand endpoints.

Owns what is known of each endpoint's streams; what their blocks are is `prefix.exact`'s.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shoal.pool.kvevents import KvState
from shoal.routing.fleet import Member

NOWHERE = -1
Numbers = npt.NDArray[np.intp]


class Publishers:
    """The streams of one endpoint.

    model: the name that its keys are made with.  slots: of each rank in the index.  block_sizes: of each rank that has
    stored something, in tokens.
    """

    __slots__ = ("block_sizes", "model", "slots", "state")

    def __init__(self, model: str) -> None:
        self.model = model
        self.state = KvState.NONE
        self.slots: dict[int, int] = {}
        self.block_sizes: dict[int, int] = {}

    @property
    def is_known(self) -> bool:
        """Whether what it holds can be told."""
        return self.state is KvState.FRESH and bool(self.block_sizes)


class Layout(NamedTuple):
    """The publishers by row of the fleet.

    slots, sizes: of an endpoint that has one stream, else NOWHERE and 0.  of_model: the number of its model among
    `models`, NOWHERE where nothing can be told.  several: rows of endpoints with more than one stream.
    """

    slots: Numbers
    sizes: Numbers
    of_model: Numbers
    models: dict[str, int]
    several: list[int]


def lay_out(rows: Sequence[Member], publishers: Mapping[str, Publishers]) -> Layout:
    """Return the publishers by row."""
    slots, sizes, of_model = np.full((3, len(rows)), NOWHERE)
    sizes[:] = 0
    models: dict[str, int] = {}
    several: list[int] = []
    for row, member in enumerate(rows):
        mine = publishers.get(member.endpoint.id)
        if mine is None or not mine.is_known:
            continue
        of_model[row] = models.setdefault(mine.model, len(models))
        if len(mine.slots) > 1:
            several.append(row)
        else:
            ((rank, size),) = mine.block_sizes.items()
            slots[row], sizes[row] = mine.slots[rank], size
    return Layout(slots, sizes, of_model, models, several)
