"""Agents: who they are, what of their claims is believed, and what a session that will be back gets."""

import pytest

from shoal.pool import RefusalReason, Request
from shoal.pool.request import Hints
from shoal.routing.claims import Claims
from shoal.routing.config import load
from shoal.routing.events import PeerTold
from shoal.routing.news import MAX_EXPECTED_MS, PeerExpects
from shoal.routing.returns import session_of
from tests.routing.flowscript import LLM_D
from tests.routing.gossip import Gossip
from tests.routing.script import Pool, Sent

TRUSTING = "apiVersion: shoal.dev/v1alpha1\nkind: Pool\nagents: {trust_hints: true, max_return_s: 60}\n"
IDENTITY = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: agent-identity
  parameters: {additionalSessionHeaders: [X-My-Agent]}
"""
BACK = Hints(returns_within_s=10.0)


def settled(config: str, owner: str = "", **fields: object) -> Request:
    return Claims(load(config, "")).settle(Request(id="r", model="m", **fields), owner)  # type: ignore[arg-type]


def name_of(sent: Sent) -> str:
    return f"e{sent.target.split(':')[0][-1]}"


def promised(made: Pool, hints: Hints | None = BACK) -> str:
    """Serve a turn of the session `s` that says that it will be back; returns where."""
    sent = made.send("history", 2000, session_id="s", hints=hints)
    sent.finish(prompt_tokens=2000, cached_tokens=0)
    return name_of(sent)


# ---------------------------------------------------------------------- who is who


def test_an_agents_session_is_its_tenant_where_nothing_else_names_one() -> None:
    assert settled(IDENTITY, session_id="abc").tenant_id == "agent:abc"
    assert settled(IDENTITY, session_id="abc", tenant_id="acme").tenant_id == "acme"
    assert settled(IDENTITY, "key-owner", session_id="abc").tenant_id == "key-owner"
    assert settled(IDENTITY).tenant_id == ""
    assert settled("", session_id="abc").tenant_id == ""


FLOW = "apiVersion: shoal.dev/v1alpha1\nkind: Pool\nflow: {enabled: true}\n"
TRUSTED = FLOW.replace("true}", "true, trust_headers: true}")
GATE = f"{LLM_D}featureGates: [flowControl]\n"


@pytest.mark.parametrize(
    ("config", "tenant"),
    [("", "acme"), (FLOW, ""), (TRUSTED, "acme"), (GATE, "acme"), (f"{GATE}---\n{FLOW}", "")],
    ids=["no queue", "no trust", "trust", "llm-d's own queue", "llm-d's and no trust"],
)
def test_a_tenant_in_a_header_counts_for_the_queue_where_the_file_trusts_it_or_is_llm_ds(
    config: str, tenant: str
) -> None:
    assert settled(config, tenant_id="acme").tenant_id == tenant
    assert settled(config, "key-owner", tenant_id="acme").tenant_id == "key-owner"


def test_an_agents_session_is_its_tenant_and_not_what_a_header_claims() -> None:
    assert settled(f"{IDENTITY}---\n{FLOW}", session_id="abc", tenant_id="agent:xyz").tenant_id == "agent:abc"


def test_a_further_session_header_goes_before_the_known_ones() -> None:
    found = settled(IDENTITY, session_id="abc", headers={"x-my-agent": "mine"})
    assert (found.session_id, found.tenant_id) == ("mine", "agent:mine")


def test_hints_are_believed_only_where_the_configuration_says_so() -> None:
    said = Hints(priority=5, output_tokens=900, returns_within_s=600.0)
    assert settled("", hints=said).hints is None
    believed = settled(TRUSTING, hints=said).hints
    assert believed == Hints(priority=5, output_tokens=900, returns_within_s=60.0)


# ---------------------------------------------------------------------- hints at work


def test_the_expected_length_of_an_answer_stands_in_the_books_until_it_ends() -> None:
    made = Pool(1)
    sent = made.send(hints=Hints(output_tokens=4000))
    column = made.router._fleet.columns["inflight_output_tokens"]
    assert column[0] == 4000
    sent.finish()
    assert column[0] == 0
    made.send(hints=Hints(output_tokens=4000), max_output_tokens=100)
    assert column[0] == 100


def test_a_believed_priority_is_one_of_the_configured_bands() -> None:
    flow = """\
