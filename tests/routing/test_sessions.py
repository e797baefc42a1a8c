"""An operator ends the requests of a session."""

from shoal.pool import EndpointState, RefusalReason
from shoal.routing import Arrived, Forward, Refuse
from shoal.routing.commands import Cut, Fetch
from shoal.routing.events import BlocksCleared, EndpointChanged, Fetched, SessionAborted
from tests.routing.script import Pool, blocks_of, request_of
from tests.routing.test_exact import ExactPool


def cut(pool: Pool, event: SessionAborted) -> list[str]:
    """The requests that are to be cut."""
    commands = pool.feed(event)
    assert all(isinstance(command, Cut) for command in commands)
    return [command.request_id for command in commands if isinstance(command, Cut)]


def test_exactly_the_requests_of_the_session_that_run_are_cut() -> None:
    pool = Pool()
    doomed = [pool.send(session_id="a") for _ in range(3)]
    pool.send(session_id="b")
    pool.send()
    doomed[0].end()
    assert cut(pool, SessionAborted("a")) == [doomed[1].request_id, doomed[2].request_id]
    assert cut(pool, SessionAborted("nobody")) == []


def test_a_session_of_one_tenant_is_not_that_of_another() -> None:
    pool = Pool()
    sent = {tenant: pool.send(session_id="a", tenant_id=tenant).request_id for tenant in ("x", "y", "")}
    assert cut(pool, SessionAborted("a", "x")) == [sent["x"]]
    assert cut(pool, SessionAborted("a", "")) == [sent[""]]
    assert cut(pool, SessionAborted("a")) == list(sent.values())


def test_a_cut_request_is_booked_until_it_has_ended() -> None:
    pool = Pool()
    sent = pool.send(session_id="a")
    (command,) = pool.feed(SessionAborted("a"))
    assert isinstance(command, Cut)
    assert command.refusal.reason is RefusalReason.ABORTED
    assert pool.router.status().inflight == 1
    sent.finish(is_cut=True)
    assert (pool.router.status().inflight, pool.router.status().unclosed) == (0, 0)
    assert pool.router.status().endpoints[0].failures_total == 0


def test_a_paused_endpoint_gets_nothing_and_keeps_what_it_holds() -> None:
    pool = Pool(2)
    held = pool.send("prompt", 6400)
    held.finish(prompt_tokens=6400, cached_tokens=0)
    name = held.target.replace("10.0.0.", "e").removesuffix(":8000")
    pool.feed(EndpointChanged(name, EndpointState.PAUSED))
    assert {pool.send(f"other {turn}").target for turn in range(6)} == (
        {"10.0.0.0:8000", "10.0.0.1:8000"} - {held.target}
    )
    pool.feed(EndpointChanged(name, EndpointState.READY))
    again = pool.send("prompt", 6400)
    assert again.target == held.target
    assert again.finish().predicted_cached_tokens > 6000
    pool.feed(BlocksCleared(name))
    assert pool.send("prompt", 6400).finish().predicted_cached_tokens == 0


def test_a_request_that_waits_for_its_tokens_is_refused() -> None:
    pool = ExactPool()
    waiting = {name: request_of(name, 640, session_id=name[0]) for name in ("a-1", "b-1")}
    for request in waiting.values():
        (fetch,) = pool.feed(Arrived(request, blocks_of("p", 640)))
        assert isinstance(fetch, Fetch)
    (refuse,) = pool.feed(SessionAborted("a"))
    assert isinstance(refuse, Refuse)
    assert (refuse.request_id, refuse.refusal.reason) == ("a-1", RefusalReason.ABORTED)
    assert pool.feed(Fetched("a-1", 640, ())) == []
    (forward,) = pool.feed(Fetched("b-1", 640, ()))
    assert isinstance(forward, Forward)
