"""Heads on their way: a request's to an engine, and an answer's to the client.

Owns what is added to them, and in which form the rest goes on.  What does not pass at all was left out when they were
read.
"""

from shoal.hosts.direct.answerheads import AnswerHead
from shoal.hosts.direct.heads import RequestHead, without
from shoal.hosts.direct.pools import EnginePool
from shoal.hosts.direct.replies import date_line

_BODY_METHODS = frozenset(("POST", "PUT", "PATCH"))
_NO_CONTENT = 204


def request_start(
    head: RequestHead,
    size: int,
    *,
    is_changed: bool,
    made_id: bytes,
    client: bytes,
    pool: EnginePool,
    forwards_key: bool,
) -> bytes:
    """Return the head that an engine gets, with its end.

    size: of the body.  is_changed: the body is not the client's, and then it is plain.  made_id: of a request without
    an id of its own.  client: the lines that say whose request it is, each after its line end.  forwards_key: an engine
    without a key of its own gets the client's.
    """
    sent = head.sent
    if is_changed and "content-encoding" in head.headers:
        sent = b"\r\n".join(without(head.lines, "content-encoding"))
    own = b"\r\nx-request-id: " + made_id if made_id else b""
    if head.upgrade:
        own += b"\r\nconnection: upgrade\r\nupgrade: websocket"
    if size or head.target.method in _BODY_METHODS:
        own += b"\r\ncontent-length: %d" % size
    end = pool.head_end
    if forwards_key and head.keys and not pool.backend.authorization:
        end = b"\r\n".join((pool.own_lines, *head.keys)) + b"\r\n\r\n"
    return b"%b%b%b%b" % (sent, own, client, end)


def answer_start(
    answer: AnswerHead,
    minor: int,
    *,
    ends: bool,
    client_id: bytes,
    request_id: str,
    shown: bytes,
    added: tuple[tuple[str, str], ...],
) -> bytes:
    """Return the head that a client of HTTP/1.`minor` gets.

    ends: the connection ends with this answer.  shown: the line that names the engine.  added: the plugins' headers.
    """
    if answer.status == _NO_CONTENT or (answer.is_chunked and not minor):
        sent = answer.unframed
    else:
        sent = answer.sent
    own = b""
    if answer.upgrade:
        own = b"connection: upgrade\r\nupgrade: websocket\r\n"
    elif ends:
        own = b"connection: close\r\n"
    elif not minor:
        own = b"connection: keep-alive\r\n"
    if not answer.has_date:
        own += date_line()
    for name, value in added:
        own += f"{name}: {value}\r\n".encode("latin-1", "replace")
    return b"%bx-request-id: %b\r\nx-shoal-request-id: %b\r\n%b%b\r\n" % (
        sent,
        client_id,
        request_id.encode(),
        shown,
        own,
    )
