"""What happens to endpoints: they join, become ready, leave, list models, report load, and tell what their caches hold.

Owns what each such event changes in the fleet, the models, the indexes and the peers' bookings.  Requests are the
router's.
"""

from shoal.pool import EndpointState
from shoal.prefix import EstimatedIndex, capacity_blocks
from shoal.routing.books import Books
from shoal.routing.candidates import Candidates
from shoal.routing.events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    EndpointChanged,
    EndpointJoined,
    EndpointLeft,
    Event,
    KvStreamChanged,
    LoadSeen,
    ModelsSeen,
)
from shoal.routing.exact import ExactCaches
from shoal.routing.fleet import Fleet, Member
from shoal.routing.models import ModelTable
from shoal.routing.peers import Peers
from shoal.scheduling import Scheduler

# After a start or the loss of a peer, load that others put on the engines is read from their metrics; own books replace
# it over this time.
ADOPTION_S = 20.0


class Changes:
    """The events of endpoints.  shares_pool: see `Router`."""

    __slots__ = (
        "_books",
        "_candidates",
        "_exact",
        "_fleet",
        "_index",
        "_models",
        "_peers",
        "_scheduler",
        "_shares_pool",
        "_started_at",
    )

    def __init__(
        self,
        fleet: Fleet,
        books: Books,
        models: ModelTable,
        candidates: Candidates,
        index: EstimatedIndex,
        exact: ExactCaches,
        peers: Peers,
        *,
        shares_pool: bool,
    ) -> None:
        self._fleet = fleet
        self._books = books
        self._models = models
        self._candidates = candidates
        self._index = index
        self._exact = exact
        self._peers = peers
        self._shares_pool = shares_pool
        self._scheduler: Scheduler | None = None
        self._started_at: float | None = None

    def follow(self, scheduler: Scheduler) -> None:
        """Tell this scheduler of endpoints that leave."""
        self._scheduler = scheduler

    def handle(self, event: Event, now: float) -> None:
        """Apply an event that concerns endpoints, other than a reading; others change nothing."""
        if self._started_at is None:
            self._started_at = now
        match event:
            case BlocksStored():
                if self._fleet.get(event.endpoint_id) is not None:
                    self._exact.stored(event)
            case BlocksRemoved():
                self._exact.removed(event)
            case BlocksCleared():
                self._cleared(event)
            case KvStreamChanged():
                if self._fleet.get(event.endpoint_id) is not None:
                    self._exact.changed(event)
            case ModelsSeen():
                self._models_seen(event)
            case EndpointJoined():
                self._joined(event, now)
            case EndpointChanged():
                self._changed(event)
            case EndpointLeft():
                self._left(event.endpoint_id, now)

    def _joined(self, event: EndpointJoined, now: float) -> None:
        known = self._fleet.get(event.endpoint.id)
        if known is not None:
            self._fleet.join(event.endpoint, event.state, known.slot)
            return
        member = self._fleet.join(event.endpoint, event.state, self._index.open_slot())
        self._peers.endpoint_joined(member, now)

    def _changed(self, event: EndpointChanged) -> None:
        member = self._fleet.get(event.endpoint_id)
        if member is None:
            return
        if event.state is EndpointState.LOADING and member.state is not EndpointState.LOADING:
            # It went away: whatever it held, a restarted engine starts with an empty cache.
            self._index.clear(member.slot)
        if event.state is EndpointState.READY and member.state is EndpointState.LOADING:
            self._candidates.succeeded(member)
        self._fleet.set_state(member, event.state)

    def _left(self, endpoint_id: str, now: float) -> None:
        member = self._fleet.leave(endpoint_id)
        if member is None:
            return
        self._index.remove(member.slot)
        self._exact.left(endpoint_id)
        self._models.left(endpoint_id, now)
        self._candidates.forget(endpoint_id)
        if self._scheduler is not None:
            self._scheduler.endpoint_left(endpoint_id)

    def _models_seen(self, event: ModelsSeen) -> None:
        if self._fleet.get(event.endpoint_id) is not None:
            self._models.update(event.endpoint_id, event.models)
            self._exact.renamed(event.endpoint_id)
            self._candidates.invalidate()

    def _cleared(self, event: BlocksCleared) -> None:
        member = self._fleet.get(event.endpoint_id)
        if member is not None:
            # Whatever the estimate believes of it is as old.
            self._index.clear(member.slot)
            self._exact.cleared(event)

    def load_seen(self, event: LoadSeen, now: float) -> None:
        """Take one reading of an endpoint's metrics."""
        if self._started_at is None:
            self._started_at = now
        member = self._fleet.get(event.endpoint_id)
        if member is None:
            return
        before, signals = member.signals, event.signals
        if before is not None and _went_back(before.prefix_query_tokens, signals.prefix_query_tokens):
            # Another process answers at this address: its cache is empty, and the failures were the old one's.
            self._index.clear(member.slot)
            self._candidates.succeeded(member)
        if self._fleet.take_signals(member, signals, now) and signals.num_blocks and signals.block_size_tokens:
            self._index.set_capacity(member.slot, capacity_blocks(signals.num_blocks, signals.block_size_tokens))
        self._books.read(member, signals)
        foreign = 0.0
        if signals.running is not None:
            excess = signals.running + (signals.waiting or 0.0) - self._fleet.cells["inflight_requests"][member.row]
            if excess > 0.0:
                foreign = self._foreign(member, excess, now)
        self._fleet.set_foreign(member, foreign)

    def _foreign(self, member: Member, excess: float, now: float) -> float:
        """Return how many of the requests that an engine has beyond our own count as somebody else's."""
        if self._peers.is_connected:
            # What a lost peer sent goes on behind a gateway, and only the engines know of it then.
            return _fading(now - self._peers.lost_at) * min(excess, self._peers.orphans(member.endpoint.id))
        if self._shares_pool or self._started_at is None:
            return excess
        return _fading(now - self._started_at) * excess


def _fading(age_s: float) -> float:
    """How much of a load that only the engines know is still counted, 1 falling to 0."""
    return max(0.0, 1.0 - age_s / ADOPTION_S)


def _went_back(before: float | None, after: float | None) -> bool:
    return before is not None and after is not None and after < before
