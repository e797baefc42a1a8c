"""Whatever happens in whatever order: each request ends once, and everything is as it was in the end.

What happens: arrivals, answers, records, cancels, aborts, timeouts, reloads, evictions, endpoints that come and go.
"""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shoal.pool import Endpoint, EndpointState, Outcome, Request, ServedModel
from shoal.routing import Account, Arrived, Command, Configured, Ended, Forward, Recorded, Refuse
from shoal.routing.commands import Cut, Evict, Hold
from shoal.routing.events import (
    EndpointChanged,
    EndpointJoined,
    EndpointLeft,
    Evicted,
    Kept,
    ModelsSeen,
    SessionAborted,
)
from tests.routing.flowscript import POOL, FlowPool, flow_of

TENANTS = "tenants: {a: {tokens_per_min: 20000, weight: 3}, b: {requests_per_s: 20, priority: 4}, '*': {}}\n"
CONFIGS = (
    flow_of(2, tenants=TENANTS, control="  maxRequests: 30\n  noEndpointRequestTTL: 4s\n", ttl="8s"),
    flow_of(1, tenants=TENANTS, flow=", bands: strict", ttl="3s"),
    flow_of(3, flow=", minimum_share_ratio: 0.5", control="  defaultPriorityBand: {maxRequests: 5}\n"),
    POOL + "flow: {enabled: true}\n" + TENANTS,
    POOL + TENANTS,
    flow_of(2, tenants=TENANTS, flow=", eviction: before-first-byte", ttl="30s"),
    flow_of(1, tenants=TENANTS, flow=", eviction: always, bands: strict"),
)
NAMES = ("e0", "e1", "e2")
PAYS = tuple("trust_headers: true" in config and TENANTS in config for config in CONFIGS)


class Purse:
    """What a tenant may still take, told by its limit and by what was taken and given."""

    def __init__(self, limit: float, per_s: float, now: float) -> None:
        self.limit, self.per_s, self.left, self.at = limit, per_s, limit, now

    def take(self, amount: float, now: float) -> None:
        self.left = min(self.limit, self.left + (now - self.at) * self.per_s)
        self.left, self.at = min(self.limit, self.left - amount), now


class PayingPool(FlowPool):
    """Keeps a purse for the tokens of tenant a and one for the requests of tenant b."""

    def __init__(self) -> None:
        self.config = CONFIGS[0]
        self.purses: dict[str, Purse] = {}
        self.reserved: dict[str, tuple[str, float]] = {}
        super().__init__(CONFIGS[0], endpoints=0)
        self.purses = {"a": Purse(20_000, 20_000 / 60, self.now), "b": Purse(20, 20, self.now)}

    def feed(self, event: object) -> list[Command]:
        if isinstance(event, Configured):
            self.config = event.text
        commands = super().feed(event)
        if isinstance(event, Arrived) and event.request.tenant_id in self.purses:
            self._arrived(event.request)
        for command in commands:
            if command.request_id in self.reserved:
                if isinstance(command, Refuse):
                    self._settle(command.request_id, 0.0)
                elif isinstance(command, Account):
                    self._answered(command)
        return commands

    def _arrived(self, request: Request) -> None:
        if PAYS[CONFIGS.index(self.config)] and self.state(request.id) != "rejected-over-budget":
            amount = request.prompt_tokens + 256.0 if request.tenant_id == "a" else 1.0
            self.reserved[request.id] = (request.tenant_id, amount)
            self.purses[request.tenant_id].take(amount, self.now)

    def _answered(self, account: Account) -> None:
        """What the records of the script say: an answer, a failure, or a client that left its prompt to be read."""
        outcome, (tenant, held) = account.outcome, self.reserved[account.request_id]
        used = 0.0 if outcome.is_upstream_failure else 940.0 if outcome.completion_tokens else account.prompt_tokens
        if not account.is_recorded:
            used = held
        self._settle(account.request_id, min(used, 1.0) if tenant == "b" else used)

    def _settle(self, name: str, used: float) -> None:
        tenant, held = self.reserved.pop(name)
        self.purses[tenant].take(used - held, self.now)


