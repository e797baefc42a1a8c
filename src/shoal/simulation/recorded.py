"""Sessions from journals: the traffic that a real pool had, by block hashes and counts.

Owns what a journal says of clients: when they asked, for how much, what their prompts share, and how long they paused.
What the routers did with it is left behind.  The form of a journal is `routing.journal`'s.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import pairwise
from statistics import median_low

import numpy as np
import numpy.typing as npt

from shoal.kernel import InvalidInput
from shoal.pool import Outcome, Request
from shoal.prefix import BLOCK_TOKENS, read_blocks
from shoal.prefix.hashing import REACH
from shoal.routing import Arrived, Ended, Recorded
from shoal.routing.journal import Opening, Step, read
from shoal.simulation.prompts import UNIT_TOKENS, Prompt
from shoal.simulation.sessions import Session, Turn, since_first
from shoal.simulation.traces import MAX_TOKENS

Hashes = npt.NDArray[np.uint64]
Pieces = tuple[tuple[int, int], ...]
"""Content of units one after the other: (what, how many units)."""

_UNITS_PER_BLOCK = BLOCK_TOKENS // UNIT_TOKENS
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Asked:
    """One request of a journal.

    arrived_s, ended_s: on the clock of the journal, ended_s None when its end is not in it.  hashes: of its prompt.
    tail: content behind the last whole hash.
    """

    __slots__ = ("arrived_s", "ended_s", "hashes", "outcome", "request", "tail")

    def __init__(self, request: Request, hashes: Hashes, arrived_s: float) -> None:
        self.request = request
        self.hashes = hashes
        self.arrived_s = arrived_s
        self.ended_s: float | None = None
        self.outcome: Outcome | None = None
        self.tail: Pieces = ()

    @property
    def tokens(self) -> int:
        """Tokens of the prompt as the router knew them, and never fewer than its hashes cover."""
        covered = REACH[len(self.hashes)] * BLOCK_TOKENS
        return min(max(1, self.request.prompt_tokens, covered if len(self.hashes) > 1 else 0), MAX_TOKENS)


def open_journals(files: Iterable[bytes]) -> Iterator[tuple[Opening, Iterator[Step]]]:
    """Return each file of one or several journals, the parts of each run in order.  Raises InvalidInput."""
    opened = [read(data) for data in files]
    return iter(sorted(opened, key=lambda each: (each[0].run, each[0].part)))


def asked(files: Iterable[bytes]) -> list[Asked]:
    """Return the requests of journals by time of arrival.

    files: whole files; several journals must be of workers with one clock, as those of one machine are.  Raises
    InvalidInput.
    """
    found: dict[str, Asked] = {}
    for _, steps in open_journals(files):
        for step in steps:
            event = step.event
            if isinstance(event, Arrived):
                request = event.request
                try:
                    hashes = read_blocks(event.blocks)
                except ValueError:
                    raise InvalidInput(f"the hashes of request {request.id[:80]!r} are cut") from None
                hashes = hashes[hashes != 0][: len(REACH) - 1]
                if request.has_body and (len(hashes) or request.prompt_tokens):
                    found[request.id] = Asked(request, hashes, step.now)
            elif isinstance(event, Ended) and event.request_id in found:
                one = found[event.request_id]
                # One that ended before it came would make the next turn of its session wait for years.
                one.ended_s = max(step.now, one.arrived_s)
                one.outcome = event.outcome or one.outcome
            elif isinstance(event, Recorded) and event.request_id in found:
                found[event.request_id].outcome = event.outcome
    return sorted(found.values(), key=lambda each: each.arrived_s)


def journal(files: Iterable[bytes], *, rate: float = 1.0, limit: int = 0) -> list[Session]:
    """Return the sessions of journals, from the first request on.

    Requests of one session that followed each other are one session here: the next one waits for the answer to the one
    before and then as long as it did.  Requests that overlap begin sessions of their own, with the same id.
    rate: how much sooner sessions begin; pauses within them stay.  limit: requests, 0 for all.  An answer whose length
    is not in the journal is as long as the median of the others.  Raises InvalidInput when there is no request.
    """
    requests = asked(files)[: limit or None]
    if not requests:
        raise InvalidInput("the journal has no request")
    lengths = [each.outcome.completion_tokens for each in requests if each.outcome and each.outcome.completion_tokens]
    usual = median_low(lengths) if lengths else 1
    known: dict[int, Pieces] = {}
    since_first([each.arrived_s for each in requests], 1.0)
    chains = _chains(requests, known)
    times_s = since_first([chain[0].arrived_s for chain in chains], rate)
    return [
        Session(
            chain[0].request.session_id or chain[0].request.id,
            partial(_turns, chain, known, usual),
            arrives_s=at,
            tenant=chain[0].request.tenant_id,
        )
        for chain, at in zip(chains, times_s, strict=True)
    ]


def _chains(requests: list[Asked], known: dict[int, Pieces]) -> list[tuple[Asked, ...]]:
    """Group requests that followed each other; `known` gets what spans of a hash hold that grew turn by turn."""
    chains: list[list[Asked]] = []
    open_: dict[tuple[str, str], list[list[Asked]]] = {}
    for number, each in enumerate(requests):
        key = (each.request.tenant_id, each.request.session_id)
        mine = open_.setdefault(key, []) if each.request.session_id else []
        free = [chain for chain in mine if (chain[-1].ended_s or chain[-1].arrived_s) <= each.arrived_s]
        grown = [chain for chain in free if _is_grown(chain[-1], each)]
        _compose(grown[-1][-1] if grown else None, each, number, known)
        if grown or free:
            (grown or free)[-1].append(each)
        else:
            chains.append([each])
            mine.append(chains[-1])
    return [tuple(chain) for chain in chains]


def _is_grown(before: Asked, after: Asked) -> bool:
    count = len(before.hashes)
    return after.tokens >= before.tokens and np.array_equal(before.hashes, after.hashes[:count])


def _compose(before: Asked | None, each: Asked, number: int, known: dict[int, Pieces]) -> None:
    """Say what is behind the last whole hash of a prompt, and that what stood there before is part of what grew."""
    units = each.tokens // UNIT_TOKENS - REACH[len(each.hashes)] * _UNITS_PER_BLOCK
    kept: Pieces = ()
    if before is not None:
        kept = before.tail
        count = len(before.hashes)
        if len(each.hashes) > count:
            grown = int(each.hashes[count])
            span = (REACH[count + 1] - REACH[count]) * _UNITS_PER_BLOCK
            if 0 < _units(kept) < span and grown not in known:
                known[grown] = (*kept, (grown, span - _units(kept)))
            kept = ()
    left = units - _units(kept)
    each.tail = (*kept, (number, left)) if left > 0 else kept


def _units(pieces: Pieces) -> int:
    return sum(units for _, units in pieces)


def _turns(chain: tuple[Asked, ...], known: dict[int, Pieces], usual: int) -> Iterator[Turn]:
    pauses = [0.0] + [max(0.0, after.arrived_s - (one.ended_s or one.arrived_s)) for one, after in pairwise(chain)]
    prompt = _prompt(chain[0], known)
    for place, (each, think_s) in enumerate(zip(chain, pauses, strict=True), 1):
        said = each.outcome.completion_tokens if each.outcome is not None else None
        said = min(max(1, said or usual), MAX_TOKENS)
        after = _prompt(chain[place], known) if place < len(chain) else None
        whole = after if after is not None and _is_answered(prompt, said, after) else None
        yield Turn(prompt, said, think_s, max(0, each.request.max_output_tokens or 0), whole=whole)
        prompt = after or prompt


def _is_answered(prompt: Prompt, said: int, after: Prompt) -> bool:
    """Whether a prompt begins with the one before it, and has room behind it for the answer, as a chat's has."""
    begins = after.chain[: len(prompt.chain)]
    return after.tokens >= prompt.tokens + said and np.array_equal(begins, prompt.chain)


def _prompt(each: Asked, known: dict[int, Pieces]) -> Prompt:
    """Return a prompt that shares with others what the hashes say that it shares."""
    pieces: list[tuple[int, int]] = []
    for place, value in enumerate(each.hashes.tolist()):
        span = (REACH[place + 1] - REACH[place]) * _UNITS_PER_BLOCK
        pieces += known.get(value, ((value, span),))
    if each.tokens < BLOCK_TOKENS:
        pieces = [(value, each.tokens // UNIT_TOKENS) for value, _ in pieces[:1]]
    else:
        pieces += each.tail
    counts = np.array([units for _, units in pieces], np.int64)
    contents = np.array([what for what, _ in pieces], np.uint64).repeat(counts)
    total = int(counts.sum())
    places = np.arange(total) - np.repeat(counts.cumsum() - counts, counts)
    content = (contents ^ (places.astype(np.uint64) * _GOLDEN)) + np.uint64(1)
    prompt = Prompt.empty(0).units(content, total * UNIT_TOKENS)
    return prompt.extend(0, each.tokens - prompt.tokens)
