"""Requests that are decided in one pass of the loop leave together."""

import asyncio
from collections.abc import Callable
from unittest.mock import patch

import pytest

from shoal.hosts.direct.turns import MOST_LEAVING
from tests.hosts.direct.fuzz_readers import Asked, read_answers
from tests.hosts.direct.fuzz_rig import Transport, World, world

ASK = b"POST /any HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\n\r\n"


def warm(it: World, connections: int) -> None:
    """Have so many engine connections unused."""
    clients = [it.client() for _ in range(connections)]
    for client in clients:
        client.peer_says(ASK + b"w")
    it.loop.run()
    it.asked.clear()


def test_a_request_by_itself_leaves_at_once() -> None:
    with world() as it:
        warm(it, 1)
        it.client().peer_says(ASK + b"a")
        assert [asked.body for asked in it.asked] == [b"a"]


def test_a_request_on_used_connections_makes_no_task_no_timer_and_one_callback() -> None:
    with world() as it:
        warm(it, 1)
        client = it.clients[0]
        soon: list[object] = []
        call_soon = it.loop.call_soon

        def noted(callback: Callable[..., object], *args: object) -> asyncio.Handle:
            if callback is not it.answer:
                soon.append(callback)
            return call_soon(callback, *args)

        def late(delay_s: float, callback: Callable[..., object], *args: object) -> asyncio.Handle:
            raise AssertionError(f"a timer for {callback}")

        with patch.object(it.loop, "call_soon", noted), patch.object(it.loop, "call_later", late):
            for text in (b"a", b"b", b"c"):
                client.peer_says(ASK + text)
                it.loop.run()
        assert [asked.body for asked in it.asked] == [b"a", b"b", b"c"]
        assert soon == [it.plane.turn._finish] * 3
        assert len(it.engines) == 1


def test_requests_of_one_pass_leave_in_order_at_its_end_and_no_more_than_a_few_wait() -> None:
    with world() as it:
        warm(it, MOST_LEAVING + 3)
        it.answer = lambda *_: None
        bodies = [b"%x" % number for number in range(MOST_LEAVING + 2)]
        for body in bodies:
            it.client().peer_says(ASK + body)
        assert [asked.body for asked in it.asked] == bodies[: MOST_LEAVING + 1]
        it.loop.run()
        assert [asked.body for asked in it.asked] == bodies


def test_a_client_that_leaves_before_its_request_did_sends_nothing() -> None:
    with world() as it:
        warm(it, 2)
        it.answer = lambda *_: None
        it.client().peer_says(ASK + b"a")
        gone = it.client()
        gone.peer_says(ASK + b"b")
        gone.peer_resets()
        it.loop.run()
        assert [asked.body for asked in it.asked] == [b"a"]


def test_an_engine_that_speaks_before_it_was_asked_is_not_believed() -> None:
    with world() as it:
        warm(it, 2)
        before = [bytes(each.transport.heard) for each in it.engines]
        it.client().peer_says(ASK + b"a")
        client = it.client()
        client.peer_says(ASK + b"b")
        (idle,) = [
            each.transport for each, heard in zip(it.engines, before, strict=True) if each.transport.heard == heard
        ]
        idle.peer_says(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nwrong")

        def answer(engine: Transport, asked: Asked) -> None:
            engine.peer_says(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nright")

        it.answer = answer
        it.loop.run()
        assert [each.body for each in read_answers(client, [b"POST"])] == [b"right"]


@pytest.mark.parametrize("lost", [0, 1])
def test_a_request_whose_engine_is_lost_before_it_left_is_sent_once(lost: int) -> None:
    with world() as it:
        warm(it, 3)
        it.answer = lambda *_: None
        before = [bytes(each.transport.heard) for each in it.engines]
        it.client().peer_says(ASK + b"a")
        idle = [each.transport for each, heard in zip(it.engines, before, strict=True) if each.transport.heard == heard]
        idle[lost].peer_resets()
        it.client().peer_says(ASK + b"b")
        it.loop.run()
        assert [asked.body for asked in it.asked] == [b"a", b"b"]


def test_a_passenger_that_got_on_twice_departs_once() -> None:
    with world() as it:
        warm(it, 2)
        it.answer = lambda *_: None
        it.client().peer_says(ASK + b"a")
        it.client().peer_says(ASK + b"b")
        (waiting,) = it.plane.turn._leaving
        it.plane.turn.leave(waiting)
        it.loop.run()
        assert [asked.body for asked in it.asked] == [b"a", b"b"]


def test_a_request_that_can_be_neither_sent_nor_answered_holds_up_none_behind_it() -> None:
    def breaks(_: bytes) -> None:
        raise MemoryError

    with world() as it:
        warm(it, 4)
        it.answer = lambda *_: None
        before = [bytes(each.transport.heard) for each in it.engines]
        it.client().peer_says(ASK + b"a")
        idle = [each for each, heard in zip(it.engines, before, strict=True) if each.transport.heard == heard]
        clients = [it.client() for _ in range(3)]
        for client in clients:
            client.peer_says(ASK + b"b")
        for engine in idle[1:]:
            engine.transport.write = breaks  # type: ignore[method-assign]
        for client in clients[:2]:
            client.write = breaks  # type: ignore[method-assign]
        it.loop.run()
        assert [asked.body for asked in it.asked] == [b"a", b"b"]
        assert [client.is_lost for client in clients] == [True, True, False]
        assert [account.outcome.status for account in it.accounts[4:]] == [500, 500]


@pytest.mark.parametrize("together", [1, 2, MOST_LEAVING + 1])
def test_a_request_that_cannot_be_sent_for_a_reason_nobody_foresaw_is_answered_at_once(together: int) -> None:
    def breaks(_: bytes) -> None:
        raise MemoryError

    with world() as it:
        warm(it, together)
        for engine in it.engines:
            engine.transport.write = breaks  # type: ignore[method-assign]
        clients = [it.client() for _ in range(together)]
        for client in clients:
            client.peer_says(ASK + b"a")
        it.loop.run()
        for client in clients:
            (answer,) = read_answers(client, [b"POST"])
            assert answer.status == 500
        assert [account.outcome.status for account in it.accounts[-together:]] == [500] * together
