"""The head of a client's request: strictly read, and ready to be sent on.

Owns the grammar of RFC 9112 as far as it decides where a message ends, and which fields go no further than here.  What
is doubtful is refused, never repaired: two parsers that repair differently are how requests are smuggled.
"""

import re

from shoal.hosts.envoy.denied import DENIED
from shoal.hosts.envoy.settings import CONTROL_HEADERS
from shoal.wire.headers import together

MAX_HEAD_BYTES = 96 * 1024
MAX_FIELDS = 100
# Lines that clients repeat are read once: most of a head is the same in each request of a client.
_MEMO_ENTRIES = 4096
_MEMO_LINE_BYTES = 512
_MEMO_HEADS = 512
_MEMO_HEAD_BYTES = 4096

_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]"
_REQUEST_LINE = re.compile(rb"(" + _TOKEN + rb"{1,32}) ([\x21-\x7e]+) HTTP/([0-9])\.([0-9])")
_ABSOLUTE = re.compile(r"https?://([^/?#]+)(.*)", re.IGNORECASE)
_HOST = re.compile(r"[A-Za-z0-9.\-_~%:\[\]!$&'()*+;=]*")
FIELD = re.compile(rb"(" + _TOKEN + rb"+):([\t\x20-\x7e\x80-\xff]*)")
BARE_NEWLINE = re.compile(rb"(?<!\r)\n|\x00")
_DENIED = re.compile(DENIED)

# What becomes of a field.
PASS, DROP, KEY, HOST, LENGTH, KEEP_ALIVE, CODING, CONNECTION, UPGRADE, EXPECT, FORWARDED = range(11)
_KINDS = {
    "authorization": KEY,
    "x-api-key": KEY,
    "host": HOST,
    "content-length": LENGTH,
    "transfer-encoding": CODING,
    "connection": CONNECTION,
    "upgrade": UPGRADE,
    "expect": EXPECT,
    "x-forwarded-for": FORWARDED,
    # Hop by hop, or set anew here.
    **dict.fromkeys(("keep-alive", "proxy-connection", "te", "trailer", "http2-settings", "x-forwarded-proto"), DROP),
    **dict.fromkeys(CONTROL_HEADERS, DROP),
}
# What is new in each request would only push the rest out.
_NEW_EACH_TIME = frozenset(("x-request-id", "traceparent", "tracestate"))
_UNKEPT = _NEW_EACH_TIME | {"authorization", "x-api-key", "cookie", "proxy-authorization"}
# A client may not have these removed by naming them in `connection`: they say where a message ends and whose it is.
_UNNAMEABLE = frozenset(("host", "content-length", "content-type", "content-encoding", "transfer-encoding"))


