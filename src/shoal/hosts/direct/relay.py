"""One request between its client and an engine: placed, sent, tried again, spliced, recorded.

Owns the order of things after a request is complete, whether the router answers at once or later.  Until the first byte
of the answer's body nothing has gone to the client, so the request can go to another engine; from then on bytes pass as
they come.  Where a body ends is `splice`'s, heads on their way are `passing`'s, connections `pools`' and `clients`'.
"""

import asyncio
from time import monotonic
from typing import TYPE_CHECKING

from shoal.hosts.direct import replies
from shoal.hosts.direct.answerheads import SWITCHED, AnswerHead, BadAnswer
from shoal.hosts.direct.heads import RequestHead
from shoal.hosts.direct.passing import answer_start, request_start
from shoal.hosts.direct.pools import EngineConnection
from shoal.hosts.direct.splice import Splice
from shoal.hosts.direct.tails import NO_USAGE, keeps_first, keeps_tail, usage_in, usage_of
from shoal.hosts.direct.tunnels import Tunnel
from shoal.hosts.logs import Log
from shoal.hosts.picker import Answered, Placed
from shoal.hosts.waiting import Asked, Waiting
from shoal.pool import Outcome
from shoal.routing import Ended
from shoal.routing.commands import Cut, Evict
from shoal.routing.events import Evicted, Kept

if TYPE_CHECKING:
    from shoal.hosts.direct.clients import ClientConnection
    from shoal.hosts.direct.plane import Plane

log = Log("direct")

RETRY_PAUSE_S = 0.005
"""Before the second retry, doubled for each further one; the first goes out at once."""

JOIN_BYTES = 64 * 1024
"""A body up to this size costs less to copy behind its head than to write as a second piece."""

_BODYLESS = frozenset((204, 304))


