"""One request between its client and an engine: placed, sent, tried again, spliced, recorded.

Owns the order of things after a request is complete.  Until the first byte of the answer's body nothing has gone to the
client, so the request can go to another engine; from then on bytes pass as they come.  Where a body ends is `splice`'s,
connections are `pools`' and `clients`'.
"""

import asyncio
from time import monotonic
from typing import TYPE_CHECKING

from shoal.hosts.direct import replies
from shoal.hosts.direct.answerheads import AnswerHead, BadAnswer
from shoal.hosts.direct.heads import MAX_HEAD_BYTES, RequestHead, without
from shoal.hosts.direct.pools import EngineConnection
from shoal.hosts.direct.splice import Splice
from shoal.hosts.direct.tails import NO_USAGE, keeps_first, usage_of
from shoal.hosts.logs import Log
from shoal.hosts.picker import Answered, Placed
from shoal.pool import Outcome
from shoal.routing import Ended, Recorded

if TYPE_CHECKING:
    from shoal.hosts.direct.clients import ClientConnection
    from shoal.hosts.direct.plane import Plane

log = Log("direct")

RETRY_PAUSE_S = 0.005
"""Before the second retry, doubled for each further one; the first goes out at once."""

_JOIN_BYTES = 64 * 1024
_BODY_METHODS = frozenset(("POST", "PUT", "PATCH"))
_SWITCHED = 101
_BODYLESS = frozenset((204, 304))


