"""What is known of the engines' caches: the events of each endpoint, how far they can be trusted, and what they answer.

Owns the slots of publishers in the exact index, the blocks that were sent and are not confirmed yet, and the worth of a
tier in tokens.  How keys are stored is `prefix.exact`; what the estimate says is the router's other index.
"""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shoal.pool.kvevents import KvState, Tier
from shoal.prefix import read_blocks
from shoal.prefix.exact import ExactIndex
from shoal.prefix.match import ExactMatch
from shoal.routing.agreement import Agreement
from shoal.routing.books import Flight
from shoal.routing.events import BlocksCleared, BlocksRemoved, BlocksStored, KvStreamChanged
from shoal.routing.fetches import PromptKeys
from shoal.routing.fleet import Member
from shoal.routing.publishers import NOWHERE, Layout, Numbers, Publishers, lay_out
from shoal.scheduling.exact_producers import PrecisePrefixCacheProducer

# A publisher is a rank of an endpoint; no engine in the field has more on one address.
MAX_RANKS = 256
_TIERS = tuple(Tier)
_NO_BUDGET_BYTES = 1 << 20
_ALL_BLOCKS = 1 << 40

Floats = npt.NDArray[np.float64]


class Held(NamedTuple):
    """What the index says of one prompt.

    model: that its keys were made for.  matches: by block size, in tokens.  prompt_tokens: exact.
    """

    caches: "ExactCaches"
    model: str
    matches: dict[int, ExactMatch]
    prompt_tokens: int

    def tokens(self, member: Member) -> int | None:
        """Return the prompt tokens that are cached there on any tier; None where the estimate has to do."""
        return self.caches.cached(self, member)

    def worth(self, member: Member, s_per_token: float) -> float | None:
        """Return the prompt tokens that need no prefill there, less what loading them costs; None as `tokens`.

        s_per_token: seconds of prefill per token on that endpoint.
        """
        return self.caches.worth(self, member, s_per_token)

    def worths(self, rows: list[Member], s_per_token: Floats) -> Floats:
        """Return the same for all rows of the fleet, NaN for None.  s_per_token: of each."""
        return self.caches.worths(self, rows, s_per_token)


