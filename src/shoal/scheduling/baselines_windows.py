"""AIBrix's variant of Preble: what each endpoint was given in the last minutes, priced by a model of its GPU.

Owns the window, the prices and the policy.  Preble is Srivatsa et al., "Preble: efficient distributed prompt scheduling
for LLM serving" (2024).
"""

from collections import deque
from typing import Annotated, ClassVar, Literal

from shoal.pool import Decision, FleetView, Request
from shoal.scheduling.baselines_trees import DEFAULT_TREE_TOKENS, Chain, MaxTreeTokens, PrefixTree
from shoal.scheduling.columns import favour, known, worst_high
from shoal.scheduling.plugin import Scores

Gpu = Literal["V100", "A6000"]
_UTILISATION = 0.9
_S_PER_OUTPUT_TOKEN = 0.15


def prefill_s(new_tokens: int, context_tokens: int, gpu: Gpu) -> float:
    """Return the seconds that AIBrix takes a prefill of `new_tokens` after the rest of `context_tokens` to last.

    Fitted by Preble's authors to Mistral 7B on an A6000; the V100's figures are AIBrix's scaling of them.
    """
    n, v100 = float(new_tokens), gpu == "V100"
    if n >= 384:
        ms = 0.27106428 * n + 10.52444263 if v100 else 0.10842571 * n + 4.209777054806409
    elif n >= 192:
        ms = -295 + 3.125 * n - 6.4e-3 * n * n if v100 else -118 + 1.25 * n - 2.56e-3 * n * n
    else:
        ms = 55.0 if v100 else 22.0
    if context_tokens <= 1024:
        attention = 0.80 if v100 else 0.32
    else:
        attention = 4.65e-4 * context_tokens + 0.398 if v100 else 1.86e-4 * context_tokens + 0.159
        if (new_tokens or context_tokens) <= 1024:
            attention /= 2
    ms += attention
    if n >= 4096:
        ms += -18.425 + 9.65e-3 * n + 5.4e-6 * n * n if v100 else -7.37 + 3.86e-3 * n + 2.16e-6 * n * n
    return ms / 1000 / _UTILISATION


class _Leaf:
    """One prompt of the window, by its last hash.  new_tokens: what nobody had been sent when it first came."""

    __slots__ = ("context_tokens", "count", "endpoints", "new_tokens")

    def __init__(self, new_tokens: int, context_tokens: int) -> None:
        self.new_tokens = new_tokens
        self.context_tokens = context_tokens
        self.count = 0
        self.endpoints: dict[str, None] = {}


