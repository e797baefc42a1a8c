"""Policies of other routers that keep a prefix tree of what they sent where.

Owns that tree and the policies that read it alone: sglang-router's cache_aware and production-stack's prefixaware.
They are here to move over from, and to compare with; Shoal's own index is `prefix`'.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Annotated, ClassVar, NamedTuple

from shoal.pool import Decision, FleetView, Request
from shoal.scheduling.columns import favour, known, worst_high
from shoal.scheduling.plugin import Scores

MaxTreeTokens = Annotated[int, "tokens kept per endpoint; past it the least recently used go"]
DEFAULT_TREE_TOKENS = 1 << 24
"""Sixteen million tokens: the 2 ** 26 characters of sglang-router at four a token."""

Chain = Sequence[tuple[int, int]]
"""A prompt as `FleetView.chain` gives it."""


class Held(NamedTuple):
    """The longest known beginning of a prompt.  endpoints: who was sent it, in the order in which they first were."""

    tokens: int
    endpoints: tuple[str, ...]


class PrefixTree:
    """Which endpoint was sent the beginnings of which prompts.

    tokens: of each endpoint, each counted once.  An endpoint that was sent a hash was sent all before it in the chain,
    and keeps them longer: what goes first is what was used least recently, and of one prompt its end.
    """

    __slots__ = ("_holders", "_sent", "tokens")

    def __init__(self) -> None:
        self._holders: dict[int, dict[str, None]] = {}
        self._sent: dict[str, OrderedDict[int, int]] = {}
        self.tokens: dict[str, int] = {}

    def match(self, chain: Chain, among: Iterable[str]) -> Held:
        """Return the longest beginning that any of `among` was sent."""
        offered = frozenset(among)
        depth = bisect_left(chain, True, key=lambda link: offered.isdisjoint(self._holders.get(link[0], ())))
        if not depth:
            return Held(0, ())
        hash, tokens = chain[depth - 1]
        return Held(tokens, tuple(name for name in self._holders[hash] if name in offered))

    def add(self, chain: Chain, endpoint: str) -> None:
        """Note that `endpoint` was sent this prompt now."""
        sent = self._sent.setdefault(endpoint, OrderedDict())
        before = added = 0
        for hash, tokens in chain:
            if hash not in sent:
                sent[hash] = tokens - before
                added += tokens - before
                self._holders.setdefault(hash, {})[endpoint] = None
            before = tokens
        for hash, _ in reversed(chain):
            sent.move_to_end(hash)
        self.tokens[endpoint] = self.tokens.get(endpoint, 0) + added

    def trim(self, max_tokens: int) -> None:
        """Drop what each endpoint was sent least recently until it has no more than `max_tokens`."""
        for endpoint, sent in self._sent.items():
            while self.tokens[endpoint] > max_tokens:
                hash, tokens = sent.popitem(last=False)
                self.tokens[endpoint] -= tokens
                self._drop(hash, endpoint)

    def remove(self, endpoint: str) -> None:
        """Forget an endpoint."""
        for hash in self._sent.pop(endpoint, ()):
            self._drop(hash, endpoint)
        self.tokens.pop(endpoint, None)

    def _drop(self, hash: int, endpoint: str) -> None:
        holders = self._holders[hash]
        del holders[endpoint]
        if not holders:
            del self._holders[hash]


class SglangCacheAwareScorer:
    """Chooses as the policy cache_aware of sglang-router 0.3.2, which vllm-router 0.1.17 has too.

    Loads are requests in flight.  When max - min > balanceAbsThreshold and max > balanceRelThreshold * min: the lowest
    load.  Else, when the longest beginning of the prompt in the tree is more than cacheThreshold of it: the endpoint
    that was sent it, of several the first that was.  Else the endpoint with the smallest tree.

    The tree holds what was sent where, whatever the choice was made by; every evictionIntervalSeconds the least
    recently used of each endpoint goes, down to maxTreeTokens.  Not as there: the tree is made of Shoal's blocks of 64
    tokens and more instead of characters; of several holders they take any; one that is not offered is passed over.
    Source: github.com/sgl-project/sglang, sgl-router/src/policies/cache_aware.rs and tree.rs.
    """

    type: ClassVar[str] = "sglang-cache-aware-scorer"
    needs: ClassVar[tuple[str, ...]] = ("inflight_requests",)

    def __init__(
        self,
        *,
        cache_threshold: Annotated[float, "share of the prompt from which a match decides, 0 to 1"] = 0.3,
        balance_abs_threshold: Annotated[int, "difference of requests in flight that is still balanced"] = 64,
        balance_rel_threshold: Annotated[float, "ratio of requests in flight that is still balanced"] = 1.5,
        eviction_interval_seconds: Annotated[float, "time between two evictions"] = 60.0,
        max_tree_tokens: MaxTreeTokens = DEFAULT_TREE_TOKENS,
    ) -> None:
        if not 0 <= cache_threshold <= 1:
            raise ValueError(f"cacheThreshold must be 0 to 1, got {cache_threshold}")
        if eviction_interval_seconds <= 0:
            raise ValueError(f"evictionIntervalSeconds must be above 0, got {eviction_interval_seconds}")
        self._cache_threshold = cache_threshold
        self._abs_threshold = balance_abs_threshold
        self._rel_threshold = balance_rel_threshold
        self._interval_s = eviction_interval_seconds
        self._max_tokens = _checked(max_tree_tokens)
        self._evict_at = float("-inf")
        self._tree = PrefixTree()

    def score(self, request: Request, view: FleetView) -> Scores:
        load = worst_high(known(view, "inflight_requests"))
        return favour([self._choose(request, view, load.tolist())], load)

    def _choose(self, request: Request, view: FleetView, load: list[float]) -> int:
        low, high = min(load), max(load)
        if high - low > self._abs_threshold and high > self._rel_threshold * low:
            return load.index(low)
        names = [endpoint.id for endpoint in view.endpoints]
        held = self._tree.match(view.chain(), names)
        if held.tokens > self._cache_threshold * request.prompt_tokens:
            return names.index(held.endpoints[0])
        sizes = [self._tree.tokens.get(name, 0) for name in names]
        return sizes.index(min(sizes))

    def dispatched(self, request: Request, view: FleetView, decision: Decision, now: float) -> None:
        self._tree.add(view.chain(), decision.chosen[0])
        if now >= self._evict_at:
            self._tree.trim(self._max_tokens)
            self._evict_at = now + self._interval_s

    def endpoint_left(self, endpoint_id: str) -> None:
        self._tree.remove(endpoint_id)

    def adopt(self, previous: object) -> None:
        if isinstance(previous, SglangCacheAwareScorer):
            self._tree = previous._tree


class ProductionStackPrefixScorer:
    """Chooses as the routing logic prefixaware of vLLM production-stack (August 2026): by the longest match alone.

    All that were sent the longest known beginning of the prompt score 1 alike, so chance decides between them; all
    endpoints do where nothing is known.  There the tree has no limit and chunks of 128 characters; here it keeps
    maxTreeTokens per endpoint, in Shoal's blocks of 64 tokens and more.
    Source: github.com/vllm-project/production-stack, src/vllm_router/routers/routing_logic.py.
    """

    type: ClassVar[str] = "production-stack-prefix-scorer"
    needs: ClassVar[tuple[str, ...]] = ("inflight_requests",)

    def __init__(self, *, max_tree_tokens: MaxTreeTokens = DEFAULT_TREE_TOKENS) -> None:
        self._max_tokens = _checked(max_tree_tokens)
        self._tree = PrefixTree()

    def score(self, request: Request, view: FleetView) -> Scores:
        names = [endpoint.id for endpoint in view.endpoints]
        holders = self._tree.match(view.chain(), names).endpoints
        chosen = [position for position, name in enumerate(names) if name in holders] or range(len(names))
        return favour(chosen, worst_high(known(view, "inflight_requests")))

    def dispatched(self, request: Request, view: FleetView, decision: Decision, now: float) -> None:
        self._tree.add(view.chain(), decision.chosen[0])
        self._tree.trim(self._max_tokens)

    def endpoint_left(self, endpoint_id: str) -> None:
        self._tree.remove(endpoint_id)

    def adopt(self, previous: object) -> None:
        if isinstance(previous, ProductionStackPrefixScorer):
            self._tree = previous._tree


def _checked(max_tree_tokens: int) -> int:
    if max_tree_tokens < 1:
        raise ValueError(f"maxTreeTokens must be at least 1, got {max_tree_tokens}")
    return max_tree_tokens