class BadHead(Exception):
    """A head that cannot be taken.  status: 400, 404, 417, 431 or 505."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class Target:
    """A request line.  line: as it is sent on.  host: of an absolute target, else ""."""

    __slots__ = ("host", "is_denied", "line", "method", "minor", "path")

    def __init__(self, method: str, path: str, minor: int, line: bytes, host: str) -> None:
        self.method = method
        self.path = path
        self.minor = minor
        self.line = line
        self.host = host
        self.is_denied = _DENIED.fullmatch(path.partition("?")[0]) is not None


class RequestHead:
    """A request's head without the length of its body; shared between requests with the same, so nobody changes it.

    headers: lower-case names, without hop-by-hop and control fields; repeated ones joined.  lines: what goes to the
    engine, request line first; sent: the same as bytes.  keys: lines with the client's own keys.  forwarded_for: what
    the client's own field says.
    """

    __slots__ = (
        "expects_continue",
        "forwarded_for",
        "headers",
        "is_chunked",
        "is_lasting",
        "keys",
        "lines",
        "sent",
        "target",
        "upgrade",
    )

    def __init__(self, target: Target) -> None:
        self.target = target
        self.headers: dict[str, str] = {}
        self.lines = [target.line]
        self.sent = b""
        self.keys: list[bytes] = []
        self.is_chunked = False
        self.is_lasting = target.minor == 1
        self.expects_continue = False
        self.upgrade = ""
        self.forwarded_for = ""


class HeadReader:
    """Reads heads, and remembers whole ones and lines; one per worker."""

    __slots__ = ("_fields", "_heads", "_prefixes", "_targets")

    def __init__(self, control_prefixes: tuple[str, ...]) -> None:
        self._prefixes = control_prefixes
        self._fields: dict[bytes, tuple[str, str, int]] = {}
        self._targets: dict[bytes, Target] = {}
        self._heads: dict[bytes, RequestHead] = {}

    def read(self, head: bytes) -> tuple[RequestHead, int | None]:
        """Read everything before the empty line, which is not part of `head`; returns the body's length too.

        The length is None when it is not declared.  Raises BadHead.
        """
        # From request to request of one client mostly the length alone is new.
        at = head.find(b"\r\ncontent-length: ")
        if at < 0:
            at = head.find(b"\r\nContent-Length: ")
        if at < 0:
            known = self._heads.get(head)
            if known is not None:
                return known, None
            rest = head
        else:
            stop = head.find(b"\r\n", at + 18)
            rest = head[:at] + head[stop:] if stop > 0 else head[:at]
            known = self._heads.get(rest)
            if known is not None and not known.is_chunked:
                digits = head[at + 18 : stop] if stop > 0 else head[at + 18 :]
                if digits.isdigit() and len(digits) < 16:
                    return known, int(digits)
        request, length, is_kept = self._read(head)
        if is_kept and (length is None) == (at < 0) and len(rest) <= _MEMO_HEAD_BYTES:
            if len(self._heads) >= _MEMO_HEADS:
                self._heads.clear()
            self._heads[rest] = request
        return request, length

    def _read(self, head: bytes) -> tuple[RequestHead, int | None, bool]:
        """Read a head line by line; returns whether another one like it is likely, too."""
        raw = head.split(b"\r\n")
        if len(raw) > MAX_FIELDS + 1:
            raise BadHead(f"The request has more than {MAX_FIELDS} headers.", 431)
        lines = iter(raw)
        first = next(lines)
        target = self._targets.get(first) or self._target(first)
        request = RequestHead(target)
        headers, passed, fields = request.headers, request.lines, self._fields
        length: int | None = None
        hosts = 0
        connection = ""
        for line in lines:
            name, value, kind = fields.get(line) or self._field(line)
            if kind == PASS:
                passed.append(line)
            elif kind == KEY:
                if name not in headers:  # an engine is given one key of each kind, the first
                    request.keys.append(line)
            elif kind == HOST:
                hosts += 1
                passed.append(line)
            elif kind == LENGTH:
                if length is not None:
                    raise BadHead("The request declares its length twice.")
                length = int(value)
                continue
            elif kind == KEEP_ALIVE:
                request.is_lasting = True
                continue
            elif kind == DROP:
                continue
            elif kind == CONNECTION:
                connection += "," + value.lower()
                continue
            else:
                self._rare(request, kind, value)
                if kind != FORWARDED:
                    continue
            headers[name] = value if name not in headers else together(name, headers[name], value)
        if connection:
            _apply_connection(request, connection)
        elif request.upgrade:
            request.upgrade = ""
        if hosts != 1 or target.host:
            _settle_host(request, hosts)
        if request.is_chunked and (length is not None or target.minor == 0):
            raise BadHead("A transfer coding excludes a content-length, and HTTP/1.0 knows none.")
        is_kept = not request.upgrade and headers.keys().isdisjoint(_NEW_EACH_TIME)
        if request.upgrade and (request.upgrade != "websocket" or target.method != "GET" or length):
            request.upgrade = ""
        request.sent = b"\r\n".join(request.lines)
        return request, length, is_kept

    def _rare(self, request: RequestHead, kind: int, value: str) -> None:
        if kind == CODING:
            if value.lower() != "chunked" or request.is_chunked:
                raise BadHead("The only transfer coding that is taken is `chunked`, once.")
            request.is_chunked = True
        elif kind == UPGRADE:
            request.upgrade = value.lower()
        elif kind == EXPECT:
            if request.target.minor == 1:
                if value.lower() != "100-continue":
                    raise BadHead("The only expectation that can be met is `100-continue`.", 417)
                request.expects_continue = True
        else:
            request.forwarded_for = f"{request.forwarded_for}, {value}" if request.forwarded_for else value

    def _target(self, line: bytes) -> Target:
        found = _REQUEST_LINE.fullmatch(line)
        if found is None:
            raise BadHead("The request line is not `METHOD TARGET HTTP/1.1`.")
        if found[3] != b"1" or found[4] not in (b"0", b"1"):
            raise BadHead("Only HTTP/1.1 and HTTP/1.0 are spoken here.", 505)
        method, path, host = found[1].decode(), found[2].decode(), ""
        sent = line
        absolute = None if path[0] == "/" else _ABSOLUTE.fullmatch(path)
        if absolute is not None:
            host, path = absolute[1], absolute[2]
            path = path if path.startswith("/") else "/" + path
        if path[0] != "/":
            raise BadHead("There is nothing at this path.", 404)
        if "#" in path:
            raise BadHead("The path holds a fragment.")
        if found[4] == b"0" or absolute is not None:
            sent = f"{method} {path} HTTP/1.1".encode()
        target = Target(method, path, int(found[4]), sent, host)
        if len(line) <= _MEMO_LINE_BYTES:
            if len(self._targets) >= _MEMO_ENTRIES:
                self._targets.clear()
            self._targets[line] = target
        return target

    def _field(self, line: bytes) -> tuple[str, str, int]:
        found = FIELD.fullmatch(line)
        if found is None:
            raise BadHead("A header is malformed: expected `Name: value`, on one line, without control characters.")
        name = found[1].decode().lower()
        value = found[2].strip(b" \t").decode("latin-1")
        kind = _KINDS.get(name, PASS)
        if kind == PASS and name.startswith(self._prefixes):
            kind = DROP
        if kind == CONNECTION and value.lower() == "keep-alive":
            kind = KEEP_ALIVE  # by far the most frequent, and nothing is to be done
        if kind == LENGTH and not (value.isascii() and value.isdigit() and len(value) < 16):
            raise BadHead("The request's content-length is not one number.")
        if kind == HOST and _HOST.fullmatch(value) is None:
            raise BadHead("The request's host is malformed.")
        field = (name, value, kind)
        if len(line) <= _MEMO_LINE_BYTES and name not in _UNKEPT:
            if len(self._fields) >= _MEMO_ENTRIES:
                self._fields.clear()
            self._fields[line] = field
        return field


def _apply_connection(request: RequestHead, listed: str) -> None:
    """Do what `connection` asks for, and end the fields that it names here."""
    names = {name.strip() for name in listed.split(",")}
    if "close" in names:
        request.is_lasting = False
    elif "keep-alive" in names:
        request.is_lasting = True
    if "upgrade" not in names:
        request.upgrade = ""
    names -= {"", "close", "keep-alive", "upgrade"}
    names -= _UNNAMEABLE
    if not names:
        return
    for name in names:
        request.headers.pop(name, None)
    request.lines[1:] = [line for line in request.lines[1:] if _name(line) not in names]
    request.keys = [line for line in request.keys if _name(line) not in names]
    if "x-forwarded-for" in names:
        request.forwarded_for = ""


def _settle_host(request: RequestHead, hosts: int) -> None:
    target = request.target
    if hosts > 1 or (hosts == 0 and target.minor == 1):
        raise BadHead("The request must have exactly one `Host` header.")
    if not target.host:
        return
    # An absolute target names the host; the field is then ignored (RFC 9112, section 3.2.2).
    if _HOST.fullmatch(target.host) is None:
        raise BadHead("The request's host is malformed.")
    request.headers["host"] = target.host
    request.lines[1:] = [line for line in request.lines[1:] if _name(line) != "host"]
    request.lines.append(b"host: " + target.host.encode())


def without(lines: list[bytes], name: str) -> list[bytes]:
    """Return `lines` (a request or status line first) without the fields of that name."""
    return [lines[0], *(line for line in lines[1:] if _name(line) != name)]


def _name(line: bytes) -> str:
    return line.partition(b":")[0].decode().lower()
