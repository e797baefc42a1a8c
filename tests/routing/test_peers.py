import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.kernel import Chance
from shoal.pool import EndpointState
from shoal.prefix import read_blocks
from shoal.prefix.handover import IndexRows
from shoal.prefix.horizon import HorizonState
from shoal.routing import Router, Ticked, news
from shoal.routing.config import load
from shoal.routing.events import EndpointChanged, EndpointLeft, PeerJoined, PeerLeft, PeerSynced, PeerTaught, PeerTold
from shoal.routing.news import PaceState, PeerBooked, PeerForgot, PeerMoved, PeerReleased
from shoal.routing.peerevents import EndpointKnown
from shoal.routing.peers import EXPIRY_S
from tests.routing.gossip import Gossip, columns, is_idle
from tests.routing.script import Pool, blocks_of


def told(pool: Pool, *what: news.News, peer: str = "x") -> None:
    pool.feed(PeerTold(peer, tuple(what)))


def booking(number: int, endpoint: str = "e0", tokens: int = 640, blocks: bytes = b"") -> PeerBooked:
    return PeerBooked(number, endpoint, tokens, 256, blocks)


def inflight(pool: Pool) -> list[float]:
    return columns(pool)["inflight_requests"]


def test_what_a_peer_booked_counts_as_own_work_does() -> None:
    own, peers = Pool(), Pool()
    sent = own.send(tokens=640)
    place = int(sent.target.split(":")[0].rpartition(".")[2])
    told(peers, booking(1, f"e{place}", 640))
    for name in ("inflight_requests", "inflight_output_tokens", "booked_uncached_tokens", "clear_at"):
        assert columns(own)[name] == columns(peers)[name]


def test_requests_avoid_the_endpoint_that_a_peer_keeps_busy() -> None:
    pool = Pool(2)
    told(pool, *(booking(number, "e0", 4_000) for number in range(20)))
    assert {pool.send(f"p{number}").target for number in range(8)} == {"10.0.0.1:8000"}


def test_a_release_takes_off_what_was_booked_and_an_unknown_one_nothing() -> None:
    pool = Pool()
    told(pool, booking(1), booking(2, "e1"), PeerReleased(1), PeerReleased(1), PeerReleased(77))
    assert inflight(pool) == [0.0, 1.0, 0.0, 0.0]
    told(pool, PeerReleased(2))
    assert is_idle(pool)


def test_a_booking_that_is_told_twice_counts_once() -> None:
    pool = Pool()
    told(pool, booking(1), booking(1))
    assert inflight(pool)[0] == 1.0


def test_numbers_of_two_peers_do_not_meet() -> None:
    pool = Pool()
    told(pool, booking(1), peer="x")
    told(pool, booking(1), peer="y")
    told(pool, PeerReleased(1), peer="x")
    assert inflight(pool)[0] == 1.0


def test_a_moved_booking_counts_where_it_is_served() -> None:
    pool = Pool()
    told(pool, booking(1), PeerMoved(1, "e2"))
    assert inflight(pool) == [0.0, 0.0, 1.0, 0.0]
    told(pool, PeerReleased(1))
    assert is_idle(pool)


def test_a_prompt_goes_where_a_peer_sent_it() -> None:
    for endpoint in ("e0", "e1", "e2", "e3"):
        pool = Pool()
        told(pool, booking(1, endpoint, 6_400, blocks_of("long", 6_400)), PeerReleased(1))
        assert pool.send("long", 6_400).target == f"10.0.0.{endpoint[1]}:8000"


def test_a_prompt_that_did_not_reach_the_endpoint_is_forgotten_there() -> None:
    pool = Pool()
    blocks = blocks_of("long", 6_400)
    told(pool, booking(1, "e2", 6_400, blocks), PeerReleased(1), PeerForgot("e2", blocks))
    assert pool.router.status().index_entries == 0


