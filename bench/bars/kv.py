"""What it costs to know the engines' caches: from the bytes of a KV event to the index, memory, and a look-up.

The machines are called as a host calls them.  Times are CPU time of this thread.
"""

import gc
import json
import os
import subprocess
import sys
import time

import msgspec
import numpy as np

from bench.bars.decide import router_of
from bench.bars.registry import Figure, bar
from bench.processes import rss_bytes
from shoal.pool.kvevents import KvStored, Tier
from shoal.prefix.exact import ExactIndex
from shoal.prefix.hashing import read_blocks
from shoal.prefix.ledger import Cleared, Ledger, Removed, Stored
from shoal.prefix.tokens import TokenHasher
from shoal.routing import Router
from shoal.routing.events import BlocksCleared, BlocksRemoved, BlocksStored
from shoal.wire.kvevents import decode_all

BLOCK_TOKENS = 16
MODEL = "bench-model"
HASHER = TokenHasher(11)

PRECISE = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: precise-prefix-cache-producer
- type: expected-wait-scorer
"""
_ENDPOINTS = 8
_SEQUENCES = 64
_PROMPT_BLOCKS = 64
_DRAINED = (1, 8, 32, 128)
# The figure is that of so many messages: what a host reads of one socket before it turns to the next.
_TURN = 128
_ROUNDS = 3
_ROW_BYTES = 16
_EVENT_BLOCKS = 500
_FIRST_BLOCKS = 6_000
_LOAD = 0.9
# Part of the rows that may be displaced before the figure is one of a full index.
_LOST = 1e-4


def messages(count: int, blocks: int, *, seed: int | tuple[int, ...] = 1) -> list[bytes]:
    """Payloads as vLLM 0.32 writes them: each stores so many blocks of one of 64 prompts that grow side by side."""
    rng = np.random.default_rng(seed)
    encode = msgspec.msgpack.Encoder().encode
    parents: list[int | None] = [None] * _SEQUENCES
    depths = [0] * _SEQUENCES
    made = []
    for number in range(count):
        place = number % _SEQUENCES
        hashes = rng.integers(1, 2**64, blocks, dtype=np.uint64).tolist()
        event = {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": parents[place],
            "token_ids": rng.integers(0, 150_000, blocks * BLOCK_TOKENS).tolist(),
            "block_size": BLOCK_TOKENS,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [None] * blocks,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
        made.append(encode([1796034007.69485 + number, [event], 0]))
        depths[place] += blocks
        parents[place] = hashes[-1] if depths[place] < _PROMPT_BLOCKS else None
        depths[place] %= _PROMPT_BLOCKS
    return made


class Feed:
    """The way of a publisher's payloads into a router."""

    def __init__(self, router: Router, endpoint_id: str) -> None:
        self._router = router
        self._endpoint_id = endpoint_id
        self._ledger = Ledger(HASHER, MODEL)

    def take(self, payloads: list[bytes]) -> None:
        """Take the messages that were waiting in a socket."""
        events = decode_all(payloads).events
        handle, id = self._router.handle, self._endpoint_id
        for change in self._ledger.apply(events):
            if isinstance(change, Stored):
                handle(BlocksStored(id, change.keys, change.tier, change.block_size_tokens), 1.0)
            elif isinstance(change, Removed):
                handle(BlocksRemoved(id, change.keys, change.tier), 1.0)
            elif isinstance(change, Cleared):
                handle(BlocksCleared(id, 0), 1.0)


