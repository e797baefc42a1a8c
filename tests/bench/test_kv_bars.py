"""The bars of exact caches in short forms: what they feed arrives, whatever it costs on this machine."""

from bench.bars.decide import router_of
from bench.bars.kv import PRECISE, Caches, Feed, messages


def test_every_block_of_the_messages_reaches_the_index() -> None:
    router = router_of(2, PRECISE)
    for number, endpoint in enumerate(router.status().endpoints):
        feed = Feed(router, endpoint.id)
        payloads = messages(200, 3, seed=number)
        for start in range(0, 200, 70):
            feed.take(payloads[start : start + 70])
    assert router.status().exact_entries == 2 * 200 * 3


def test_shared_blocks_are_one_row_and_an_entry_of_each_ledger() -> None:
    caches = Caches(20, 2_000, 0.5)
    assert sum(ledger.gauges().blocks for ledger in caches.ledgers) == 20 * 2_000
    assert caches.index.gauges().rows == 20 * 1_000 + 2 * 1_000