def test_bookings_on_an_endpoint_that_is_not_known_yet_count_when_it_joins() -> None:
    pool = Pool(1)
    told(pool, booking(1, "late"), booking(2, "late"))
    assert inflight(pool) == [0.0]
    pool.join("late", "10.0.0.9:8000")
    assert inflight(pool) == [0.0, 2.0]
    told(pool, PeerReleased(1), PeerReleased(2))
    assert is_idle(pool)


def test_an_endpoint_that_leaves_and_returns_owes_nothing_for_bookings_of_before() -> None:
    pool = Pool()
    told(pool, booking(1, "e3"))
    pool.feed(EndpointLeft("e3"))
    pool.join("e3", "10.0.0.3:8000")
    told(pool, PeerReleased(1))
    assert is_idle(pool)


def test_the_bookings_of_a_lost_peer_expire_at_the_routers_deadline() -> None:
    pool = Pool()
    told(pool, booking(1), booking(2, "e1"))
    assert pool.router.deadline() is None
    pool.feed(PeerLeft("x"))
    assert pool.router.deadline() == pool.now + EXPIRY_S
    pool.now += EXPIRY_S / 2
    pool.feed(Ticked())
    assert sum(inflight(pool)) == 2.0
    pool.now += EXPIRY_S
    pool.feed(Ticked())
    assert is_idle(pool)
    assert pool.router.deadline() is None


def test_a_peer_that_is_heard_again_keeps_its_bookings() -> None:
    pool = Pool()
    told(pool, booking(1))
    pool.feed(PeerLeft("x"))
    pool.feed(PeerJoined("x"))
    pool.now += 2 * EXPIRY_S
    pool.feed(Ticked())
    assert inflight(pool)[0] == 1.0


def test_a_sync_makes_the_bookings_those_that_are_told() -> None:
    pool = Pool()
    told(pool, booking(1), booking(2, "e1"), booking(3, "e2"), booking(9, "e0"))
    pool.feed(PeerSynced("x", (booking(2, "e1"), booking(3, "e3"), booking(4, "e0")), 0, 5))
    assert inflight(pool) == [2.0, 1.0, 0.0, 1.0]
    pool.feed(PeerSynced("x", (), 0, None))
    assert is_idle(pool)


def test_what_an_engine_says_of_its_load_is_not_read_while_peers_tell_theirs() -> None:
    pool = Pool()
    pool.router = Router(load("", "test"), Chance(1), shares_pool=True)
    pool.join("e0", "10.0.0.0:8000")
    pool.now += 100.0

    def foreign() -> float:
        pool.load("e0", running=10.0)
        return float(pool.router._fleet.columns["foreign_requests"][0])

    assert foreign() == 10.0
    told(pool, booking(1))
    assert foreign() == 0.0
    pool.feed(PeerLeft("x"))
    assert foreign() == 9.0


def test_after_the_loss_of_a_peer_its_streams_are_seen_in_the_engines_figures_for_a_while() -> None:
    pool = Pool(1)
    pool.now += 100.0
    told(pool, booking(1), booking(2), booking(3))
    pool.feed(PeerJoined("y"))
    pool.feed(PeerLeft("x"))
    pool.now += EXPIRY_S
    pool.feed(Ticked())
    pool.load("e0", running=4.0)
    assert pool.router._fleet.columns["foreign_requests"][0] == pytest.approx(3.0)
    pool.load("e0", running=1.0)
    assert pool.router._fleet.columns["foreign_requests"][0] == pytest.approx(1.0)
    pool.now += 60.0
    pool.load("e0", running=4.0)
    assert pool.router._fleet.columns["foreign_requests"][0] == 0.0


def test_the_status_shows_own_work_alone_so_that_workers_add_up() -> None:
    pool = Pool(1)
    told(pool, booking(1, tokens=640), booking(2, tokens=640))
    sent = pool.send("other", 640)
    (endpoint,) = pool.router.status().endpoints
    assert endpoint.inflight_requests == 1
    assert endpoint.inflight_uncached_tokens == pytest.approx(640, rel=0.01)
    assert pool.router.inflight_at("e0") == 1
    assert pool.router.status().peers.bookings == 2
    sent.end()
    assert pool.router.status().endpoints[0].inflight_uncached_tokens == 0


