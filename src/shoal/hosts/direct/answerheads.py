"""The head of an engine's answer: strictly read, once per distinct head.

Owns where an answer's body ends (RFC 9112, section 6.3) and which of its fields reach the client.
"""

import re

from shoal.hosts.direct.heads import FIELD, MAX_FIELDS, MAX_HEAD_BYTES

SWITCHED = 101
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: ([\t\x20-\x7e\x80-\xff]*))?")
# Within a second an engine's answers mostly have the same head.
_MEMO_ENTRIES = 512
_MEMO_HEAD_BYTES = 1024
_DROPPED = frozenset(
    ("keep-alive", "proxy-connection", "te", "trailer", "x-request-id", "x-shoal-request-id", "x-shoal-endpoint")
)


class BadAnswer(Exception):
    """A head that is not valid HTTP."""


class AnswerHead:
    """One answer's head; shared between answers with the same one, so nobody changes it.

    sent: status line and fields for the client, each with its line end; unframed: the same without the line that says
    where the body ends.  length: of the body, None when not declared.
    """

    __slots__ = (
        "has_date",
        "has_server",
        "is_chunked",
        "is_encoded",
        "is_events",
        "is_json",
        "is_lasting",
        "length",
        "sent",
        "status",
        "unframed",
        "upgrade",
    )

    def __init__(self, status: int, minor: int) -> None:
        self.status = status
        self.sent = self.unframed = b""
        self.length: int | None = None
        self.is_lasting = minor == 1
        self.is_chunked = self.is_encoded = self.is_events = self.is_json = False
        self.has_date = self.has_server = False
        self.upgrade = ""


class AnswerReader:
    """Reads heads and remembers the short ones; one per worker."""

    __slots__ = ("_memo",)

    def __init__(self) -> None:
        self._memo: dict[bytes, AnswerHead] = {}

    def split(self, data: bytes) -> tuple[AnswerHead | None, bytes]:
        """Return the final head that `data` begins with and what follows it; None, and what to wait with, without one.

        Interim heads are passed over, but that of a switch is final.  Raises BadAnswer.
        """
        while True:
            end = data.find(b"\r\n\r\n")
            if end < 0 or end > MAX_HEAD_BYTES:
                if len(data) > MAX_HEAD_BYTES:
                    raise BadAnswer("its size")
                return None, data
            answer = self.read(data[:end])
            data = data[end + 4 :]
            if answer.status >= 200 or answer.status == SWITCHED:
                return answer, data

    def read(self, head: bytes) -> AnswerHead:
        """Read everything before the empty line, which is not part of `head`.  Raises BadAnswer."""
        known = self._memo.get(head)
        if known is not None:
            return known
        answer = _read(head)
        if len(head) <= _MEMO_HEAD_BYTES:
            if len(self._memo) >= _MEMO_ENTRIES:
                self._memo.clear()
            self._memo[head] = answer
        return answer


def _read(head: bytes) -> AnswerHead:
    lines = head.split(b"\r\n")
    found = _STATUS_LINE.fullmatch(lines[0])
    if found is None or len(lines) > MAX_FIELDS + 1:
        raise BadAnswer("the status line or the number of headers")
    minor = int(found[1])
    answer = AnswerHead(int(found[2]), minor)
    sent = [b"HTTP/1.1 " + found[2] + b" " + (found[3] or b"")]
    named: set[str] = set()
    for line in lines[1:]:
        field = FIELD.fullmatch(line)
        if field is None:
            raise BadAnswer("a header is malformed")
        name = field[1].decode().lower()
        if _take(answer, name, field[2].strip(b" \t").decode("latin-1"), named):
            sent.append(line)
    if answer.is_chunked and (answer.length is not None or minor == 0):
        raise BadAnswer("both a length and a transfer coding")
    if answer.upgrade and answer.status != SWITCHED:
        answer.upgrade = ""
    if "close" in named:
        answer.is_lasting = False
    elif "keep-alive" in named:
        answer.is_lasting = True
    named -= {"", "close", "keep-alive", "upgrade"}
    if named:
        sent[1:] = [line for line in sent[1:] if line.partition(b":")[0].decode().lower() not in named]
    if not answer.has_server:
        sent.append(b"server: shoal")
    answer.sent = answer.unframed = b"\r\n".join(sent) + b"\r\n"
    if answer.is_chunked:
        answer.sent += b"transfer-encoding: chunked\r\n"
    elif answer.length is not None:
        answer.sent += b"content-length: %d\r\n" % answer.length
    return answer


def _take(answer: AnswerHead, name: str, value: str, named: set[str]) -> bool:
    """Note what a field says; return whether it reaches the client as it is."""
    if name == "content-length":
        if answer.length is not None or not (value.isascii() and value.isdigit() and len(value) < 19):
            raise BadAnswer("its length")
        answer.length = int(value)
        return False
    if name == "transfer-encoding":
        if answer.is_chunked or value.lower() != "chunked":
            raise BadAnswer("a transfer coding other than `chunked`")
        answer.is_chunked = True
        return False
    if name == "connection":
        named.update(part.strip().lower() for part in value.split(","))
        return False
    if name == "upgrade":
        answer.upgrade = value.lower()
        return False
    if name == "content-type":
        media = value.partition(";")[0].strip().lower()
        answer.is_events = media == "text/event-stream"
        answer.is_json = media == "application/json"
    elif name == "content-encoding":
        answer.is_encoded = value.lower() != "identity"
    elif name == "date":
        answer.has_date = True
    elif name == "server":
        answer.has_server = True
    return name not in _DROPPED
