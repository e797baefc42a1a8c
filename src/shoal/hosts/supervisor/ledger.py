"""What the workers have been told of the fleet, so that a new one can be told the same.

Pure bookkeeping over fleet events.  Learning what is true is the keeper's (`hosts.fleet`); sending is `feeds`.
"""

from collections.abc import Iterable

from shoal.pool import Endpoint, EndpointState, ServedModel, Signals
from shoal.routing import events

FRESH_S = 6.0
"""Age at which a reading of load is not passed on any more: the router would not believe it either."""


class _Row:
    __slots__ = ("endpoint", "models", "signals", "signals_at", "state")

    def __init__(self, endpoint: Endpoint, state: EndpointState) -> None:
        self.endpoint = endpoint
        self.state = state
        self.models: tuple[ServedModel, ...] | None = None
        self.signals: Signals | None = None
        self.signals_at = 0.0


class Ledger:
    """The present fleet as a list of events.  `now` is seconds of any clock that does not go back."""

    __slots__ = ("_rows", "config_text")

    def __init__(self) -> None:
        self._rows: dict[str, _Row] = {}
        self.config_text: str | None = None

    def apply(self, told: Iterable[events.Event], now: float) -> None:
        """Take over what the workers are being told."""
        for event in told:
            match event:
                case events.EndpointJoined():
                    self._join(event)
                case events.EndpointLeft():
                    self._rows.pop(event.endpoint_id, None)
                case events.Configured():
                    self.config_text = event.text
                case events.EndpointChanged() | events.ModelsSeen() | events.LoadSeen():
                    self._update(event, now)

    def present(self, now: float) -> list[events.Event]:
        """Return what brings a router that knows nothing, or that missed something, to the present."""
        told: list[events.Event] = []
        if self.config_text is not None:
            told.append(events.Configured(self.config_text))
        for endpoint_id, row in sorted(self._rows.items()):
            told.append(events.EndpointJoined(row.endpoint, row.state))
            # A router that knew the endpoint takes its labels from the join, its state from the change.
            told.append(events.EndpointChanged(endpoint_id, row.state))
            if row.models is not None:
                told.append(events.ModelsSeen(endpoint_id, row.models))
            if row.signals is not None and now - row.signals_at <= FRESH_S:
                told.append(events.LoadSeen(endpoint_id, row.signals))
        return told

    def ids(self) -> set[str]:
        """Return the ids of the fleet."""
        return set(self._rows)

    def ready(self) -> dict[str, Endpoint]:
        """Return the endpoints that may be offered requests, by id."""
        return {
            endpoint_id: row.endpoint for endpoint_id, row in self._rows.items() if row.state is EndpointState.READY
        }

    def copy(self) -> "Ledger":
        """Return a ledger that can be tried on events without telling anybody."""
        other = Ledger()
        other.config_text = self.config_text
        for endpoint_id, row in self._rows.items():
            other._rows[endpoint_id] = _Row(row.endpoint, row.state)
        return other

    def _join(self, event: events.EndpointJoined) -> None:
        row = self._rows.get(event.endpoint.id)
        if row is None:
            self._rows[event.endpoint.id] = _Row(event.endpoint, event.state)
        else:
            row.endpoint, row.state = event.endpoint, event.state

    def _update(self, event: events.EndpointChanged | events.ModelsSeen | events.LoadSeen, now: float) -> None:
        row = self._rows.get(event.endpoint_id)
        if row is None:
            return
        match event:
            case events.EndpointChanged():
                row.state = event.state
                if event.state is EndpointState.LOADING:
                    row.signals = None
            case events.ModelsSeen():
                row.models = event.models
            case events.LoadSeen():
                row.signals, row.signals_at = event.signals, now


def is_about_readiness(event: events.Event) -> bool:
    """Whether an event can change which endpoints may be offered requests."""
    return isinstance(event, events.EndpointJoined | events.EndpointChanged | events.EndpointLeft)