def test_two_routers_that_talk_choose_as_one_would() -> None:
    gossip = Gossip(2, 4)
    first = gossip.send(0, "chat", 6_400)
    gossip.deliver()
    assert gossip.send(1, "chat", 6_400).target == first.target


def test_more_peers_and_bookings_than_there_may_be_are_counted_and_left() -> None:
    pool = Pool()
    for number in range(400):
        pool.feed(PeerJoined(f"x{number}"))
    gauges = pool.router.status().peers
    assert (gauges.peers, gauges.ignored) == (256, 144)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 4), st.integers(1, 3))
def test_whatever_order_it_happens_in_nothing_is_left_in_flight(seed: int, routers: int, pace: int) -> None:
    """Requests, ends, moves, failures, lost messages, endpoints that come and go: in the end all columns are zero."""
    rng = random.Random(seed)
    gossip = Gossip(routers, 3)
    open_requests = []
    for _ in range(120):
        number = rng.randrange(routers)
        match rng.randrange(12):
            case 0 | 1 | 2 | 3:
                open_requests.append(gossip.send(number, f"p{rng.randrange(6)}", 64 * rng.randrange(1, 30)))
            case 4 | 5 | 6 if open_requests:
                sent = open_requests.pop(rng.randrange(len(open_requests)))
                sent.end()
                sent.record(prompt_tokens=640, completion_tokens=3)
            case 7 if open_requests:
                sent = open_requests[rng.randrange(len(open_requests))]
                sent.record(served_address=f"10.0.0.{rng.randrange(3)}:8000", attempts=2)
            case 8 if open_requests:
                open_requests.pop().end()
            case 9:
                sender, receiver = rng.sample(range(routers), 2)
                gossip.sync(sender, receiver)
            case 10:
                for pool in gossip.pools:
                    pool.feed(EndpointLeft("e2"))
                    pool.join("e2", "10.0.0.2:8000")
            case _:
                gossip.deliver(pace)
        for pool in gossip.pools:
            pool.now += 0.01
    for sent in open_requests:
        sent.end()
    gossip.deliver()
    assert all(is_idle(pool) for pool in gossip.pools)


def test_a_part_of_many_bookings_covers_a_range_of_numbers() -> None:
    gossip = Gossip(2, 2)
    count = news.MAX_BOOKINGS_PER_PART + 10
    for number in range(count):
        gossip.send(0, f"p{number}", 1)
    bookings, until = gossip.pools[0].router.outbox.bookings(0, gossip.pools[0].now)
    assert (len(bookings), until) == (news.MAX_BOOKINGS_PER_PART, bookings[-1].number)
    gossip.sync(0, 1)
    assert sum(inflight(gossip.pools[1])) == count


def test_an_endpoint_that_loads_again_is_forgotten_whoever_filled_it() -> None:
    pool = Pool()
    told(pool, booking(1, "e2", 6_400, blocks_of("long", 6_400)), PeerReleased(1))
    pool.feed(EndpointChanged("e2", EndpointState.LOADING))
    pool.feed(EndpointChanged("e2", EndpointState.READY))
    assert pool.send("long", 6_400).finish().predicted_cached_tokens == 0