class Relay:
    """One request.  `start` it once; `leave` when its client has gone.

    request_id: the minted one.  dialling: the connection that is being opened, or the pause before a retry; whoever
    sets it clears it.
    """

    __slots__ = (
        "_answer", "_body", "_charged", "_client", "_engine", "_engine_ttft_s", "_flags", "_has_begun", "_head",
        "_held_at", "_is_changed", "_is_resent", "_is_retry", "_made_id", "_pending", "_placed", "_plane", "_pool",
        "_quiet_since", "_received_at", "_seen", "_splice", "_started_at", "_tries", "_ttft_s", "_waiting",
        "_whole", "dialling", "request_id",
    )  # fmt: skip

    def __init__(
        self,
        plane: "Plane",
        client: "ClientConnection",
        head: RequestHead,
        body: bytes,
        charged: int,
        started_at: float,
        received_at: float,
    ) -> None:
        self._plane = plane
        self._client = client
        self._head = head
        self._body = body
        self._charged = charged
        self._started_at = started_at
        self._received_at = self._quiet_since = received_at
        self._answer: AnswerHead | None = None
        self._engine: EngineConnection | None = None
        self._splice: Splice | None = None
        self._whole = b""
        self._ttft_s: float | None = None
        self._engine_ttft_s: float | None = None
        self._has_begun = self._is_changed = self._is_resent = self._is_retry = False
        self._pending = b""
        self._made_id = b"" if "x-request-id" in head.headers else plane.fresh_id()
        self._flags = ""
        self._tries = 0
        self._held_at = 0.0
        self._seen = -1
        self._waiting: Waiting | None = None
        self.dialling: asyncio.Task[None] | asyncio.TimerHandle | None = None
        self.request_id = ""
        # _placed, _pool: from `start` on.

    # ------------------------------------------------------------------ on the way to an engine

    def start(self, tenant: str) -> None:
        """Ask the router and send the request, or answer what it is refused with, as soon as the router has decided."""
        head, target, picker = self._head, self._head.target, self._plane.picker
        self.request_id = picker.mint()
        try:
            placed = picker.ask(self.request_id, target.method, target.path, head.headers, self._body, tenant)
        except Exception as error:
            self._unplaced(error)
            return
        if isinstance(placed, Waiting):
            self._wait(placed)
        else:
            self._decided(placed)

    def _wait(self, waiting: Waiting) -> None:
        """Keep the request, its body charged even if it came in one piece, until the router has decided."""
        if not self._charged:
            self._charged = len(self._body)
            self._plane.picker.buffered_bytes += self._charged
        self._waiting = waiting
        waiting.then(self._decided)

    def _decided(self, placed: Placed | Answered | Exception) -> None:
        self._waiting = None
        if isinstance(placed, Placed):
            self._send(placed)
        elif isinstance(placed, Answered):
            self._refuse(placed)
        else:
            self._unplaced(placed)

    def _refuse(self, answered: Answered) -> None:
        self._drop_body()
        self._client.answer(answered.status, answered.headers, answered.body)

    def _unplaced(self, error: Exception) -> None:
        self._plane.picker.driver.fold.unplaced.add()
        log.exception("a request could not be placed", error)
        self._drop_body()
        self._client.answer_error(500, replies.FAULT)

    def _send(self, placed: Placed) -> None:
        self._plane.active += 1
        self._placed = placed
        body = placed.body
        self._is_changed |= body is not self._body
        self._body = body
        self._try()

    def _try(self) -> None:
        self.dialling = None
        forward = self._placed.forward
        try:
            self._pool = pool = self._plane.pools.of(forward.endpoints[self._tries])
            self._tries += 1
            # A request that may be sent only once is not risked on a connection that the engine may be about to close.
            connection = pool.take() if forward.retry_allowed else None
            if connection is None:
                pool.dial(self)
            else:
                self.connected(connection)
        except Exception as error:
            self.fault(error)

    def connected(self, connection: EngineConnection) -> None:
        """Send the request: at once, or with others that are decided in the same pass of the loop."""
        self._engine = connection
        connection.relay = self
        if self._plane.active > 1 and len(self._body) <= JOIN_BYTES:
            self._plane.turn.leave(self)
        else:
            self.depart()

    def depart(self) -> None:
        """Write the request."""
        engine = self._engine
        if engine is None or engine.take is not None:
            return  # nowhere to go, or gone already with another try
        if engine.relay is not self:
            # It spoke unasked meanwhile and was closed.
            self.engine_lost(engine, None)
            return
        if engine.transport.is_closing():
            return  # it tells when it is lost
        body, plane = self._body, self._plane
        start = request_start(
            self._head,
            len(body),
            is_changed=self._is_changed,
            made_id=self._made_id,
            client=self._client.forwarded(self._head),
            pool=self._pool,
            forwards_key=plane.settings.forward_client_key,
        )
        engine.take = self._on_head
        if len(body) <= JOIN_BYTES:
            engine.transport.write(start + body)
        else:
            engine.transport.writelines((start, body))

    def unreachable(self) -> None:
        """No connection could be opened."""
        self._failed("UF", 503)

    def engine_lost(self, connection: EngineConnection, exc: Exception | None) -> None:
        """The engine closed the connection, or it broke."""
        if connection is not self._engine:
            return
        self._engine = None
        answer = self._answer
        if answer is not None and answer.length is None and not answer.is_chunked and exc is None:
            # Which is how such an answer ends.
            if not self._has_begun:
                self._client.transport.write(self._answer_start(answer, is_framed=False))
            self.completed(False)
        elif self._has_begun:
            self._cut("UC")
        elif connection.is_reused and answer is None and not self._pending and not self._is_resent:
            # Nothing came back on a connection that was used before: the engine had closed it already.
            self._is_resent = True
            self._pool.dial(self)
        else:
            self._failed("UC", 503)

    def _failed(self, flag: str, status: int) -> None:
        """This try came to nothing and the client has seen nothing of it."""
        self._flags = flag
        if self._may_retry():
            self._retry()
        else:
            self._give_up(status)

    def _may_retry(self) -> bool:
        if self._tries > self._plane.picker.retries_of(self._placed.forward):
            return False
        return self._is_retry or self._plane.may_retry()

    def _retry(self) -> None:
        self._close_engine()
        self._answer, self._pending, self._is_resent = None, b"", False
        if not self._is_retry:
            self._is_retry = True
            self._plane.retrying += 1
        if self._tries == 1:
            self._try()
        else:
            self.dialling = self._plane.loop.call_later(RETRY_PAUSE_S * 2 ** (self._tries - 2), self._try)

    # ------------------------------------------------------------------ the answer's head

    def _on_head(self, data: bytes) -> None:
        if self._pending:
            data = self._pending + data
        try:
            answer, rest = self._plane.answers.split(data)
        except BadAnswer:
            self.broken("UPE")
            return
        if answer is None:
            self._pending = rest
            return
        self._pending = b""
        if answer.status == SWITCHED:
            self._switched(answer, rest)
        else:
            self._on_answer(answer, rest)

    def _on_answer(self, answer: AnswerHead, rest: bytes) -> None:
        status = answer.status
        if status in self._plane.settings.status_codes and self._may_retry():
            if answer.is_lasting and answer.length == len(rest):
                self._let_go(is_reusable=True)
            self._retry()
            return
        self._answer = answer
        if status in _BODYLESS or self._head.target.method == "HEAD" or answer.length == 0:
            self._client.transport.write(self._answer_start(answer))
            self.completed(not rest)
        elif rest:
            self._begin(answer, rest)
        else:
            # Until there is something of its body an answer is a promise: engines send the head before they prefill.
            assert self._engine is not None
            self._held_at = self._plane.wheel.now
            self._engine.take = self._on_first

    def _on_first(self, data: bytes) -> None:
        assert self._answer is not None
        self._begin(self._answer, data)

    def _begin(self, answer: AnswerHead, rest: bytes) -> None:
        """Send the head with the first bytes of the body; what follows is the splice's."""
        client, engine, minor = self._client, self._engine, self._head.target.minor
        assert engine is not None
        now = monotonic()
        self._ttft_s = now - self._started_at
        self._engine_ttft_s = now - self._received_at
        splice = self._splice
        head = b""
        if splice is None:
            if answer.length == len(rest):
                # All of it came in one read.
                self._whole = rest
                client.transport.write(self._answer_start(answer) + rest)
                self.completed(True)
                return
            first, tail = keeps_first(answer, self._placed.request.api), keeps_tail(answer)
            self._splice = splice = Splice(self, client.transport, keeps_first=first, keeps_tail=tail)
            head = self._answer_start(answer, is_framed=answer.length is not None or (answer.is_chunked and minor == 1))
        engine.take = take = splice.mode(answer, minor)
        if client.is_paused:
            engine.transport.pause_reading()
        take(rest, head)
        if self._engine is not None:
            self._has_begun = True
            self._drop_body()

    def _send_held(self, answer: AnswerHead) -> None:
        """Send the head without any of the body: it was held for long enough."""
        self._begin(answer, b"")
        self._ttft_s = self._engine_ttft_s = None
        if self._engine is not None:
            self._engine.take = self._on_first

    def _answer_start(self, answer: AnswerHead, is_framed: bool = True) -> bytes:
        plane = self._plane
        return answer_start(
            answer,
            self._head.target.minor,
            ends=self._client.ends_after(not is_framed),
            client_id=self._made_id or self._head.headers["x-request-id"].encode("latin-1"),
            request_id=self.request_id,
            shown=self._pool.shown if plane.settings.shows_endpoint else b"",
            added=self._placed.forward.response_headers,
        )

    def _switched(self, answer: AnswerHead, rest: bytes) -> None:
        engine, client = self._engine, self._client
        if not self._head.upgrade or engine is None or answer.length is not None or answer.is_chunked:
            self.broken("UPE")
            return
        self._answer = answer
        self._engine = None
        self._drop_body()
        tunnel = Tunnel(self._plane, client, engine, self.request_id, self._started_at, self._tunnel_ended)
        engine.relay, engine.take = tunnel, tunnel.from_engine
        # From here on it is the tunnel that is paused when the client does not read.
        client.relay = tunnel
        client.transport.write(self._answer_start(answer))
        if rest:
            tunnel.from_engine(rest)
        client.switched(tunnel)

    # ------------------------------------------------------------------ who does not read

    def client_paused(self) -> None:
        """The client does not read: nor do we read what is for it."""
        if self._engine is not None:
            self._engine.transport.pause_reading()

    def client_resumed(self) -> None:
        """The client reads again."""
        if self._engine is not None and not self._engine.transport.is_closing():
            self._engine.transport.resume_reading()

    def engine_paused(self) -> None:
        """The engine does not read; all that is for it is on its way."""

    def engine_resumed(self) -> None:
        """The engine reads again."""

    def overload(self) -> None:
        """What unread answers hold is over the limit, and this one has just grown."""
        if self._has_begun:
            self._cut("OM", is_failure=False)

    # ------------------------------------------------------------------ clocks

    def on_due(self, now: float) -> float:
        """Look after the request; returns when to look again."""
        clocks = self._plane.settings.clocks
        if clocks.stream_s and now - self._started_at >= clocks.stream_s:
            self._end_early("DT", is_failure=False)
            return now
        if self._waiting is not None:
            # How long it may wait is the router's business.
            self._quiet_since = now
            return self._plane.next_look(now, self._started_at)
        seen = self._progress()
        if seen != self._seen:
            self._seen, self._quiet_since = seen, now
        elif now - self._quiet_since >= clocks.stream_idle_s:
            self._end_early("SI", is_failure=not self._has_begun)
            return now
        answer = self._answer
        if answer is not None and not self._has_begun and now - self._held_at >= clocks.hold_s:
            self._send_held(answer)
        return self._plane.next_look(now, self._started_at)

    def _progress(self) -> int:
        splice, engine = self._splice, self._engine
        moved = self._tries + len(self._pending) + (splice.body_bytes if splice is not None else 0)
        return moved - engine.transport.get_write_buffer_size() if engine is not None else moved

    # ------------------------------------------------------------------ endings: all meet in _record

    def _end_early(self, flag: str, is_failure: bool, status: int = 504) -> None:
        """End it wherever it stands, with `status` if nothing was sent yet."""
        self._flags = flag
        self._stop_dialling()
        if self._waiting is not None:
            self._stop_waiting()
            self._client.answer_error(504, replies.no_answer(self._plane.settings))
        elif self._has_begun:
            self._cut(flag, is_failure=is_failure)
        else:
            self._give_up(status, is_failure=is_failure)

    def fault(self, error: Exception) -> None:
        """A step on the way to the engine raised what nobody foresaw, and nobody else would end the request."""
        log.exception("a request could not be sent", error)
        try:
            self._end_early("LR", is_failure=False, status=500)
        except Exception as again:
            log.exception("a request could not be answered", again)
            self._client.relay = None  # so that it is recorded once
            self._record(500)
            self._client.abort()

    def completed(self, is_reusable: bool) -> None:
        """The whole answer went to the client."""
        answer = self._answer
        assert answer is not None
        if self._client.is_paused and self._engine is not None:
            self._engine.transport.resume_reading()
        self._let_go(is_reusable and answer.is_lasting)
        self._drop_body()
        self._flags = ""
        self._client.answered()
        self._plane.turn.end(self)

    def close_books(self) -> None:
        """Tell the router of an answer that is complete."""
        assert self._answer is not None
        self._record(self._answer.status, is_failure=self._answer.status >= 500)

    def broken(self, flag: str) -> None:
        """The answer is not HTTP."""
        if self._has_begun:
            self._cut(flag)
        else:
            self._failed(flag, 502)

    def abort(self, command: Cut) -> None:
        """The router ends it."""
        if self._has_begun:
            self._cut("OA", is_failure=False, said=(command.refusal.message, str(command.refusal.reason)))
            return
        self._flags = "OA"
        self._stop_dialling()
        self._close_engine()
        is_placed = self._waiting is None  # else it was taken back from its engine meanwhile
        self._stop_waiting()
        answered = self._plane.picker.cut(command, self._head.headers)
        self._refuse(answered)
        if is_placed:
            self._record(answered.status)

    def evict(self, command: Evict) -> None:
        """Another request needs the place: stop this one at its engine and have it wait anew, if nothing was sent."""
        plane, feed = self._plane, self._plane.picker.driver.feed
        if self._waiting is not None or (self._has_begun and not command.may_cut):
            feed(Kept(command.request_id))
            return
        if self._has_begun:
            self.abort(Cut(command.request_id, command.refusal, command.api))
            return
        self._stop_dialling()
        self._close_engine()
        plane.active -= 1
        plane.retrying -= self._is_retry
        self._answer, self._pending, self._tries, self._flags = None, b"", 0, ""
        self._is_resent = self._is_retry = False
        headers = self._head.headers
        if self._is_changed:
            # The body is plain by now, whatever its client sent.
            headers = {name: value for name, value in headers.items() if name != "content-encoding"}
        self._wait(Waiting(plane.picker, Asked(self._placed.request, headers, self._body)))
        feed(Evicted(command.request_id))

    def _cut(self, flag: str, *, is_failure: bool = True, said: tuple[str, ...] = (replies.BROKEN,)) -> None:
        """End an answer in its middle, so that the client sees that it is not whole.  said: the last event's words."""
        self._flags = flag
        self._close_engine()
        answer, splice = self._answer, self._splice
        assert answer is not None
        assert splice is not None
        event = b""
        if answer.is_events and not answer.is_encoded and splice.may_put_in:
            event = splice.framed(replies.last_event(self._placed.request.api, *said))
        self._client.break_off(event, is_reset=not splice.is_framed)
        self._record(answer.status, is_cut=True, is_failure=is_failure)

    def _give_up(self, status: int, *, is_failure: bool = True) -> None:
        """Answer for the engines, none of which did."""
        self._close_engine()
        messages = {500: replies.FAULT, 502: replies.BAD_ANSWER, 503: replies.UNREACHABLE}
        if self._is_retry:
            self._flags += ",URX"
        self._drop_body()
        self._client.answer_error(status, messages.get(status) or replies.no_answer(self._plane.settings))
        self._record(status, is_failure=is_failure)

    def _tunnel_ended(self, flags: str, size_bytes: int) -> None:
        self._flags = flags
        self._record(SWITCHED, tunnel_bytes=size_bytes)

    def leave(self) -> None:
        """The client has gone: the engine need not go on."""
        if self._waiting is not None:
            self._stop_waiting()
            return
        self._stop_dialling()
        self._drop_body()
        self._close_engine()
        self._flags = "DC"
        answer = self._answer
        self._record(answer.status if answer is not None and self._has_begun else 0, is_gone=True)

    def _record(
        self,
        status: int,
        *,
        is_cut: bool = False,
        is_gone: bool = False,
        is_failure: bool = False,
        tunnel_bytes: int = 0,
    ) -> None:
        """Tell the router what came of the request and that it is over."""
        plane, request_id, answer, splice = self._plane, self.request_id, self._answer, self._splice
        # It knows the relay: without this only a walk for cycles would free the two.
        self._splice = None
        plane.active -= 1
        plane.retrying -= self._is_retry
        feed = plane.picker.driver.feed
        try:
            usage, size, api = NO_USAGE, tunnel_bytes, self._placed.request.api
            if splice is not None and answer is not None:
                usage, size = usage_of(answer, api, splice.first, splice.tail), splice.body_bytes
            elif self._whole and answer is not None:
                usage, size = usage_in(answer, api, self._whole), len(self._whole)
            outcome = Outcome(
                status=status,
                served_address=self._pool.address,
                attempts=self._tries,
                ttft_s=self._ttft_s,
                engine_ttft_s=self._engine_ttft_s,
                duration_s=monotonic() - self._started_at,
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=usage.cached_tokens,
                completion_tokens=usage.completion_tokens,
                response_bytes=size,
                is_cut=is_cut,
                is_client_gone=is_gone,
                is_upstream_failure=is_failure,
                flags=self._flags,
            )
            feed(Ended(request_id, outcome))
        except Exception as error:
            log.exception("a request could not be recorded", error)
            feed(Ended(request_id))

    # ------------------------------------------------------------------ letting go

    def _let_go(self, is_reusable: bool) -> None:
        """Part with the engine after an answer that has ended."""
        engine, self._engine = self._engine, None
        if engine is None:
            return
        if is_reusable and not engine.transport.get_write_buffer_size():
            self._pool.give_back(engine)
        else:
            engine.close()

    def _close_engine(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def _stop_dialling(self) -> None:
        dialling, self.dialling = self.dialling, None
        if dialling is not None:
            dialling.cancel()

    def _stop_waiting(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.cancel()
        self._drop_body()

    def _drop_body(self) -> None:
        """Let go of the request's body, and of what it was charged."""
        self._body = b""
        charged, self._charged = self._charged, 0
        if charged:
            self._plane.picker.uncharge(charged)