def _ingest(scale: float, blocks: int) -> Figure:
    """Blocks per second for several numbers of messages that wait in a socket when it is read; the best of some rounds.

    The index has been in use before: what a page costs when it is first written is not part of it.
    """
    each = max(512, int(12_000 * scale) // blocks)
    router = router_of(_ENDPOINTS, PRECISE)
    ids = [endpoint.id for endpoint in router.status().endpoints]
    rng = np.random.default_rng(9)
    for _ in range(100):
        keys = rng.integers(1, 2**64, 10_000, dtype=np.uint64).tobytes()
        router.handle(BlocksStored(ids[0], keys), 1.0)
    best = dict.fromkeys(_DRAINED, 0.0)
    for number in range(_ROUNDS):
        for drained in _DRAINED if number == 0 else (_TURN,):
            payloads = [messages(each, blocks, seed=(number, drained, place)) for place in range(_ENDPOINTS)]
            feeds = [Feed(router, id) for id in ids]
            gc.collect()
            began = time.thread_time()
            for start in range(0, each, drained):
                for feed, mine in zip(feeds, payloads, strict=True):
                    feed.take(mine[start : start + drained])
            spent = time.thread_time() - began
            best[drained] = max(best[drained], each * _ENDPOINTS * blocks / spent)
    expected = 1_000_000 + each * _ENDPOINTS * blocks * (len(_DRAINED) + _ROUNDS - 1)
    lost = expected - router.status().exact_entries
    details = {f"drained_{drained}": round(rate) for drained, rate in best.items()}
    return Figure(value=best[_TURN], void=f"{lost} blocks were not indexed" if lost else "", details=details)


@bar("kv.ingest-8", "wire to index at 8 blocks a message", unit="blocks/s", at_least=200_000, part=3)
def _eight(scale: float) -> Figure:
    return _ingest(scale, 8)


@bar("kv.ingest-1", "wire to index at 1 block a message", unit="blocks/s", at_least=100_000, part=3)
def _one(scale: float) -> Figure:
    return _ingest(scale, 1)


class Caches:
    """Index and ledgers of some endpoints whose engines hold so many blocks each.

    shared: part of an endpoint's blocks that all of its group of ten hold as well.
    """

    def __init__(self, endpoints: int, each: int, shared: float) -> None:
        together = int(each * shared)
        entries = endpoints * (each - together) + endpoints // 10 * together
        # What an operator sets for so many: rows up to so much of the table, and an eighth for the sets.
        self.index = ExactIndex(int(entries * _ROW_BYTES / _LOAD * 8 / 7))
        self.ledgers = [Ledger(HASHER, MODEL) for _ in range(endpoints)]
        self._slots = [self.index.open_slot() for _ in range(endpoints)]
        for start in range(0, each, _EVENT_BLOCKS):
            count = min(_EVENT_BLOCKS, each - start)
            for number in range(endpoints):
                is_shared = start + count <= together
                self._store(
                    number, count, seed=start + (10**9 * (number // 10) if is_shared else 10**12 * (number + 1))
                )

    def _store(self, number: int, count: int, seed: int) -> None:
        tokens = np.random.default_rng(seed).integers(0, 150_000, count * BLOCK_TOKENS).tolist()
        hashes = np.random.default_rng((seed, number)).integers(0, 2**64, count, dtype=np.uint64).tolist()
        for change in self.ledgers[number].apply([KvStored(hashes, None, tokens, BLOCK_TOKENS)]):
            assert isinstance(change, Stored)
            self.index.store(self._slots[number], read_blocks(change.keys), change.tier)


def _main() -> None:
    """In a process of its own: print what the caches of the command line take."""
    endpoints, each, shared = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    Caches(10, 2_000, shared)
    gc.collect()
    before = rss_bytes(os.getpid())
    caches = Caches(endpoints, each, shared)
    gc.collect()
    gauges = caches.index.gauges()
    seen = {
        "bytes": rss_bytes(os.getpid()) - before,
        "entries": sum(ledger.gauges().blocks for ledger in caches.ledgers),
        "rows": gauges.rows,
        "displaced": gauges.displaced,
        "index_mb": gauges.budget_bytes / 2**20,
        "ledgers_mb": sum(ledger.gauges().used_bytes for ledger in caches.ledgers) / 2**20,
    }
    print(json.dumps(seen))


@bar("kv.bytes-per-block", "index and ledgers per (endpoint, block) at 10,000,000", unit="bytes", at_most=40, part=3)
def _bytes_per_block(scale: float) -> Figure:
    each = max(2_000, int(100_000 * scale))
    seen = {}
    for shared in (0.0, 0.5):
        command = [sys.executable, "-m", "bench.bars.kv", "100", str(each), str(shared)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found = json.loads(done.stdout)
        found["bytes_per_block"] = found["bytes"] / found["entries"]
        seen[f"shared_{shared}"] = found
    lost = sum(each["displaced"] for each in seen.values())
    value = max(each["bytes_per_block"] for each in seen.values())
    is_full = lost > _LOST * sum(each["rows"] for each in seen.values())
    return Figure(value=value, void=f"{lost} rows were displaced" if is_full else "", details=seen)


def _match_us(scale: float, block_tokens: int) -> Figure:
    """Hash and match a prompt of 100,000 tokens, read how much of it each of 100 endpoints holds on which tier."""
    rng = np.random.default_rng(5)
    index = ExactIndex()
    slots = [index.open_slot() for _ in range(100)]
    for slot in slots:
        index.store(slot, rng.integers(1, 2**64, max(1_000, int(20_000 * scale)), dtype=np.uint64), Tier.GPU)
    tokens = rng.integers(0, 150_000, 100_000, dtype=np.uint32).tobytes()
    keys = read_blocks(HASHER.hash_tokens(tokens, MODEL, "", "", block_tokens))
    for number, slot in enumerate(slots):
        depth = len(keys) * number // 99
        for start in range(0, depth, 512):  # as chunks of a prefill come
            index.store(slot, keys[start : min(depth, start + 512)], Tier.GPU)
        if number % 10 == 0:
            index.store(slot, keys[:depth], Tier.CPU)
    times: dict[str, list[int]] = {"hash": [], "match": [], "read": [], "all": []}
    for _ in range(max(50, int(300 * scale))):
        clocks = [time.thread_time_ns()]
        read = read_blocks(HASHER.hash_tokens(tokens, MODEL, "", "", block_tokens))
        clocks.append(time.thread_time_ns())
        match = index.match(read)
        clocks.append(time.thread_time_ns())
        assert match.tiers.sum() == match.blocks.sum()
        clocks.append(time.thread_time_ns())
        for name, start, end in (("hash", 0, 1), ("match", 1, 2), ("read", 2, 3), ("all", 0, 3)):
            times[name].append(clocks[end] - clocks[start])
    details = {f"{name}_us": float(np.median(each)) / 1e3 for name, each in times.items()}
    details["fastest_us"] = min(times["all"]) / 1e3
    return Figure(value=details["all_us"], details=details)


@bar("kv.match-16", "hash and match 100,000 tokens, 100 endpoints, blocks of 16", unit="us", at_most=1_500, part=3)
def _match_16(scale: float) -> Figure:
    return _match_us(scale, 16)


@bar("kv.match-64", "hash and match 100,000 tokens, 100 endpoints, blocks of 64", unit="us", at_most=1_000, part=3)
def _match_64(scale: float) -> Figure:
    return _match_us(scale, 64)


@bar(
    "kv.stall",
    "longest wait for a fresh index: a part of its memory, or its first blocks",
    unit="ms",
    at_most=5,
    part=3,
)
def _stall(scale: float) -> Figure:
    rng = np.random.default_rng(9)
    longest: dict[str, list[float]] = {"part": [], "first_store": [], "unprepared_store": []}
    for _ in range(max(3, int(7 * scale))):
        for is_prepared in (True, False):
            index = ExactIndex()
            slot = index.open_slot()
            parts, more = [0.0], is_prepared
            while more:
                began = time.thread_time()
                more = index.prepare()
                parts.append(time.thread_time() - began)
            keys = rng.integers(1, 2**64, _FIRST_BLOCKS, dtype=np.uint64)
            began = time.thread_time()
            index.store(slot, keys, Tier.GPU)
            stored_s = time.thread_time() - began
            longest["first_store" if is_prepared else "unprepared_store"].append(1e3 * stored_s)
            if is_prepared:
                longest["part"].append(1e3 * max(parts))
    details = {f"{name}_ms": float(np.median(each)) for name, each in longest.items()}
    return Figure(value=max(details["part_ms"], details["first_store_ms"]), details=details)


@bar("kv.bounded", "bytes over their budgets after stores without removes, memory flat", at_most=1.0, part=3)
def _bounded(scale: float) -> Figure:
    budget, rounds = 4 << 20, 20
    index, ledgers = ExactIndex(budget), [Ledger(HASHER, MODEL, budget // 2) for _ in range(8)]
    slots = [index.open_slot() for _ in ledgers]
    blocks = max(800_000, int(1_600_000 * scale)) // (rounds * len(ledgers))
    marks, times_ms, worst = [], [], 0.0
    for number in range(rounds):
        for place, (slot, ledger) in enumerate(zip(slots, ledgers, strict=True)):
            rng = np.random.default_rng((number, place))
            for _ in range(0, blocks, _EVENT_BLOCKS):
                hashes = rng.integers(0, 2**64, _EVENT_BLOCKS, dtype=np.uint64).tolist()
                tokens = rng.integers(0, 150_000, _EVENT_BLOCKS * BLOCK_TOKENS).tolist()
                event = KvStored(hashes, None, tokens, BLOCK_TOKENS)
                began = time.thread_time()
                for change in ledger.apply([event]):
                    if isinstance(change, Stored):
                        index.store(slot, read_blocks(change.keys), change.tier)
                    elif isinstance(change, Removed):
                        index.evict(slot, read_blocks(change.keys), change.tier)
                times_ms.append(1e3 * (time.thread_time() - began))
        used = [ledger.gauges().used_bytes / (budget // 2) for ledger in ledgers]
        worst = max(worst, index.gauges().used_bytes / budget, *used)
        marks.append(rss_bytes(os.getpid()))
    growth = marks[-1] / marks[len(marks) // 2] - 1.0
    details = {
        "rss_mb": [round(mark / 2**20, 1) for mark in marks],
        "second_half_growth": growth,
        "displaced": index.gauges().displaced,
        "let_go": sum(ledger.gauges().let_go for ledger in ledgers),
        "event_p50_ms": float(np.median(times_ms)),
        "event_p99_ms": float(np.quantile(times_ms, 0.99)),
        "event_slowest_ms": max(times_ms),
    }
    void = "" if details["let_go"] and details["displaced"] else "the budget was not reached"
    return Figure(value=worst if growth < 0.05 else float("inf"), void=void, details=details)


if __name__ == "__main__":
    _main()