class ExactCaches:
    """The exact index with its publishers.  settings: of the plugin that asks for it, None while none does.

    base_at: the name of the base model by which the blocks of an endpoint go.  is_on: whether anything is kept.
    """

    __slots__ = (
        "_agreement",
        "_base_at",
        "_expected",
        "_expiring",
        "_index",
        "_laid_out",
        "_layout",
        "_load_s",
        "_publishers",
        "_ttl_s",
        "_weights",
        "is_on",
    )

    def __init__(self, settings: PrecisePrefixCacheProducer | None, base_at: Callable[[str], str]) -> None:
        self._base_at = base_at
        self._index = ExactIndex(_NO_BUDGET_BYTES)
        self.is_on = False
        self._publishers: dict[str, Publishers] = {}
        self._laid_out: list[Member] | None = None
        self._agreement = Agreement()
        self._expected: dict[str, tuple[str, int, tuple[bytes, ...]]] = {}
        self._expiring: deque[tuple[float, str]] = deque()
        self.configure(settings)

    def configure(self, settings: PrecisePrefixCacheProducer | None) -> None:
        """Take changed parameters; an index that is there keeps its size."""
        if settings is None or not self.is_on:
            self._index = ExactIndex(settings.budget_bytes if settings is not None else _NO_BUDGET_BYTES)
            self._agreement = Agreement()
            self._publishers.clear()
            self._laid_out = None
            self._expected.clear()
            self._expiring.clear()
        self.is_on = settings is not None
        if settings is None:
            return
        self._ttl_s = settings.speculative_ttl_s
        self._weights = settings.tier_weights
        self._load_s = {
            Tier.CPU: settings.cpu_load_s_per_token,
            Tier.DISK: settings.disk_load_s_per_token,
            Tier.SHARED: settings.shared_load_s_per_token,
        }

    def prepare(self) -> bool:
        """See `ExactIndex.prepare`; nothing is taken while it is off."""
        return self.is_on and self._index.prepare()

    # ------------------------------------------------------------------ what engines say

    def stored(self, event: BlocksStored) -> None:
        """Note blocks that an endpoint holds now."""
        if not self.is_on:
            return
        publishers = self._publishers_of(event.endpoint_id)
        slot = self._slot(publishers, event.rank)
        if slot is None:
            return
        if publishers.block_sizes.get(event.rank) != event.block_size_tokens:
            publishers.block_sizes[event.rank] = event.block_size_tokens
            self._laid_out = None
        self._index.store(slot, read_blocks(event.keys), event.tier)

    def removed(self, event: BlocksRemoved) -> None:
        """Note blocks that an endpoint dropped."""
        publishers = self._publishers.get(event.endpoint_id)
        slot = publishers.slots.get(event.rank) if publishers else None
        if slot is not None:
            keys = read_blocks(event.keys)
            self._index.evict(slot, keys, event.tier)
            if self._expected:
                # What was sent there had come and is gone again.
                self._index.evict(slot, keys, Tier.EXPECTED)

    def cleared(self, event: BlocksCleared) -> None:
        """Forget all that a publisher held."""
        publishers = self._publishers.get(event.endpoint_id)
        for rank, slot in (publishers.slots if publishers else {}).items():
            if event.rank is None or rank == event.rank:
                self._index.clear(slot)

    def changed(self, event: KvStreamChanged) -> None:
        """Note how far the events can be trusted."""
        if event.state is not KvState.FRESH:
            self._agreement.forget(event.endpoint_id)
        if self.is_on:
            self._publishers_of(event.endpoint_id).state = event.state
            self._laid_out = None

    def renamed(self, endpoint_id: str) -> None:
        """Note that an endpoint lists other models."""
        publishers = self._publishers.get(endpoint_id)
        if publishers is not None:
            publishers.model = self._base_at(endpoint_id)
            self._laid_out = None

    def left(self, endpoint_id: str) -> None:
        """Forget an endpoint."""
        self._agreement.forget(endpoint_id)
        publishers = self._publishers.pop(endpoint_id, None)
        self._laid_out = None
        for slot in publishers.slots.values() if publishers else ():
            self._index.remove(slot)

    def state(self, endpoint_id: str) -> KvState:
        """How far the events of an endpoint can be trusted."""
        publishers = self._publishers.get(endpoint_id)
        return publishers.state if publishers else KvState.NONE

    def _publishers_of(self, endpoint_id: str) -> Publishers:
        found = self._publishers.get(endpoint_id)
        if found is None:
            found = self._publishers[endpoint_id] = Publishers(self._base_at(endpoint_id))
        return found

    def _slot(self, publishers: Publishers, rank: int) -> int | None:
        slot = publishers.slots.get(rank)
        if slot is None and len(publishers.slots) < MAX_RANKS:
            try:
                slot = publishers.slots[rank] = self._index.open_slot()
                self._laid_out = None
            except ValueError:
                # More publishers than the index can name: these go by the estimate.
                publishers.state = KvState.STALE
                self._laid_out = None
        return slot

    # ------------------------------------------------------------------ one request

    def wanted(self, rows: list[Member], candidates: Numbers) -> tuple[str, tuple[int, ...]]:
        """Return an endpoint whose cache is known, and the block sizes, in tokens, at which keys made with its model's
        name tell something; no sizes when nobody knows.  Engines that go by another name are left to the estimate.

        rows: of the fleet.  candidates: some of them.
        """
        layout = self._by_rows(rows)
        models = layout.of_model.take(candidates)
        known = (models != NOWHERE).nonzero()[0]
        if not len(known):
            return "", ()
        alike = candidates[models == models[known[0]]]
        sizes = set(layout.sizes.take(alike).tolist())
        for row in layout.several:
            if row in alike:
                sizes.update(self._publishers[rows[row].endpoint.id].block_sizes.values())
        return rows[candidates[known[0]]].endpoint.id, tuple(sorted(sizes - {0}))

    def _by_rows(self, rows: list[Member]) -> Layout:
        """Return the publishers by row of the fleet, which makes another list whenever its rows change."""
        if self._laid_out is not rows:
            self._layout, self._laid_out = lay_out(rows, self._publishers), rows
        return self._layout

    def match(self, keys: PromptKeys, prompt_tokens: int, now: float) -> Held:
        """Look a prompt up."""
        self.expire(now)
        matches = {each.block_size_tokens: self._index.match(read_blocks(each.keys)) for each in keys.by_size}
        return Held(self, keys.model, matches, prompt_tokens)

    def cached(self, held: Held, member: Member) -> int | None:
        """See `Held.tokens`."""
        found = self._deepest(held, member)
        if found is None:
            return None
        size, blocks = found
        return _reusable(held.prompt_tokens, size, sum(blocks))

    def worth(self, held: Held, member: Member, s_per_token: float) -> float | None:
        """See `Held.worth`."""
        found = self._deepest(held, member)
        if found is None:
            return None
        size, blocks = found
        left = float(_reusable(held.prompt_tokens, size, sum(blocks)))
        total = 0.0
        for tier, count in zip(_TIERS, blocks, strict=True):
            tokens = min(left, float(count * size))
            left -= tokens
            total += tokens * float(self._share(tier, s_per_token))
        return total

    def worths(self, held: Held, rows: list[Member], s_per_token: Floats) -> Floats:
        """See `Held.worths`."""
        layout = self._by_rows(rows)
        worths = np.full(len(rows), np.nan)
        model = layout.models.get(held.model)
        if model is None:
            return worths
        for size, match in held.matches.items():
            mine = ((layout.sizes == size) & (layout.of_model == model)).nonzero()[0]
            if len(mine):
                tokens = match.tiers.take(layout.slots.take(mine), axis=1) * size
                limit = _reusable(held.prompt_tokens, size, _ALL_BLOCKS)
                # What is beyond the limit is taken from the slowest tiers, as these count last.
                tokens = np.diff(np.minimum(tokens.cumsum(axis=0), limit), axis=0, prepend=0)
                costs = s_per_token.take(mine)
                worths[mine] = sum(self._share(tier, costs) * tokens[number] for number, tier in enumerate(_TIERS))
        for row in layout.several:
            worth = self.worth(held, rows[row], float(s_per_token[row]))
            worths[row] = np.nan if worth is None else worth
        return worths

    def _share(self, tier: Tier, s_per_token: Floats | float) -> Floats | float:
        """What a token on a tier saves of its prefill, 0 to 1."""
        if tier in self._weights:
            return self._weights[tier]
        load_s = self._load_s.get(tier)
        return 1.0 if load_s is None else np.maximum(0.0, 1.0 - load_s / s_per_token)

    def _deepest(self, held: Held, member: Member) -> tuple[int, tuple[int, ...]] | None:
        """Return (block size, blocks on each tier) of the publisher that holds most; None when nothing is known."""
        publishers = self._publishers.get(member.endpoint.id)
        if publishers is None or not publishers.is_known or publishers.model != held.model:
            # Its keys of the same prompt are others under another name, so that none is found says nothing.
            return None
        best: tuple[int, tuple[int, ...]] | None = None
        most = -1
        for rank, size in publishers.block_sizes.items():
            match = held.matches.get(size)
            if match is not None:
                slot = publishers.slots[rank]
                if (tokens := match.held(slot) * size) > most:
                    most, best = tokens, (size, match.by_tier(slot))
        return best

    # ------------------------------------------------------------------ what was sent and is not confirmed

    def sent(self, request_id: str, member: Member, keys: PromptKeys) -> None:
        """Believe that an endpoint will hold a prompt, until events tell or it is over."""
        publishers = self._publishers.get(member.endpoint.id)
        if publishers is None or not self._ttl_s or publishers.state is not KvState.FRESH or not publishers.slots:
            return
        slot = min(publishers.slots.values())
        mine = tuple(each.keys for each in keys.by_size if each.block_size_tokens in publishers.block_sizes.values())
        for each in mine:
            self._index.store(slot, read_blocks(each), Tier.EXPECTED)
        self._expected[request_id] = (member.endpoint.id, slot, mine)

    def ended(self, request_id: str, now: float) -> None:
        """Have what a request was expected to leave behind go when its time is over."""
        if request_id in self._expected:
            self._expiring.append((now + self._ttl_s, request_id))

    def failed(self, request_id: str) -> None:
        """Take back at once what a request did not leave behind."""
        found = self._expected.pop(request_id, None)
        if found is None:
            return
        endpoint_id, slot, keys = found
        publishers = self._publishers.get(endpoint_id)
        if publishers is not None and slot in publishers.slots.values():
            for each in keys:
                self._index.evict(slot, read_blocks(each), Tier.EXPECTED)

    def expire(self, now: float) -> None:
        """Drop what nobody confirmed in time."""
        while self._expiring and self._expiring[0][0] <= now:
            self.failed(self._expiring.popleft()[1])

    def compare(self, flight: Flight) -> None:
        """Compare what was promised of a request with what the engine that served it reports."""
        name, outcome = flight.decision.chosen[0], flight.outcome
        publishers = self._publishers.get(name)
        if publishers is None or not publishers.block_sizes or outcome is None or outcome.is_cut:
            return
        self._agreement.observe(
            name,
            counted_tokens=flight.request.prompt_tokens,
            prompt_tokens=outcome.prompt_tokens,
            predicted_tokens=flight.predicted_tokens,
            cached_tokens=outcome.cached_tokens,
            block_tokens=min(publishers.block_sizes.values()),
        )

    def warnings(self) -> list[str]:
        """What the operator should know of caches that are not what their events say."""
        return self._agreement.warnings()

    def deadline(self) -> float | None:
        """When the next unconfirmed blocks expire."""
        return self._expiring[0][0] if self._expiring else None

    def gauges(self) -> tuple[int, int, int]:
        """Return (rows, bytes used, budget in bytes) of the index, zeros while it is off."""
        if not self.is_on:
            return 0, 0, 0
        gauges = self._index.gauges()
        return gauges.rows, gauges.used_bytes, gauges.budget_bytes


def _reusable(prompt_tokens: int, block_size: int, blocks: int) -> int:
    """Return the tokens that an engine takes from its cache: whole blocks, and never the whole prompt, whose last token
    it has to compute."""
    return min(blocks, max(0, prompt_tokens - 1) // block_size) * block_size
