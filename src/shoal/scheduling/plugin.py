"""What a scheduling plugin is: the protocols that the scheduler calls, and the marks on its parameters.

A plugin is a small class.  `type` is its name in a configuration file, its docstring is its page in the
documentation, and its keyword-only constructor is its schema: each parameter's annotation is the type that a
file may give, snake_case names are read as camelCase, and a plain string in `Annotated[...]` documents it.
Which plugins exist is `registry`; how a file is read is `shoal.routing.config`.
"""

from collections.abc import Mapping
from typing import ClassVar, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from shoal.pool import Decision, FleetView, Request

Scores: TypeAlias = npt.NDArray[np.float64]
Mask: TypeAlias = npt.NDArray[np.bool_]

FEW = 16
"""Up to this many candidates plain numbers are cheaper than arrays."""


class Key(NamedTuple):
    """Mark: the parameter's name in a file where it is not the camelCase of its Python name."""

    name: str


class Ref:
    """Mark: the parameter names a configured plugin of one of `types`; "" means the default one."""

    __slots__ = ("types",)

    def __init__(self, *types: str) -> None:
        self.types = types


class Deprecated(NamedTuple):
    """Mark: the parameter is read and used, with a warning that says `instead`."""

    instead: str


class Ignored(NamedTuple):
    """Mark: the parameter is read and has no effect, with a warning that says `why`.

    alike: values that ask for what Shoal does anyhow, which are no reason for a warning.
    """

    why: str
    alike: tuple[object, ...] = ()


@runtime_checkable
class Plugin(Protocol):
    """What every plugin has."""

    type: ClassVar[str]


@runtime_checkable
class Filter(Protocol):
    """Narrows the candidates."""

    def keep(self, request: Request, view: FleetView) -> Mask:
        """Return one bool per candidate, true for those that stay."""
        ...


@runtime_checkable
class Scorer(Protocol):
    """Says how good each candidate is."""

    def score(self, request: Request, view: FleetView) -> Scores:
        """Return one value per candidate, 0 (worst) to 1 (best); NaN where nothing is known, which counts as 0.

        A class with `is_within = True` never returns anything else, so that nobody has to look.
        """
        ...


@runtime_checkable
class FewScorer(Scorer, Protocol):
    """A scorer that for up to `FEW` candidates can do without arrays, at a fraction of the cost."""

    def score_few(self, request: Request, view: FleetView) -> list[float] | None:
        """Return what `score` would, every value known and of 0 to 1; None where it has to be asked after all."""
        ...


@runtime_checkable
class Picker(Protocol):
    """Chooses by the weighted sum of the scores."""

    max_num_of_endpoints: int

    def pick(self, total: Scores, chance: np.random.Generator) -> list[int]:
        """Return up to `max_num_of_endpoints` distinct positions of `total`, the target first."""
        ...


@runtime_checkable
class Admitter(Protocol):
    """Says who is not let in at all."""

    def objection(self, request: Request, priority: int, view: FleetView) -> str:
        """Return why `request` is refused, for its client; "" when it may go on.  view: before any filter."""
        ...


@runtime_checkable
class Observer(Protocol):
    """Learns from what was sent: the only place where a plugin may change its own state."""

    def dispatched(self, request: Request, view: FleetView, decision: Decision, now: float) -> None:
        """Note that `request` goes to `decision.chosen[0]`.  view: the candidates before any filter."""
        ...

    def endpoint_left(self, endpoint_id: str) -> None:
        """Forget an endpoint that is gone."""
        ...


@runtime_checkable
class Releasing(Protocol):
    """Keeps account of what is in flight by itself, on top of being an Observer."""

    def released(self, request_id: str) -> None:
        """Note that a request is over, however it ended; maybe one that this instance was never told of."""
        ...


@runtime_checkable
class Answering(Protocol):
    """Adds headers to the client's response."""

    def response_header_names(self) -> tuple[str, ...]:
        """Return the lower-case names that it may give: the gateway must know them beforehand."""
        ...

    def response_headers(self, request: Request, decision: Decision) -> tuple[tuple[str, str], ...]:
        """Return (lower-case name, value) pairs."""
        ...


@runtime_checkable
class Listening(Protocol):
    """Reads request headers, so the host must keep them on the Request."""

    def request_headers(self) -> tuple[str, ...]:
        """Return lower-case names."""
        ...


@runtime_checkable
class Drawing(Protocol):
    """Needs chance outside a picker."""

    def draw_from(self, stream: np.random.Generator) -> None:
        """Take the only source of chance that the plugin may use."""
        ...


@runtime_checkable
class Connected(Protocol):
    """Refers to other plugins by name."""

    def connect(self, plugins: Mapping[str, object]) -> None:
        """Look up what its parameters name; `plugins` holds every configured one by its name."""
        ...


@runtime_checkable
class Adopting(Protocol):
    """Keeps its state when a new configuration is loaded."""

    def adopt(self, previous: object) -> None:
        """Take over the state of `previous`, an instance of the same class with the same parameters."""
        ...