apiVersion: shoal.dev/v1alpha1
kind: Pool
flow: {enabled: true}
tenants: {gold: {priority: 10}, bulk: {priority: -10}}
"""
    made = Pool(1, config=flow)
    for asked, band in ((7, 0), (99, 10), (-3, -10), (-99, -10)):
        assert made.send(hints=Hints(priority=asked)).forward.priority == band
    made = Pool(1, config=f"{LLM_D}flowControl: {{priorityBands: [{{priority: 50}}, {{priority: -5}}]}}\n---\n{flow}")
    for asked, band in ((60, 50), (49, 10), (-3, -5), (-7, -10), (-99, -10)):
        assert made.send(hints=Hints(priority=asked)).forward.priority == band


def test_a_session_that_said_so_comes_back_to_its_endpoint() -> None:
    for seed in range(8):
        made = Pool(4, seed=seed)
        where = promised(made)
        made.now += 5.0
        # Its history is gone from the estimate: only the promise can tell.
        again = made.send("something else", 1000, session_id="s")
        assert name_of(again) == where
        made.now += 0.1


def test_without_the_promise_it_would_have_gone_elsewhere_sometimes() -> None:
    elsewhere = 0
    for seed in range(8):
        made = Pool(4, seed=seed)
        where = promised(made, None)
        made.now += 5.0
        elsewhere += name_of(made.send("something else", 1000, session_id="s")) != where
    assert elsewhere > 2


def test_the_fallbacks_stay_behind_the_kept_endpoint() -> None:
    made = Pool(4)
    promised(made)
    again = made.send("something else", 1000, session_id="s")
    assert len(set(again.forward.endpoints)) == 3


def over(sent: Sent, *, is_early: bool, **record: object) -> None:
    """End a request, its record before or after."""
    if is_early:
        sent.record(**record)
    sent.end()
    if not is_early:
        sent.record(**record)


@pytest.mark.parametrize("failure", [{"status": 503, "is_upstream_failure": True, "ttft_s": None}, {"status": 404}])
@pytest.mark.parametrize("is_early", [False, True])
def test_nothing_is_kept_for_a_request_that_was_not_served(failure: dict[str, object], is_early: bool) -> None:
    made = Pool(4)
    over(made.send("history", 2000, session_id="s", hints=BACK), is_early=is_early, **failure)
    assert len(made.router._returns) == 0


@pytest.mark.parametrize("is_early", [False, True])
def test_the_endpoint_that_served_in_the_end_is_kept(is_early: bool) -> None:
    for seed in range(8):
        made = Pool(4, seed=seed)
        sent = made.send("history", 2000, session_id="s", hints=BACK)
        served = sent.forward.endpoints[1]
        over(sent, is_early=is_early, served_address=served, attempts=2)
        assert made.send("something else", 1000, session_id="s").target == served


def test_a_late_record_says_nothing_of_a_later_promise() -> None:
    made = Pool(4)
    failed = made.send("history", 2000, session_id="s", hints=BACK)
    failed.end()
    where = promised(made)
    failed.record(status=503, is_upstream_failure=True, ttft_s=None)
    assert name_of(made.send("something else", 1000, session_id="s")) == where


def test_a_promise_ends_with_its_time_and_with_its_first_use() -> None:
    made = Pool(4)
    promised(made)
    made.now += 11.0
    made.send("late", 1000, session_id="s")
    assert len(made.router._returns) == 0


def test_a_session_of_another_tenant_has_no_part_in_the_promise() -> None:
    made = Pool(4)
    made.send("history", 2000, session_id="s", tenant_id="a", hints=BACK).finish()
    made.send("x", 1000, session_id="s", tenant_id="b")
    assert len(made.router._returns) == 1


def test_the_endpoint_gives_way_when_it_is_too_busy() -> None:
    config = "apiVersion: shoal.dev/v1alpha1\nkind: Pool\nagents: {max_wait_s: 1}\n"
    moved = 0
    for seed in range(6):
        made = Pool(4, config=config, seed=seed)
        where = promised(made)
        flood = 0
        while flood < 40:
            made.send(f"flood {flood}", 20_000, subset=(made.router._fleet.at(where).endpoint.address,))
            flood += 1
        moved += name_of(made.send("something else", 1000, session_id="s")) != where
    assert moved == 6


def test_the_promise_of_an_endpoint_that_left_binds_nobody() -> None:
    from shoal.routing.events import EndpointLeft

    made = Pool(2)
    where = promised(made)
    made.feed(EndpointLeft(where))
    assert name_of(made.send("x", 1000, session_id="s")) != where


# ---------------------------------------------------------------------- the prefix or nothing


def test_if_available_goes_to_a_holder_of_the_prefix() -> None:
    made = Pool(4)
    holder = made.send("shared", 2000)
    holder.finish()
    asked = made.send("shared", 2000, headers={"prefer": "respond-async, if-available; q=1"})
    assert asked.target == holder.target


def test_if_available_is_refused_with_412_when_the_prefix_is_nowhere() -> None:
    made = Pool(4)
    refused = made.send("unknown", 2000, headers={"prefer": "if-available"}).refused
    assert refused.refusal.reason is RefusalReason.PRECONDITION_FAILED
    assert made.router.status().inflight == 0


@pytest.mark.parametrize("value", ["return=minimal", "if-available-later", ""])
def test_other_preferences_change_nothing(value: str) -> None:
    assert Pool(1).send("unknown", 2000, headers={"prefer": value}).forward


# ---------------------------------------------------------------------- the prefix of a session that will be back


def room_for(made: Pool, tokens: int) -> None:
    """Tell how many tokens each endpoint's cache holds."""
    for member in made.router._fleet:
        made.load(member.endpoint.id, waiting=0, running=0, num_blocks=tokens // 16, block_size_tokens=16)


def strangers(made: Pool, name: str, count: int) -> list[str]:
    """Serve prompts that nobody has seen, one after the other; returns where."""
    found = []
    for number in range(count):
        made.now += 0.5
        sent = made.send(f"{name} stranger {number}", 2000)
        sent.finish(prompt_tokens=2000, cached_tokens=0)
        found.append(name_of(sent))
    return found


@pytest.mark.parametrize("seed", range(4))
def test_prompts_go_elsewhere_that_would_push_out_the_prefix_of_a_session_that_will_be_back(seed: int) -> None:
    made = Pool(2, seed=seed)
    room_for(made, 12_000)
    where = promised(made, Hints(returns_within_s=600.0))
    # Four fit beside the 2,000 tokens and the answer.
    assert strangers(made, "early", 20).count(where) <= 4
    assert made.router.status().returns.spared > 3
    back = made.send("history", 2000, session_id="s")
    assert name_of(back) == where
    back.finish(prompt_tokens=2000, cached_tokens=2000)
    # Nobody is waited for any more, and its cache is the emptier one.
    assert strangers(made, "late", 20).count(where) > 4


def test_nobody_goes_elsewhere_for_a_session_that_does_not_come_back_in_time() -> None:
    made = Pool(2)
    room_for(made, 12_000)
    promised(made, Hints(returns_within_s=10.0))
    made.now += 11.0
    strangers(made, "late", 20)
    assert made.router.status().returns.spared == 0


def test_a_session_whose_prefix_was_pushed_out_all_the_same_is_not_sent_after_it() -> None:
    made = Pool(2)
    room_for(made, 12_000)
    where = promised(made, Hints(returns_within_s=600.0))
    endpoint = made.router._fleet.at(where).endpoint
    for number in range(20):
        made.send(f"stranger {number}", 2000, subset=(endpoint.address,)).finish(prompt_tokens=2000, cached_tokens=0)
    held = [made.send(f"flood {number}", 2000, subset=(endpoint.address,)) for number in range(4)]
    assert name_of(made.send("history", 2000, session_id="s")) != where
    gauges = made.router.status().returns
    assert (gauges.expected, gauges.kept, gauges.lost) == (0, 0, 1)
    assert len(held) == 4


def test_a_request_that_would_wait_too_long_elsewhere_spares_nobody() -> None:
    made = Pool(2)
    room_for(made, 12_000)
    where = promised(made, Hints(returns_within_s=600.0))
    (elsewhere,) = [each.endpoint for each in made.router._fleet if each.endpoint.id != where]
    for number in range(20):
        made.send(f"flood {number}", 20_000, subset=(elsewhere.address,))
    assert strangers(made, "late", 10) == [where] * 10


@pytest.mark.parametrize("seed", range(4))
def test_a_session_that_will_be_back_goes_where_its_prefix_will_last(seed: int) -> None:
    made = Pool(2, seed=seed)
    room_for(made, 12_000)
    busy, calm = (member.endpoint for member in made.router._fleet)
    where = []
    for number in range(60):
        made.now += 0.5
        made.send(f"stranger {number}", 2000, subset=(busy.address,)).finish(prompt_tokens=2000, cached_tokens=0)
        # As busy, with a prompt that is there.
        known = made.send("known", 2000, subset=(calm.address,))
        known.finish(prompt_tokens=2000, cached_tokens=1900, ttft_s=0.003)
        if number % 10 == 0:
            agent = made.send(f"agent {number}", 2000, session_id=f"a{number}", hints=BACK)
            agent.finish(prompt_tokens=2000, cached_tokens=0)
            where.append(name_of(agent))
    # It takes a while to see what comes to an endpoint.
    assert where[3:] == [calm.id] * 3


def test_a_peers_session_is_spared_and_comes_back_as_ones_own() -> None:
    gossip = Gossip(2, 2)
    for pool in gossip.pools:
        room_for(pool, 12_000)
    one, other = gossip.pools
    where = promised(one, Hints(returns_within_s=600.0))
    gossip.deliver()
    other.now = one.now
    assert strangers(other, "early", 20).count(where) <= 4
    assert name_of(other.send("something else", 1000, session_id="s")) == where
    gossip.deliver()
    assert [pool.router.status().returns.expected for pool in gossip.pools] == [0, 0]


def test_a_peer_hears_that_a_session_was_not_served() -> None:
    gossip = Gossip(2, 2)
    one, other = gossip.pools
    sent = one.send("history", 2000, session_id="s", hints=BACK)
    sent.end()
    gossip.deliver()
    assert other.router.status().returns.expected == 1
    sent.record(status=503, is_upstream_failure=True, ttft_s=None)
    gossip.deliver()
    assert [pool.router.status().returns.expected for pool in gossip.pools] == [0, 0]


# ---------------------------------------------------------------------- what a client can do to others by its word


def test_who_says_that_its_answer_will_be_long_pushes_nobodys_prefix_out() -> None:
    made = Pool(2)
    room_for(made, 12_000)
    where = promised(made, Hints(returns_within_s=600.0))
    address = made.router._fleet.at(where).endpoint.address
    for number in range(3):
        said = made.send(f"liar {number}", 200, subset=(address,), hints=Hints(output_tokens=1 << 20))
        said.finish(prompt_tokens=200, cached_tokens=0, completion_tokens=4)
    assert name_of(made.send("history", 2000, session_id="s")) == where
    assert made.router.status().returns.lost == 0


def spared_by(hints: Hints) -> int:
    """How many strangers went elsewhere for the sake of a session that got a short answer."""
    made = Pool(2)
    room_for(made, 12_000)
    sent = made.send("history", 2000, session_id="s", hints=hints)
    sent.finish(prompt_tokens=2000, cached_tokens=0, completion_tokens=4)
    strangers(made, "early", 20)
    return made.router.status().returns.spared


def test_who_says_that_its_answer_will_be_long_keeps_no_more_of_a_cache_to_itself() -> None:
    honest = spared_by(Hints(returns_within_s=600.0))
    assert honest > 3
    assert spared_by(Hints(returns_within_s=600.0, output_tokens=1 << 20)) == honest


def test_a_long_answer_that_came_does_push_prefixes_out() -> None:
    made = Pool(2)
    room_for(made, 12_000)
    where = promised(made, Hints(returns_within_s=600.0))
    address = made.router._fleet.at(where).endpoint.address
    made.send("long", 200, subset=(address,)).finish(prompt_tokens=200, cached_tokens=0, completion_tokens=12_000)
    made.send("history", 2000, session_id="s")
    assert made.router.status().returns.lost == 1


def test_sessions_that_do_not_come_back_are_forgotten_as_others_come() -> None:
    made = Pool(2)
    for number in range(20):
        made.send(f"p{number}", 500, session_id=f"s{number}", hints=Hints(returns_within_s=5.0)).finish()
    assert made.router.status().returns.expected == 20
    made.now += 6.0
    for number in range(10):
        made.send(f"q{number}", 500, session_id=f"t{number}", hints=Hints(returns_within_s=5.0)).finish()
    assert made.router.status().returns.expected == 10


def test_a_peer_that_promises_nonsense_breaks_nothing() -> None:
    made = Pool(2)
    room_for(made, 12_000)
    session = session_of(Request(id="r", session_id="s"))
    for news in (
        PeerExpects(session, "e1", 0, 0),
        PeerExpects(session, "nowhere", MAX_EXPECTED_MS, 1 << 32),
        PeerExpects(b"", "e1", MAX_EXPECTED_MS, 1 << 32),
        PeerExpects(session, "e1", MAX_EXPECTED_MS, 0),
    ):
        made.feed(PeerTold("peer", (news,)))
        assert made.send("x", 500, session_id="s").target