class Relay:
    """One request.  `start` it once; `leave` when its client has gone.

    dialling: the connection that is being opened, or the pause before a retry; whoever sets it clears it.
    """

    __slots__ = (
        "_answer",
        "_base",
        "_body",
        "_charged",
        "_client",
        "_client_id",
        "_engine",
        "_engine_ttft_s",
        "_flags",
        "_has_begun",
        "_head",
        "_held_at",
        "_is_resent",
        "_is_retry",
        "_pending",
        "_placed",
        "_plane",
        "_pool",
        "_quiet_since",
        "_received_at",
        "_request_id",
        "_seen",
        "_splice",
        "_started_at",
        "_tries",
        "_ttft_s",
        "_upstream",
        "dialling",
    )

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
        self._ttft_s: float | None = None
        self._has_begun = self._is_resent = self._is_retry = False
        self._pending = b""
        self._flags = ""
        self._tries = 0
        self._held_at = 0.0
        self._seen = -1
        self.dialling: asyncio.Task[None] | asyncio.TimerHandle | None = None
        # _placed, _base, _pool, _request_id, _upstream: from `start` on.

    # ------------------------------------------------------------------ on the way to an engine

    def start(self, tenant: str) -> None:
        """Ask the router and send the request, or answer what it is refused with."""
        picker, head, target = self._plane.picker, self._head, self._head.target
        self._request_id = request_id = picker.mint()
        try:
            placed = picker.ask(request_id, target.method, target.path, head.headers, self._body, tenant)
        except Exception:
            picker.driver.fold.unplaced.add()
            log.exception("a request could not be placed")
            self._drop_body()
            self._client.answer_error(500, replies.FAULT)
            return
        if isinstance(placed, Answered):
            self._drop_body()
            self._client.answer(placed.status, placed.headers, placed.body)
            return
        self._plane.active += 1
        self._placed = placed
        self._base = self._head_to_send(placed)
        self._body = placed.body
        self._try()

    def _head_to_send(self, placed: Placed) -> bytes:
        """The request's head as all engines get it, without its end."""
        head, body = self._head, placed.body
        sent, own = head.sent, b""
        if body is not self._body and "content-encoding" in head.headers:
            sent = b"\r\n".join(without(head.lines, "content-encoding"))
        client_id = head.headers.get("x-request-id")
        if client_id is None:
            self._client_id = made = self._plane.fresh_id()
            own = b"\r\nx-request-id: " + made
        else:
            self._client_id = client_id.encode("latin-1")
        if head.upgrade:
            own += b"\r\nconnection: upgrade\r\nupgrade: websocket"
        if body or head.target.method in _BODY_METHODS:
            return b"%b%b%b\r\ncontent-length: %d" % (sent, own, self._client.forwarded(head), len(body))
        return b"%b%b%b" % (sent, own, self._client.forwarded(head))

    def _try(self) -> None:
        self.dialling = None
        forward = self._placed.forward
        self._pool = pool = self._plane.pools.of(forward.endpoints[self._tries])
        self._tries += 1
        # A request that may be sent only once is not risked on a connection that the engine may be about to close.
        connection = pool.take() if forward.retry_allowed else None
        if connection is None:
            pool.dial(self)
        else:
            self.connected(connection)

    def connected(self, connection: EngineConnection) -> None:
        """Send the request."""
        pool, body = self._pool, self._body
        self._engine = connection
        connection.relay = self
        connection.take = self._on_head
        end = pool.head_end
        if self._head.keys and self._plane.settings.forward_client_key and not pool.backend.authorization:
            end = b"\r\n".join((pool.own_lines, *self._head.keys)) + b"\r\n\r\n"
        if len(body) <= _JOIN_BYTES:
            connection.transport.write(self._base + end + body)
        else:
            connection.transport.writelines((self._base + end, body))

    def unreachable(self, error: Exception) -> None:
        """No connection could be opened."""
        self._failed("UF", 503)

    def engine_lost(self, connection: EngineConnection, exc: Exception | None) -> None:
        """The engine closed the connection, or it broke."""
        if connection is not self._engine:
            return
        self._engine = None
        answer = self._answer
        is_end = exc is None and answer is not None and answer.length is None and not answer.is_chunked
        if self.is_tunnel:
            self._end_tunnel()
        elif is_end and answer is not None:
            self._until_close(answer)
        elif self._has_begun:
            self._cut("UC")
        elif self._is_stale(connection):
            # Nothing came back on a connection that was used before: the engine had closed it already.
            self._is_resent = True
            self._pool.dial(self)
        else:
            self._failed("UC", 503)

    def _is_stale(self, connection: EngineConnection) -> bool:
        return connection.is_reused and not (self._is_resent or self._pending) and self._answer is None

    def _failed(self, flag: str, status: int) -> None:
        """This try came to nothing and the client has seen nothing of it."""
        self._flags = flag
        self._close_engine()
        if self._may_retry():
            self._retry()
        else:
            self._give_up(status)

    def _may_retry(self) -> bool:
        plane = self._plane
        if self._tries > plane.picker.retries_of(self._placed.forward):
            return False
        settings = plane.settings
        return self._is_retry or plane.retrying < max(settings.min_retries, settings.budget_ratio * plane.active)

    def _retry(self) -> None:
        self._close_engine()
        self._answer = None
        self._pending = b""
        self._is_resent = False
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
        while True:
            end = data.find(b"\r\n\r\n")
            if end < 0 or end > MAX_HEAD_BYTES:
                self._pending = data
                if len(data) > MAX_HEAD_BYTES:
                    self.broken("UPE")
                return
            try:
                answer = self._plane.answers.read(data[:end])
            except BadAnswer:
                self.broken("UPE")
                return
            data = data[end + 4 :]
            if answer.status >= 200:
                break
            if answer.status == _SWITCHED:
                self._switched(answer, data)
                return
            self._pending = b""
            if not data:
                return
        self._pending = b""
        self._on_answer(answer, data)

    def _on_answer(self, answer: AnswerHead, rest: bytes) -> None:
        status = answer.status
        if status in self._plane.settings.status_codes and self._may_retry():
            self._flags = ""
            self._retry()
            return
        self._answer = answer
        if status in _BODYLESS or self._head.target.method == "HEAD" or answer.length == 0:
            self._client.transport.write(self._answer_head(answer, has_body=False))
            self.completed(not rest)
        elif rest:
            self._begin(answer, rest)
        else:
            # Until there is something of its body an answer is a promise: engines send the head before they prefill.
            self._held_at = self._plane.wheel.now
            assert self._engine is not None
            self._engine.take = self._on_first

    def _on_first(self, data: bytes) -> None:
        assert self._answer is not None
        self._begin(self._answer, data)

    def _begin(self, answer: AnswerHead, rest: bytes) -> None:
        """Send the head with the first bytes of the body; the rest is the splice's."""
        client, engine = self._client, self._engine
        assert engine is not None
        self._splice = splice = Splice(
            self,
            client.transport,
            keeps_first=keeps_first(answer, self._placed.request.api),
            keeps_tail=answer.is_events or answer.is_json,
        )
        take = splice.mode(answer, self._head.target.minor)
        engine.take = take
        if rest:
            self._note_first_byte()
        else:
            engine.take = self._on_late_first
        take(rest, self._answer_head(answer))
        if self._engine is not None:
            self._has_begun = True
            self._drop_body()

    def _on_late_first(self, data: bytes) -> None:
        """The first bytes of a body whose head had to go ahead."""
        engine, splice, answer = self._engine, self._splice, self._answer
        assert engine is not None
        assert splice is not None
        assert answer is not None
        self._note_first_byte()
        take = splice.mode(answer, self._head.target.minor)
        engine.take = take
        take(data)

    def _note_first_byte(self) -> None:
        now = monotonic()
        self._ttft_s = now - self._started_at
        self._engine_ttft_s = now - self._received_at

    def _answer_head(self, answer: AnswerHead, has_body: bool = True) -> bytes:
        minor = self._head.target.minor
        is_framed = answer.length is not None or (answer.is_chunked and minor == 1) or not has_body
        own = b""
        if self._client.ends_after(not is_framed):
            own = b"connection: close\r\n"
        elif not minor:
            own = b"connection: keep-alive\r\n"
        if not answer.has_date:
            own += replies.date_line()
        for name, value in self._placed.forward.response_headers:
            own += f"{name}: {value}\r\n".encode("latin-1", "replace")
        return b"%bx-request-id: %b\r\nx-shoal-request-id: %b\r\n%b%b\r\n" % (
            answer.sent if minor or not answer.is_chunked else answer.unframed,
            self._client_id,
            self._request_id.encode(),
            self._pool.shown if self._plane.settings.shows_endpoint else b"",
            own,
        )

    # ------------------------------------------------------------------ tunnels

    @property
    def is_tunnel(self) -> bool:
        """Whether the connection was upgraded, so that bytes go both ways unread."""
        return self._answer is not None and self._answer.status == _SWITCHED

    def _switched(self, answer: AnswerHead, rest: bytes) -> None:
        engine = self._engine
        if not self._head.upgrade or engine is None or answer.length is not None or answer.is_chunked:
            self.broken("UPE")
            return
        self._answer = answer
        self._has_begun = True
        self._drop_body()
        self._splice = splice = Splice(self, self._client.transport, keeps_first=False, keeps_tail=False)
        engine.take = take = splice.mode(answer, 1)
        upgrade = b"connection: upgrade\r\nupgrade: websocket\r\n"
        head = self._answer_head(answer, has_body=False).removesuffix(b"\r\n").replace(b"connection: close\r\n", b"")
        take(rest, head + upgrade + b"\r\n")
        self._client.switched()

    def from_client(self, data: bytes) -> None:
        """Pass bytes of a tunnel on."""
        if self._engine is not None:
            self._engine.transport.write(data)

    def engine_paused(self) -> None:
        """The engine does not read."""
        if self.is_tunnel:
            self._client.transport.pause_reading()

    def engine_resumed(self) -> None:
        """The engine reads again."""
        if self.is_tunnel and not self._client.transport.is_closing():
            self._client.transport.resume_reading()

    def _end_tunnel(self) -> None:
        self._client.break_off(b"")
        self._record(_SWITCHED)

    # ------------------------------------------------------------------ the client's pace

    def client_paused(self) -> None:
        """The client does not read: nor do we read what is for it."""
        if self._engine is not None:
            self._engine.transport.pause_reading()

    def client_resumed(self) -> None:
        """The client reads again."""
        if self._engine is not None and not self._engine.transport.is_closing():
            self._engine.transport.resume_reading()

    def overload(self) -> None:
        """What unread answers hold is over the limit, and this one has just grown."""
        self._cut("OM", is_failure=False)

    # ------------------------------------------------------------------ clocks

    def on_due(self, now: float) -> float:
        """Look after the request; returns when to look again."""
        clocks = self._plane.settings.clocks
        if clocks.stream_s and now - self._started_at >= clocks.stream_s:
            self._time_out("DT", is_failure=False)
            return now + clocks.linger_s
        seen = self._progress()
        if seen != self._seen:
            self._seen, self._quiet_since = seen, now
        elif now - self._quiet_since >= clocks.stream_idle_s:
            self._time_out("SI", is_failure=not self._has_begun)
            return now + clocks.linger_s
        answer = self._answer
        if answer is not None and not self._has_begun and now - self._held_at >= clocks.hold_s:
            self._begin(answer, b"")
        return self._plane.next_look(now, self._started_at)

    def _progress(self) -> int:
        splice, engine = self._splice, self._engine
        moved = self._tries + len(self._pending) + (splice.body_bytes if splice is not None else 0)
        return moved - engine.transport.get_write_buffer_size() if engine is not None else moved

    def _time_out(self, flag: str, is_failure: bool) -> None:
        if self.is_tunnel:
            self._close_engine()
            self._end_tunnel()
        elif self._has_begun:
            self._cut(flag, is_failure=is_failure)
        else:
            self._flags = flag
            self._stop_dialling()
            self._close_engine()
            self._give_up(504, is_failure=is_failure)

    # ------------------------------------------------------------------ endings: each meets in _record

    def completed(self, is_reusable: bool) -> None:
        """The whole answer went to the client."""
        engine, answer = self._engine, self._answer
        assert answer is not None
        self._engine = None
        if engine is not None:
            if self._client.is_paused:
                engine.transport.resume_reading()
            if is_reusable and answer.is_lasting and not engine.transport.get_write_buffer_size():
                self._pool.give_back(engine)
            else:
                engine.close()
        self._drop_body()
        self._client.answered()
        # The client's bytes leave before the books are kept.
        is_failure = answer.status >= 500
        self._plane.loop.call_soon(self._record, answer.status, False, False, is_failure)

    def _until_close(self, answer: AnswerHead) -> None:
        """The engine closed the connection, which is how this answer ends."""
        if not self._has_begun:
            self._client.transport.write(self._answer_head(answer))
        self.completed(False)

    def broken(self, flag: str) -> None:
        """The answer is not HTTP."""
        if self._has_begun:
            self._cut(flag)
        else:
            self._failed(flag, 502)

    def _cut(self, flag: str, *, is_failure: bool = True) -> None:
        """End an answer in its middle, so that the client sees that it is not whole."""
        self._flags = flag
        self._close_engine()
        answer, splice = self._answer, self._splice
        assert answer is not None
        assert splice is not None
        event = b""
        if answer.is_events and not answer.is_encoded and splice.may_put_in:
            event = splice.framed(replies.last_event(self._placed.request.api, replies.BROKEN))
        self._client.break_off(event, is_reset=answer.length is None and not splice.is_framed)
        self._record(answer.status, is_cut=True, is_failure=is_failure)

    def _give_up(self, status: int, *, is_failure: bool = True) -> None:
        """Answer for the engines, none of which did."""
        messages = {502: replies.BAD_ANSWER, 503: replies.UNREACHABLE}
        message = messages.get(status) or replies.no_answer(self._plane.settings)
        if self._is_retry:
            self._flags += ",URX"
        self._drop_body()
        self._client.answer_error(status, message)
        self._record(status, is_failure=is_failure)

    def leave(self) -> None:
        """The client has gone: the engine need not go on."""
        self._stop_dialling()
        self._drop_body()
        answer = self._answer
        if self.is_tunnel and self._engine is not None:
            engine, self._engine = self._engine, None
            engine.relay = engine.take = None
            engine.transport.close()
            self._record(_SWITCHED)
            return
        self._close_engine()
        self._flags = "DC"
        self._record(answer.status if answer is not None and self._has_begun else 0, is_gone=True)

    def _record(self, status: int, is_cut: bool = False, is_gone: bool = False, is_failure: bool = False) -> None:
        """Tell the router what came of the request and that it is over."""
        plane, splice, request_id = self._plane, self._splice, self._request_id
        plane.active -= 1
        if self._is_retry:
            plane.retrying -= 1
        usage, size = NO_USAGE, 0
        if splice is not None:
            size = splice.body_bytes
            if self._answer is not None:
                usage = usage_of(self._answer, self._placed.request.api, splice.first, splice.tail)
        feed = plane.picker.driver.feed
        try:
            feed(
                Recorded(
                    request_id,
                    Outcome(
                        status=status,
                        served_address=self._pool.address,
                        attempts=self._tries,
                        ttft_s=self._ttft_s,
                        engine_ttft_s=self._engine_ttft_s if self._ttft_s is not None else None,
                        duration_s=monotonic() - self._started_at,
                        prompt_tokens=usage.prompt_tokens,
                        cached_tokens=usage.cached_tokens,
                        completion_tokens=usage.completion_tokens,
                        response_bytes=size,
                        is_cut=is_cut,
                        is_client_gone=is_gone,
                        is_upstream_failure=is_failure,
                        flags=self._flags,
                    ),
                )
            )
        except Exception:
            log.exception("a request could not be recorded")
        finally:
            feed(Ended(request_id))

    def _close_engine(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def _stop_dialling(self) -> None:
        dialling, self.dialling = self.dialling, None
        if dialling is not None:
            dialling.cancel()

    def _drop_body(self) -> None:
        """Let go of the request's body, and of what it was charged."""
        self._body = b""
        charged, self._charged = self._charged, 0
        if charged:
            self._plane.picker.uncharge(charged)
