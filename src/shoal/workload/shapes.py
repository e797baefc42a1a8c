"""The traffic shapes that routers are compared on.

Three of them punish three different mistakes: `multi_turn` punishes scattering a session, `hot` punishes
piling on the one holder of a prefix, `zipf` punishes caching every document everywhere.  `unique` shares
nothing and shows what routing itself costs.  Sizes are in characters; four make about one token.
"""

import numpy as np

from shoal.workload.chat import Chat, Plan
from shoal.workload.text import text

Range = tuple[int, int]


def multi_turn(
    rng: np.random.Generator,
    *,
    chats: int = 32,
    turns: int = 6,
    systems: int = 8,
    system_chars: int = 16_384,
    say_chars: Range = (120, 360),
    reply_tokens: Range = (16, 48),
    think_s: float = 0.0,
    concurrency: int = 32,
) -> Plan:
    """Agent-like sessions: `chats` of `turns` turns, each opening with one of `systems` shared system prompts.

    think_s: mean of the exponential pause before each turn, 0.0 for none.  Every prompt is used by the same number of
    chats (plus or minus one), in random order.
    """
    openings = [text(rng, system_chars) for _ in range(systems)]
    order = rng.permutation(np.arange(chats) % systems).tolist()
    made = tuple(
        Chat(
            id=f"chat-{i}",
            system=openings[which],
            says=tuple(text(rng, _draw(rng, say_chars)) for _ in range(turns)),
            reply_tokens=tuple(_draw(rng, reply_tokens) for _ in range(turns)),
            think_s=tuple(rng.exponential(think_s, size=turns).tolist()) if think_s else (),
        )
        for i, which in enumerate(order)
    )
    return Plan(name="multi-turn", chats=made, concurrency=concurrency)


def hot(
    rng: np.random.Generator,
    *,
    requests: int = 300,
    prompt_chars: int = 6_000,
    say_chars: int = 60,
    reply_tokens: Range = (8, 24),
    concurrency: int = 48,
) -> Plan:
    """One prompt that everybody sends at once, each with a short question of their own."""
    prompt = text(rng, prompt_chars)
    return Plan(
        name="hot",
        chats=tuple(_single(rng, i, prompt, say_chars, reply_tokens) for i in range(requests)),
        concurrency=concurrency,
    )


def zipf(
    rng: np.random.Generator,
    *,
    documents: int = 40,
    document_chars: int = 8_000,
    requests: int = 400,
    exponent: float = 1.0,
    say_chars: int = 60,
    reply_tokens: Range = (8, 24),
    concurrency: int = 24,
) -> Plan:
    """Questions about `documents` documents; the k-th most popular is asked about with weight k**-exponent."""
    weights = np.arange(1, documents + 1, dtype=np.float64) ** -exponent
    chosen = rng.choice(documents, size=requests, p=weights / weights.sum()).tolist()
    pages = [text(rng, document_chars) for _ in range(documents)]
    return Plan(
        name="zipf",
        chats=tuple(_single(rng, i, pages[which], say_chars, reply_tokens) for i, which in enumerate(chosen)),
        concurrency=concurrency,
    )


def unique(
    rng: np.random.Generator,
    *,
    requests: int = 1_000,
    prompt_chars: int = 1_000,
    reply_tokens: Range = (8, 8),
    concurrency: int = 16,
) -> Plan:
    """Prompts that share nothing.

    Each opens with up to 64 characters of its own; what follows is one text for all, held once.  So no two prompts
    share a prefix, and a thousand of 400 KB cost the sender the memory of one.
    """
    head_chars = min(64, prompt_chars - 1)
    filler = text(rng, min(prompt_chars - head_chars, 65_536))
    rest = (filler * (prompt_chars // len(filler) + 1))[: prompt_chars - head_chars]
    made = tuple(
        Chat(
            id=f"one-{i}",
            system=f"{i:x} {text(rng, head_chars)}"[:head_chars],
            says=(rest,),
            reply_tokens=(_draw(rng, reply_tokens),),
        )
        for i in range(requests)
    )
    return Plan(name="unique", chats=made, concurrency=concurrency)


def _single(rng: np.random.Generator, i: int, system: str, say_chars: int, reply_tokens: Range) -> Chat:
    return Chat(id=f"one-{i}", system=system, says=(text(rng, say_chars),), reply_tokens=(_draw(rng, reply_tokens),))


def _draw(rng: np.random.Generator, bounds: Range) -> int:
    low, high = bounds
    return int(rng.integers(low, high + 1))