class AibrixPrebleScorer:
    """Chooses as the strategy prefix-cache-preble of AIBrix 0.8.

    When more than half of the prompt is in the tree of what was sent where: of the endpoints that were sent the longest
    beginning, the one with the fewest requests in the window.  Else the endpoint of the lowest cost.  Both are sums
    over the prompts p of the window that it was sent, or longer ones that begin with p; the cost is
    new(p) / length(p) * count(p) * prefill(p) / endpoints(p) + decode.
    new: tokens of p that were in no tree when it first came.  prefill: seconds by Preble's model of Mistral 7B on
    targetGpu, over 0.9.  decode: decodingLength tokens at 0.15 s.  The window is read as of the last request that was
    sent.  Not as there: Shoal's blocks of 64 tokens and more; prompts count as one when their last blocks do.
    Source: github.com/vllm-project/aibrix, pkg/plugins/gateway/algorithms/prefix_cache_preble.go.
    """

    type: ClassVar[str] = "aibrix-preble-scorer"
    needs: ClassVar[tuple[str, ...]] = ("inflight_requests",)

    def __init__(
        self,
        *,
        target_gpu: Annotated[Gpu, "whose prefill times are assumed"] = "V100",
        decoding_length: Annotated[int, "output tokens assumed of every request"] = 45,
        sliding_window_minutes: Annotated[float, "how far back requests count"] = 3.0,
        max_tree_tokens: MaxTreeTokens = DEFAULT_TREE_TOKENS,
    ) -> None:
        if decoding_length < 0:
            raise ValueError(f"decodingLength must not be negative, got {decoding_length}")
        if sliding_window_minutes <= 0:
            raise ValueError(f"slidingWindowMinutes must be above 0, got {sliding_window_minutes}")
        if max_tree_tokens < 1:
            raise ValueError(f"maxTreeTokens must be at least 1, got {max_tree_tokens}")
        self._gpu: Gpu = target_gpu
        self._decode_s = decoding_length * _S_PER_OUTPUT_TOKEN
        self._window_s = sliding_window_minutes * 60
        self._max_tokens = max_tree_tokens
        self._tree = PrefixTree()
        self._recent: deque[tuple[float, int]] = deque()
        self._leaves: dict[int, _Leaf] = {}
        self._requests: dict[str, int] = {}
        self._costs: dict[str, float] = {}

    def score(self, request: Request, view: FleetView) -> Scores:
        names = [endpoint.id for endpoint in view.endpoints]
        held = self._tree.match(view.chain(), names)
        if held.tokens > 0.5 * request.prompt_tokens:
            chosen = min(held.endpoints, key=lambda name: self._requests.get(name, 0))
        else:
            chosen = min(names, key=self.cost)
        return favour([names.index(chosen)], worst_high(known(view, "inflight_requests")))

    def cost(self, endpoint: str) -> float:
        """Return what an endpoint was given in the window, in seconds."""
        return self._costs.get(endpoint, 0.0)

    def dispatched(self, request: Request, view: FleetView, decision: Decision, now: float) -> None:
        if chain := view.chain():
            self._note(chain, max(1, request.prompt_tokens), decision.chosen[0], now)
        while self._recent and self._recent[0][0] <= now - self._window_s:
            key = self._recent.popleft()[1]
            leaf = self._leaves[key]
            self._weigh(leaf, -1)
            leaf.count -= 1
            self._weigh(leaf, 1)
            if not leaf.count:
                del self._leaves[key]

    def _note(self, chain: Chain, prompt_tokens: int, target: str, now: float) -> None:
        """Count one request of the window, and its endpoint with all prompts that it begins with."""
        key = chain[-1][0]
        if key not in self._leaves:
            known_tokens = self._tree.match(chain, self._tree.tokens).tokens
            self._leaves[key] = _Leaf(max(0, prompt_tokens - known_tokens), prompt_tokens)
        for hash, _ in chain:
            leaf = self._leaves.get(hash)
            if leaf is None or (hash != key and target in leaf.endpoints):
                continue
            self._weigh(leaf, -1)
            leaf.endpoints[target] = None
            leaf.count += hash == key
            self._weigh(leaf, 1)
        self._recent.append((now, key))
        self._tree.add(chain, target)
        self._tree.trim(self._max_tokens)

    def _weigh(self, leaf: _Leaf, sign: int) -> None:
        """Add a prompt to the sums of its endpoints, or take it out."""
        if not leaf.count:
            return
        seconds = prefill_s(leaf.new_tokens, leaf.context_tokens, self._gpu)
        missed = leaf.new_tokens / leaf.context_tokens
        cost = missed * leaf.count * seconds / max(1, len(leaf.endpoints)) + self._decode_s
        for name in leaf.endpoints:
            self._requests[name] = self._requests.get(name, 0) + sign * leaf.count
            left = self._costs.get(name, 0.0) + sign * cost
            # Sums of floats leave a residue; who was given no request was given nothing.
            self._costs[name] = left if self._requests[name] else 0.0

    def endpoint_left(self, endpoint_id: str) -> None:
        self._tree.remove(endpoint_id)
        for leaf in self._leaves.values():
            if endpoint_id in leaf.endpoints:
                self._weigh(leaf, -1)
                del leaf.endpoints[endpoint_id]
                self._weigh(leaf, 1)
        self._requests.pop(endpoint_id, None)
        self._costs.pop(endpoint_id, None)

    def adopt(self, previous: object) -> None:
        if isinstance(previous, AibrixPrebleScorer):
            self._tree, self._recent, self._leaves = previous._tree, previous._recent, previous._leaves
            self._requests, self._costs = previous._requests, previous._costs