def test_a_beginner_that_is_taught_knows_prompts_and_speeds() -> None:
    old, new = Pool(), Pool()
    for number in range(40):
        old.send(f"p{number}", 1_280).finish(prompt_tokens=1_280, cached_tokens=0, ttft_s=0.4)
    head, _ = old.router.teach("old")
    new.feed(head)
    at: int | None = 0
    while at is not None:
        part, at = old.router.teach_rows("old", at, head.clock)
        new.feed(part)
    expected = [old.send(f"p{number}", 1_280).finish().predicted_cached_tokens for number in range(40)]
    assert [new.send(f"p{number}", 1_280).finish().predicted_cached_tokens for number in range(40)] == expected
    assert min(expected) > 1_000
    speeds = [endpoint.prefill_tokens_per_s for endpoint in new.router.status().endpoints]
    assert max(speeds) < 9_000
    assert not any(endpoint.is_trial for endpoint in new.router.status().endpoints)


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["giver", "taker", "both", "head", "rows"]), st.integers(0, 2)), max_size=12),
    st.integers(1, 5),
)
def test_nobody_is_believed_to_hold_what_was_sent_to_who_had_its_slot_before(
    steps: list[tuple[str, int]], rounds: int
) -> None:
    old, new = Pool(3), Pool(3)
    sent: dict[str, set[str]] = {}
    names = {old: ["e0", "e1", "e2"], new: ["e0", "e1", "e2"]}
    prompts = [f"p{number}" for number in range(100 * rounds)]
    for prompt in prompts:
        target = old.send(prompt, 6_400).finish(prompt_tokens=6_400, cached_tokens=0).endpoint_id
        sent.setdefault(target, set()).add(prompt)
    clock, at = 0, None
    for number, (step, place) in enumerate([*steps, ("head", 0), *[("rows", 0)] * 9]):
        if step == "head":
            head, _ = old.router.teach("old")
            new.feed(head)
            clock, at = head.clock, 0
        elif step == "rows":
            if at is not None:
                part, at = old.router.teach_rows("old", at, clock)
                new.feed(part)
        else:
            for pool in (old, new) if step == "both" else ((old,) if step == "giver" else (new,)):
                pool.feed(EndpointLeft(names[pool][place]))
                names[pool][place] = f"x{number}"
                pool.join(f"x{number}", f"10.1.{number}.{place}:8000")
    index, fleet = new.router._index, new.router._fleet
    for prompt in prompts:
        match = index.match(read_blocks(blocks_of(prompt, 6_400)))
        for name in names[new]:
            member = fleet.get(name)
            assert member is not None
            assert prompt in sent.get(name, ()) or not match.held(member.slot)


def test_the_speed_that_a_peer_measured_is_learnt_as_ones_own() -> None:
    gossip = Gossip(2, 2)
    for number in range(40):
        tokens = 640 * (1 + number % 10)
        sent = gossip.send(0, f"p{number}", tokens)
        sent.finish(prompt_tokens=tokens, cached_tokens=0, ttft_s=tokens * 5e-4, completion_tokens=9)
        gossip.deliver()
    (own, told) = ([each.prefill_tokens_per_s for each in pool.router.status().endpoints] for pool in gossip.pools)
    assert told == pytest.approx(own, rel=0.01)
    assert max(own) < 5_000


def test_a_part_that_makes_no_sense_is_counted_and_left() -> None:
    pool = Pool()
    pool.feed(PeerTaught("x", clock=1 << 60))
    pool.feed(PeerTaught("x", rows=IndexRows(b"123")))
    assert pool.router.status().peers.ignored == 2


def test_a_speed_that_no_endpoint_has_is_not_taken_over_as_it_is() -> None:
    pool = Pool()
    horizon, pace = HorizonState(), PaceState(9, (9.0, 1.0, 1.0), s_per_token=1e-300)
    pool.feed(PeerTaught("x", clock=5, endpoints=(EndpointKnown("e0", 0, horizon, pace),)))
    assert pool.send("p", 640).finish() is not None
    assert np.isfinite(pool.router._books.uncached_tokens(pool.now, 100.0)).all()
    wild = PaceState(9, (1.0, 1.7e308, 1.7e308))
    pool.feed(PeerTaught("x", clock=5, endpoints=(EndpointKnown("e1", 1, horizon, wild),)))
    assert pool.router.status().peers.ignored == 1
