"""Policies of other routers that weigh a match against load in one formula: Dynamo's and AIBrix's.

Owns these formulas and the blocks in use that Dynamo's needs.
"""

from typing import Annotated, ClassVar

import numpy as np

from shoal.pool import Decision, FleetView, Request
from shoal.scheduling.baselines_trees import Chain
from shoal.scheduling.columns import favour, fewest_first, known, worst_high
from shoal.scheduling.plugin import Scores


class TokensInUse:
    """Prompt tokens that the requests in flight hold on each endpoint, what they share counted once."""

    __slots__ = ("_requests", "_tokens", "_users")

    def __init__(self) -> None:
        self._requests: dict[str, tuple[str, Chain, int]] = {}
        self._users: dict[int, dict[str, int]] = {}
        self._tokens: dict[str, int] = {}

    def at(self, endpoint: str) -> int:
        """Return the tokens in use at an endpoint."""
        return self._tokens.get(endpoint, 0)

    def shared(self, chain: Chain) -> dict[str, int]:
        """Return how many of the prompt's tokens are in use at each endpoint, without those where none are."""
        tokens: dict[str, int] = {}
        for hash, reach in chain:
            users = self._users.get(hash)
            if users is None:
                break
            tokens |= dict.fromkeys(users, reach)
        return tokens

    def add(self, request_id: str, endpoint: str, chain: Chain, prompt_tokens: int) -> None:
        """Note a request that begins."""
        before = fresh = 0
        for hash, reach in chain:
            users = self._users.setdefault(hash, {})
            if endpoint not in users:
                fresh += reach - before
            users[endpoint] = users.get(endpoint, 0) + 1
            before = reach
        tail = max(0, prompt_tokens - before)
        self._requests[request_id] = (endpoint, chain, tail)
        self._tokens[endpoint] = self.at(endpoint) + fresh + tail

    def remove(self, request_id: str) -> None:
        """Note that a request ended; nothing for one that is not known."""
        endpoint, chain, tail = self._requests.pop(request_id, ("", (), 0))
        before, freed = 0, tail
        for hash, reach in chain:
            users = self._users[hash]
            users[endpoint] -= 1
            if not users[endpoint]:
                del users[endpoint]
                freed += reach - before
            if not users:
                del self._users[hash]
            before = reach
        left = self.at(endpoint) - freed
        self._tokens[endpoint] = left
        if not left:
            del self._tokens[endpoint]


