"""Bursts: requests that come together with the same cold prefix and should share one prefill.

Owns the groups of the moment and where each one goes.  A group is opened by a request whose prefix no endpoint holds;
those that follow within the window and share most of their prompt with it join it, until its endpoint has its share.
"""

from collections import OrderedDict
from collections.abc import Sequence

from shoal.pool import Decision, FleetView, Request
from shoal.prefix import BLOCK_TOKENS
from shoal.prefix.hashing import REACH, Blocks, hashes_within
from shoal.scheduling.exact_producers import BurstPrefixCacheProducer

MAX_HASHES = 50_000
# How much busier than the mean of the candidates a group may make its endpoint: by the samples of one prompt.
_LEAD_REQUESTS = 8.0


class Group:
    """Requests of one burst.  counts: how many each endpoint got, in the order in which they came in."""

    __slots__ = ("counts", "last_at")

    def __init__(self, now: float) -> None:
        self.counts: dict[str, int] = {}
        self.last_at = now


class Bursts:
    """The open groups, found by the hashes of what they share."""

    __slots__ = ("_by_hash", "settings")

    def __init__(self, settings: BurstPrefixCacheProducer) -> None:
        self.settings = settings
        self._by_hash: OrderedDict[int, Group] = OrderedDict()

    def join(self, request: Request, blocks: Blocks, decision: Decision, view: FleetView, now: float) -> Decision:
        """Have a request of a burst go where its group goes, with the others of the decision as fallbacks."""
        group = self._find(blocks, now)
        if group is None:
            # A prefix that somebody holds already is no burst: the scores know where it is.
            if view.column("matched_tokens").max() * 2 < request.prompt_tokens:
                self._note(None, blocks, decision.chosen[0], now)
            return decision
        chosen = decision.chosen
        name = self._place(group, decision.candidates, view, request)
        if name is not None and name != chosen[0]:
            chosen = (name, *[each for each in chosen if each != name])[: len(chosen)]
            decision = decision._replace(chosen=chosen)
        self._note(group, blocks, chosen[0], now)
        return decision

    def _find(self, blocks: Blocks, now: float) -> Group | None:
        """Return the open group that shares most of this prompt."""
        window_s = self.settings.window_duration_ms / 1000
        by_hash = self._by_hash
        while by_hash and next(iter(by_hash.values())).last_at + window_s < now:
            by_hash.popitem(last=False)
        for key in reversed(self._shared(blocks)):
            group = by_hash.get(key)
            if group is not None and group.last_at + window_s >= now:
                return group
        return None

    def _place(self, group: Group, candidates: Sequence[str], view: FleetView, request: Request) -> str | None:
        """Return the endpoint that takes the next of a group: one that has its prefix and room, else the least busy one
        that has not had its share; None when all have."""
        is_by_tokens = self.settings.balance_by == "tokens"
        own = float(request.prompt_tokens) if is_by_tokens else 1.0
        loads = view.values("inflight_uncached_tokens" if is_by_tokens else "inflight_requests")
        load = {endpoint.id: load for endpoint, load in zip(view.endpoints, loads, strict=True)}
        ceiling = sum(load[name] for name in candidates) / len(candidates) + _LEAD_REQUESTS * own
        limit = self.settings.max_per_replica
        open_names = [name for name in candidates if limit < 0 or group.counts.get(name, 0) < limit]
        for name in group.counts:
            if name in open_names and load[name] + own <= ceiling:
                return name
        return min(open_names, key=load.__getitem__, default=None)

    def _note(self, group: Group | None, blocks: Blocks, endpoint_id: str, now: float) -> None:
        """Count a request that was sent; one without a group opens one."""
        by_hash = self._by_hash
        if group is None or sum(group.counts.values()) >= self.settings.max_batch_size:
            group = Group(now)
            for key in self._shared(blocks):
                by_hash[key] = group
                by_hash.move_to_end(key)
            while len(by_hash) > MAX_HASHES:
                by_hash.popitem(last=False)
        group.counts[endpoint_id] = group.counts.get(endpoint_id, 0) + 1
        group.last_at = now

    def _shared(self, blocks: Blocks) -> list[int]:
        """The hashes that cover at least half of a prompt, and as much as has to be shared."""
        settings = self.settings
        count = len(blocks)
        limit = settings.max_prefix_tokens_to_match // BLOCK_TOKENS
        if limit:
            count = min(count, hashes_within(limit))
        wanted = settings.min_colocate_blocks * settings.block_size_tokens // BLOCK_TOKENS
        least = max(REACH[min(count, len(REACH) - 1)] // 2, wanted)
        return [key for key in blocks[min(hashes_within(least), max(count - 1, 0)) : count].tolist() if key]