class Gate(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = PayingPool()
        self.count = 0
        self.forwarded: set[str] = set()
        self.ended: set[str] = set()
        self.endpoints: set[str] = set()
        self.evicted: Counter[str] = Counter()
        self.answered: Counter[str] = Counter()

    # ------------------------------------------------------------------ what may happen

    @rule(
        tenant=st.sampled_from(["", "a", "b", "c"]),
        objective=st.sampled_from(["", "high", "low", "none"]),
        tokens=st.integers(0, 3000),
        session=st.sampled_from(["", "s"]),
        wait_ms=st.sampled_from(["", "500", "x"]),
    )
    def arrives(self, tenant: str, objective: str, tokens: int, session: str, wait_ms: str) -> None:
        self.count += 1
        headers = {"x-shoal-max-wait-ms": wait_ms} if wait_ms else {}
        self.pool.ask(f"r{self.count}", tenant, objective, tokens, session_id=session, headers=headers)

    def _some(self, draw: st.DataObject, of: str) -> str | None:
        states = {name: self.state(name) for name in self.pool.told}
        found = sorted(name for name, state in states.items() if state == of)
        return draw.draw(st.sampled_from(found)) if found else None

    def state(self, name: str) -> str:
        told = self.pool.told[name]
        if any(isinstance(each, Account) for each in told):
            return "closed"
        if any(isinstance(each, Refuse) for each in told):
            return "refused"
        last = [each for each in told if isinstance(each, Forward | Hold)][-1]
        if isinstance(last, Hold):
            return "waits"
        return "ended" if name in self.ended else "sent"

    @rule(draw=st.data())
    def a_waiting_client_leaves(self, draw: st.DataObject) -> None:
        name = self._some(draw, "waits")
        if name is not None:
            self.pool.feed(Ended(name))

    @rule(draw=st.data())
    def a_stream_ends(self, draw: st.DataObject) -> None:
        name = self._some(draw, "sent")
        if name is not None:
            self.ended.add(name)
            self.pool.feed(Ended(name))

    def _asked(self) -> list[str]:
        """Who was asked back, runs, and has not answered."""
        found = []
        for name, told in self.pool.told.items():
            times = sum(isinstance(each, Evict) for each in told)
            if times > self.answered[name] and self.state(name) == "sent":
                found.append(name)
        return sorted(found)

    @precondition(lambda self: self._asked())
    @rule(draw=st.data(), answer=st.sampled_from(["back", "back", "kept", "cut"]))
    def a_host_answers_an_eviction(self, draw: st.DataObject, answer: str) -> None:
        name = draw.draw(st.sampled_from(self._asked()))
        evict = [each for each in self.pool.told[name] if isinstance(each, Evict)][-1]
        self.answered[name] = sum(isinstance(each, Evict) for each in self.pool.told[name])
        if answer == "back":
            self.evicted[name] += 1
            self.pool.feed(Evicted(name))
        elif answer == "kept" or not evict.may_cut:
            self.pool.feed(Kept(name))
        else:
            self.ended.add(name)
            self.pool.feed(Ended(name))

    @rule(name=st.integers(0, 60), answer=st.sampled_from([Evicted, Kept]))
    def an_answer_comes_that_nobody_asked_for(self, name: int, answer: type[Evicted | Kept]) -> None:
        told = self.pool.told.get(f"r{name}")
        if told is None or self.state(f"r{name}") != "sent":
            self.pool.feed(answer(f"r{name}"))

    @rule(tenant=st.sampled_from([None, "a"]))
    def an_operator_aborts_a_session(self, tenant: str | None) -> None:
        for command in self.pool.feed(SessionAborted("s", tenant)):
            if isinstance(command, Cut) and command.request_id not in self.ended:
                self.ended.add(command.request_id)
                self.pool.feed(Ended(command.request_id))

    @rule(draw=st.data(), kind=st.sampled_from(["good", "failed", "gone", "early"]))
    def a_record_comes(self, draw: st.DataObject, kind: str) -> None:
        name = self._some(draw, "sent" if kind == "early" else "ended")
        if name is None:
            return
        forward = [each for each in self.pool.told[name] if isinstance(each, Forward)][-1]
        served = forward.endpoints[0]
        outcome = {
            "good": Outcome(
                status=200, served_address=served, ttft_s=0.2, duration_s=1.0, prompt_tokens=900, cached_tokens=100,
                completion_tokens=40,
            ),
            "failed": Outcome(status=503, served_address=served, is_upstream_failure=True),
            "gone": Outcome(served_address=served, is_client_gone=True),
            "early": Outcome(status=200, served_address=served, ttft_s=3.0),
        }[kind]  # fmt: skip
        self.pool.feed(Recorded(name, outcome))

    @rule(after_s=st.sampled_from([0.0, 0.01, 0.3, 2.0, 9.0, 70.0]))
    def time_passes(self, after_s: float) -> None:
        self.pool.tick(self.pool.now + after_s)

    @precondition(lambda self: self.pool.router.deadline() is not None)
    @rule()
    def a_deadline_comes(self) -> None:
        deadline = self.pool.router.deadline()
        assert deadline is not None
        self.pool.tick(max(self.pool.now, deadline))

    @rule(config=st.sampled_from(CONFIGS))
    def the_configuration_changes(self, config: str) -> None:
        self.pool.feed(Configured(config))

    @rule(name=st.sampled_from(NAMES))
    def an_endpoint_joins(self, name: str) -> None:
        self.endpoints.add(name)
        self.pool.feed(EndpointJoined(Endpoint(id=name, address=f"10.0.0.{name[1]}:80"), EndpointState.READY))
        self.pool.feed(ModelsSeen(name, (ServedModel(id="m"),)))

    @rule(name=st.sampled_from(NAMES), state=st.sampled_from(list(EndpointState)[:2]))
    def an_endpoint_changes(self, name: str, state: EndpointState) -> None:
        self.pool.feed(EndpointChanged(name, state))

    @rule(name=st.sampled_from(NAMES))
    def an_endpoint_leaves(self, name: str) -> None:
        self.pool.feed(EndpointLeft(name))

    # ------------------------------------------------------------------ what always holds

    @invariant()
    def each_request_ends_at_most_once(self) -> None:
        for name, told in self.pool.told.items():
            kinds = Counter(type(each) for each in told)
            again = self.evicted[name]
            assert kinds[Refuse] + kinds[Account] <= 1
            assert again <= kinds[Forward] + kinds[Refuse] <= 1 + again
            assert kinds[Account] <= kinds[Forward]
            assert again <= kinds[Hold] + kinds[Forward] - min(1, kinds[Forward])
            assert kinds[Hold] <= 1 + again
            assert self.answered[name] <= kinds[Evict] <= 2 * len(CONFIGS)

    @invariant()
    def who_waits_has_a_time_to_give_up(self) -> None:
        if self.pool.router.status().flow.requests:
            assert self.pool.router.deadline() is not None

    @invariant()
    def the_queue_holds_those_who_wait(self) -> None:
        waiting = sum(self.state(name) == "waits" for name in self.pool.told)
        flow = self.pool.router.status().flow
        if flow.is_on:
            assert flow.requests == waiting == sum(band.requests for band in flow.bands)
        else:
            assert waiting == 0

    @invariant()
    def each_budget_is_what_was_used(self) -> None:
        admission, pool = self.pool.router._admission, self.pool
        assert admission is not None
        for tenant, place in (("a", 1), ("b", 0)):
            purse = pool.purses[tenant]
            purse.take(0.0, pool.now)
            left = admission._charges.budgets.left(tenant, pool.now)[place]
            assert (purse.limit if left is None else left) == pytest.approx(purse.left)

    def teardown(self) -> None:
        """Let everything end, and look at what is left."""
        pool = self.pool
        pool.feed(Configured(CONFIGS[0]))
        for _ in range(10):
            pool.tick(pool.now + 100.0)
            for name in list(pool.told):
                if self.state(name) == "sent":
                    self.ended.add(name)
                    pool.feed(Ended(name))
        for told in pool.told.values():
            kinds = Counter(type(each) for each in told)
            assert kinds[Refuse] + kinds[Account] == 1
        status = pool.router.status()
        assert (status.inflight, status.unclosed, status.flow.requests, status.flow.size_bytes) == (0, 0, 0, 0)
        assert status.flow.open_charges == 0
        for endpoint in status.endpoints:
            assert (endpoint.inflight_requests, endpoint.inflight_uncached_tokens) == (0, 0)
        assert not pool.reserved
        self.each_budget_is_what_was_used()
        self.one_more_of_each_kind_is_paid_for()

    def one_more_of_each_kind_is_paid_for(self) -> None:
        """After whatever came before, one answered, one that failed, and one that left cost what they should."""
        pool = self.pool
        for name in NAMES:
            pool.feed(EndpointLeft(name))
        pool.join("fresh", "10.0.1.1:80")
        records = {
            "answered": Outcome(
                status=200, served_address="10.0.1.1:80", ttft_s=0.2, duration_s=1.0, prompt_tokens=900,
                cached_tokens=100, completion_tokens=40,
            ),
            "failed": Outcome(status=503, served_address="10.0.1.1:80", is_upstream_failure=True),
        }  # fmt: skip
        left = pool.purses["a"].left
        for name, state in (("answered", "sent"), ("failed", "sent"), ("left", "waits")):
            assert pool.ask(name, "a", tokens=900) == state
            self.each_budget_is_what_was_used()
        assert pool.purses["a"].left == pytest.approx(left - 3 * (900 + 256))
        pool.feed(Ended("left"))
        self.each_budget_is_what_was_used()
        for name, outcome in records.items():
            pool.feed(Ended(name))
            pool.feed(Recorded(name, outcome))
            self.each_budget_is_what_was_used()
        assert pool.purses["a"].left == pytest.approx(left - 940.0)
        assert pool.router.status().flow.open_charges == 0


TestGate = Gate.TestCase
TestGate.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