class DynamoCostScorer:
    """Chooses as the KV router of NVIDIA Dynamo 1.6: by the least cost, in KV blocks.

    cost = prefillLoadScale * max(0, prefill - credit) + decode + activeRequestWeight * requests.
    prefill: prompt tokens in flight that are not prefilled yet, and all of this request's.
    credit = overlapScoreCredit * matched / (1 + overlapScoreCreditDecay * excess / prompt); excess: how far the tokens
    not prefilled yet are above the fewest.
    decode: prompt tokens of the requests in flight, what they share counted once, and this request's own that are not
    among them.  Tokens are divided by blockTokens, which matters to activeRequestWeight alone.

    score = (max - cost) / (max - min) over the candidates; all equal: 1.  With softmax-picker, temperature is theirs:
    they draw from the softmax of the costs on the same scale.  Not as there: what is prefilled leaves by Shoal's
    estimate instead of at the first token, a match on a slower tier is worth what Shoal's index says, and no output
    blocks are foreseen.
    Source: github.com/ai-dynamo/dynamo, lib/kv-router/src/scheduling/selector/default.rs.
    """

    type: ClassVar[str] = "dynamo-cost-scorer"
    needs: ClassVar[tuple[str, ...]] = ("matched_tokens", "inflight_uncached_tokens", "inflight_requests")

    def __init__(
        self,
        *,
        overlap_score_credit: Annotated[float, "what a cached token counts of one not to be prefilled"] = 1.0,
        overlap_score_credit_decay: Annotated[float, "how fast the credit falls with prefill that waits"] = 0.0,
        prefill_load_scale: Annotated[float, "weight of prefill against decode"] = 1.0,
        active_request_weight: Annotated[float, "blocks that one request in flight counts for"] = 0.0,
        block_tokens: Annotated[int, "tokens of a KV block"] = 16,
    ) -> None:
        if min(overlap_score_credit, overlap_score_credit_decay, prefill_load_scale, active_request_weight) < 0:
            raise ValueError("weights must not be negative")
        if block_tokens < 1:
            raise ValueError(f"blockTokens must be at least 1, got {block_tokens}")
        self._credit = overlap_score_credit
        self._decay = overlap_score_credit_decay
        self._prefill_scale = prefill_load_scale
        self._request_weight = active_request_weight
        self._block_tokens = block_tokens
        self._in_use = TokensInUse()

    def score(self, request: Request, view: FleetView) -> Scores:
        return fewest_first(self.costs(request, view))

    def costs(self, request: Request, view: FleetView) -> Scores:
        """Return the cost of each candidate in blocks."""
        prompt = float(request.prompt_tokens)
        waiting = worst_high(known(view, "inflight_uncached_tokens"))
        credit = self._credit * np.fmin(np.fmax(known(view, "matched_tokens"), 0.0), prompt)
        if self._decay and prompt:
            credit = credit / (1.0 + self._decay * (waiting - waiting.min()) / prompt)
        shared = self._in_use.shared(view.chain())
        decode = np.array(
            [self._in_use.at(each.id) + prompt - min(shared.get(each.id, 0), prompt) for each in view.endpoints]
        )
        tokens = self._prefill_scale * np.maximum(waiting + prompt - credit, 0.0) + decode
        requests = worst_high(known(view, "inflight_requests"))
        costs: Scores = tokens / self._block_tokens + self._request_weight * requests
        return costs

    def dispatched(self, request: Request, view: FleetView, decision: Decision, now: float) -> None:
        self._in_use.add(request.id, decision.chosen[0], view.chain(), request.prompt_tokens)

    def released(self, request_id: str) -> None:
        self._in_use.remove(request_id)

    def endpoint_left(self, endpoint_id: str) -> None:
        # Its requests end one by one.
        pass

    def adopt(self, previous: object) -> None:
        if isinstance(previous, DynamoCostScorer):
            self._in_use = previous._in_use


class AibrixPrefixCacheScorer:
    """Chooses as the strategy prefix-cache of AIBrix 0.8: the best match that is not much busier than the rest.

    Loads are requests in flight.  When max - min > loadImbalanceThreshold: the lowest load.  Else the highest matched
    share among those that hold something and have at most mean + standardDeviationFactor * deviation in flight, mean
    and deviation being those of all candidates; of equal shares the lowest load.  Else the lowest load.  Between equal
    ones chance decides.  Not as there: the match is Shoal's.
    Source: github.com/vllm-project/aibrix, pkg/plugins/gateway/algorithms/prefix_cache.go.
    """

    type: ClassVar[str] = "aibrix-prefix-cache-scorer"
    needs: ClassVar[tuple[str, ...]] = ("matched_tokens", "inflight_requests")

    def __init__(
        self,
        *,
        load_imbalance_threshold: Annotated[int, "difference of requests in flight that is still balanced"] = 8,
        standard_deviation_factor: Annotated[float, "deviations above the mean at which a match still counts"] = 1.0,
    ) -> None:
        if min(load_imbalance_threshold, standard_deviation_factor) < 0:
            raise ValueError("loadImbalanceThreshold and standardDeviationFactor must not be negative")
        self._threshold = load_imbalance_threshold
        self._factor = standard_deviation_factor

    def score(self, request: Request, view: FleetView) -> Scores:
        load = worst_high(known(view, "inflight_requests"))
        matched = np.fmax(known(view, "matched_tokens"), 0.0)
        fits = (matched > 0) & (load <= load.mean() + self._factor * load.std())
        if load.max() - load.min() > self._threshold or not fits.any():
            return favour(np.flatnonzero(load == load.min()).tolist(), load)
        best = fits & (matched == matched[fits].max())
        best &= load == load[best].min()
        return favour(np.flatnonzero(best).tolist(), load)
