"""One request inside an engine: how far it is computed and which blocks it holds."""

from shoal.engine.commands import Finish
from shoal.engine.events import Submitted


class Sequence:
    """Mutable state of one live request; only the batcher writes it.

    key: place in the queue, (priority, arrival number).  num_tokens: prompt plus tokens generated so far.  computed:
    tokens whose KV is in the cache.  blocks: held, in prompt order.  sealed: how many of them are findable by hash.
    cached_tokens: found at first admission, -1 before it; loaded_tokens: those of them that the host tier had, or that
    another engine sent.  received_tokens: what another engine sent, 0 once they are in blocks: if those are lost, they
    are computed.  tokens, salt: see `Submitted`.  is_live: False once aborted or finished.
    """

    __slots__ = (
        "adapter",
        "admitted_at",
        "arrived_at",
        "blocks",
        "cached_tokens",
        "computed",
        "first_token_at",
        "hashes",
        "is_live",
        "is_running",
        "key",
        "loaded_tokens",
        "max_tokens",
        "num_tokens",
        "output_tokens",
        "preemptions",
        "prompt_tokens",
        "received_tokens",
        "request_id",
        "salt",
        "sealed",
        "tokens",
    )

    def __init__(self, event: Submitted, key: tuple[int, int], now: float) -> None:
        self.request_id = event.request_id
        self.key = key
        self.prompt_tokens = event.prompt_tokens
        self.output_tokens = event.output_tokens
        self.max_tokens = event.max_tokens
        self.hashes = event.block_hashes
        self.tokens = event.tokens
        self.adapter = event.adapter
        self.salt = event.cache_salt
        self.num_tokens = event.prompt_tokens
        self.computed = 0
        self.blocks: list[int] = []
        self.sealed = 0
        self.cached_tokens = -1
        self.loaded_tokens = 0
        self.received_tokens = event.received_tokens
        self.preemptions = 0
        self.arrived_at = now
        self.admitted_at: float | None = None
        self.first_token_at: float | None = None
        self.is_live = True
        self.is_running = False

    def __lt__(self, other: "Sequence") -> bool:
        return self.key < other.key

    def finish(self, reason: str, now: float) -> Finish:
        """Return the command that tells the host how this request ended."""
        return Finish(
            request_id=self.request_id,
            reason=reason,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.num_tokens - self.prompt_tokens,
            cached_tokens=max(self.cached_tokens, 0),
            preemptions=self.preemptions,
            arrived_at=self.arrived_at,
            admitted_at=self.admitted_at,
            first_token_at=self.first_token_at,
            finished_at=now,
        )
