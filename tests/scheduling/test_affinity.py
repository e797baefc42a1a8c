import base64

import numpy as np
import pytest

from shoal.scheduling.affinity import (
    EncodedEndpointHeaderConfig,
    SessionAffinityFilter,
    SessionAffinityScorer,
    SessionIdConfig,
    SessionIdSource,
)
from shoal.scheduling.filters import LabelSelectorFilter
from shoal.scheduling.producers import SessionIdProducer
from tests.scheduling.script import decide, request, scheduler, view


def by_id(**fields: float) -> SessionAffinityFilter:
    return SessionAffinityFilter(strategy="session_id", session_id_config=SessionIdConfig(**fields))  # type: ignore[arg-type]


def token(endpoint_id: str) -> str:
    return base64.b64encode(endpoint_id.encode()).decode()


def test_the_token_of_the_last_answer_leads_back_to_its_endpoint() -> None:
    made = scheduler(SessionAffinityFilter())
    seen = view(4)
    first = decide(made, request(), seen)
    headers = dict(made.response_headers(request(), first))
    assert headers == {"x-session-token": token(first.chosen[0])}
    for _ in range(10):
        again = decide(made, request(headers=headers), seen)
        assert again.candidates == (first.chosen[0],)


@pytest.mark.parametrize("bad", ["", "%%%", token("gone"), base64.b64encode(b"\xff\xfe").decode(), "e1"])
def test_a_bad_or_stale_token_leaves_all_candidates(bad: str) -> None:
    decision = decide(scheduler(SessionAffinityFilter()), request(headers={"x-session-token": bad}), view(4))
    assert len(decision.candidates) == 4


def test_the_token_header_has_a_name_of_choice() -> None:
    plugin = SessionAffinityFilter(encoded_endpoint_header_config=EncodedEndpointHeaderConfig(header="X-Sticky"))
    assert plugin.request_headers() == ("x-sticky",)
    decision = decide(scheduler(plugin), request(headers={"x-sticky": token("e2")}), view(4))
    assert decision.candidates == ("e2",)


def test_a_session_id_stays_where_it_went_first() -> None:
    made = scheduler(by_id())
    seen = view(4)
    asked = request(headers={"x-session-id": "s1"})
    first = decide(made, asked, seen)
    made.dispatched(asked, seen, first, 0.0)
    assert made.response_headers(asked, first) == ()
    assert all(decide(made, asked, seen).chosen[0] == first.chosen[0] for _ in range(10))


def test_an_idle_session_is_forgotten() -> None:
    made = scheduler(by_id(eviction_ttl_seconds=300, eviction_sweep_seconds=10))
    seen = view(4)
    asked, other = request(headers={"x-session-id": "s1"}), request(headers={"x-session-id": "s2"})
    made.dispatched(asked, seen, decide(made, asked, seen), 0.0)
    made.dispatched(other, seen, decide(made, other, seen), 250.0)
    made.dispatched(other, seen, decide(made, other, seen), 301.0)
    assert len(decide(made, asked, seen).candidates) == 4
    assert len(decide(made, other, seen).candidates) == 1


def test_a_session_moves_when_its_endpoint_is_gone_and_then_stays() -> None:
    made = scheduler(by_id())
    asked = request(headers={"x-session-id": "s1"})
    four = view(4)
    first = decide(made, asked, four)
    made.dispatched(asked, four, first, 0.0)
    rest = four.keep(np.array([endpoint.id != first.chosen[0] for endpoint in four.endpoints]))
    second = decide(made, asked, rest)
    assert len(second.candidates) == 3
    made.dispatched(asked, rest, second, 1.0)
    assert decide(made, asked, four).chosen[0] == second.chosen[0]


def test_a_session_returns_when_it_only_had_to_step_aside() -> None:
    plugin = SessionAffinityScorer(strategy="session_id")
    made = scheduler(plugin)
    asked = request(headers={"x-session-id": "s1"})
    seen = view(4)
    first = decide(made, asked, seen)
    made.dispatched(asked, seen, first, 0.0)
    elsewhere = next(name for name in ("e0", "e1") if name != first.chosen[0])
    made.dispatched(asked, seen, first._replace(chosen=(elsewhere,)), 1.0)
    assert decide(made, asked, seen).chosen[0] == first.chosen[0]


def test_the_scorer_prefers_without_insisting() -> None:
    plugin = SessionAffinityScorer()
    scored = plugin.score(request(headers={"x-session-token": token("e1")}), view(3))
    assert list(scored) == [0.0, 1.0, 0.0]


def test_affinity_works_behind_another_filter() -> None:
    labels = [{"a": "1"}, {}, {"a": "1"}]
    made = scheduler(LabelSelectorFilter(match_labels={"a": "1"}), SessionAffinityFilter())
    seen = view(labels=labels)
    assert decide(made, request(headers={"x-session-token": token("e2")}), seen).candidates == ("e2",)
    assert decide(made, request(headers={"x-session-token": token("e1")}), seen).candidates == ("e0", "e2")


def test_a_session_id_may_come_from_a_cookie() -> None:
    source = SessionIdSource(attribute="session-id", producer="session-id-producer")
    plugin = SessionAffinityFilter(strategy="session_id", session_id_config=SessionIdConfig(sources=(source,)))
    plugin.connect({"session-id-producer": SessionIdProducer(cookie_name="sid")})
    made = scheduler(plugin)
    seen = view(4)
    asked = request(headers={"cookie:sid": "abc"})
    made.dispatched(asked, seen, decide(made, asked, seen), 0.0)
    assert len(decide(made, asked, seen).candidates) == 1
    assert len(decide(made, request(headers={}), seen).candidates) == 4


def test_sessions_survive_a_reload() -> None:
    old, new = scheduler(by_id()), scheduler(by_id())
    seen = view(4)
    asked = request(headers={"x-session-id": "s1"})
    first = decide(old, asked, seen)
    old.dispatched(asked, seen, first, 0.0)
    new.adopt(old)
    assert decide(new, asked, seen).candidates == (first.chosen[0],)


def test_a_source_names_either_a_header_or_an_attribute() -> None:
    source = SessionIdSource(header="a", attribute="b")
    with pytest.raises(ValueError, match=r"sources\[0\]"):
        SessionAffinityFilter(strategy="session_id", session_id_config=SessionIdConfig(sources=(source,)))


def test_a_session_gives_way_when_its_endpoint_is_too_busy() -> None:
    token = base64.b64encode(b"e0").decode()
    asked = request(headers={"x-session-token": token})
    busy = view(inflight_prefill_s=[3.0, 0.5])
    for made in (SessionAffinityFilter(max_wait_penalty_ms=2000), SessionAffinityFilter(max_wait_penalty_ms=3000)):
        assert made.keep(asked, view(inflight_prefill_s=[1.0, 0.5])).tolist() == [True, False]
    assert SessionAffinityFilter(max_wait_penalty_ms=2000).keep(asked, busy).tolist() == [True, True]
    assert SessionAffinityScorer(max_wait_penalty_ms=2000).score(asked, busy).tolist() == [0.0, 0.0]
    assert SessionAffinityFilter().keep(asked, busy).tolist() == [True, False]


def test_how_busy_it_is_goes_by_the_prediction_where_there_is_one() -> None:
    token = base64.b64encode(b"e0").decode()
    seen = view(inflight_prefill_s=[0.0, 0.0], predicted_ttft_s=[3.0, 0.5])
    made = SessionAffinityFilter(max_wait_penalty_ms=2000)
    assert made.keep(request(headers={"x-session-token": token}), seen).tolist() == [True, True]
