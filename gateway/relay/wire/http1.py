"""Strict reader of the heads of HTTP/1.x requests. No sockets, no clock.

llhttp (httptools) reads header fields and refuses bare LF, bare CR, obs-fold, space before a colon, control bytes,
bad tokens, and Content-Length that is repeated, signed, empty, not decimal or beside Transfer-Encoding. What it lets
through is refused here: spaces in the request line, versions and protocols other than HTTP/1.0 and 1.1, fragments and
authority-form targets, codings before `chunked`, chunked in HTTP/1.0, a missing, repeated or malformed Host, and every
size limit. The parser is only ever given one complete head and then exactly that request's body, so nothing it does
can depend on how the bytes were split, and no byte of a following request reaches it early.

Chunked bodies are decoded in `body.py`, not by llhttp, because httptools does not say where a message ended.

A client's requests differ in their bodies, and their heads in the digits of Content-Length alone. `KnownHeads` keeps
heads that were read, so that their like are not read again.
"""

from __future__ import annotations

import re

import httptools
import msgspec

from gateway.relay.wire.messages import CHUNKED, Request, ServerSettings, WireError

_HOST = re.compile(rb"(?:[A-Za-z0-9._~!$&'()*+,;=%-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{0,5})?")
_ABSOLUTE = re.compile(rb"[Hh][Tt][Tt][Pp][Ss]?://([^/?#]*)([^?#]*)(?:\?([^#]*))?")
_ONCE = frozenset(
    (
        *(b"host", b"content-length", b"transfer-encoding", b"expect", b"content-type", b"content-encoding"),
        *(b"authorization", b"x-api-key", b"origin", b"access-control-request-method"),
    )
)
_VERSION = re.compile(rb"HTTP/[0-9]\.[0-9]")


class _Fields:
    """Callbacks of the parser. Apart from their owner, so that parser and connection form no reference cycle."""

    __slots__ = ("items",)

    def __init__(self) -> None:
        self.items: list[tuple[bytes, bytes]] = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self.items.append((name.lower(), value.rstrip()))


_LENGTH = b"ength: "  # as in content-length and Content-Length
_NAME = b"\r\ncontent-l"  # what comes before it, in lower case
_KNOWN_AT_MOST = 256  # heads of one server
_KNOWN_SIZE = 1024  # bytes of one


class KnownHeads:
    """Heads that a server's connections have read, by all their bytes but the digits of Content-Length.

    Bounded: once it is full, it begins anew. A head with fewer or other digits is read without the parser; what is not
    exactly like a known head, digits apart, is read in full.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, tuple[int, Request]] = {}  # size, request

    def __len__(self) -> int:
        return len(self._known)

    def read(self, head: bytes, max_body: int) -> Request | None:
        """Return the request of a head whose like is known, else None."""
        at = head.find(_LENGTH) + len(_LENGTH)
        end = head.find(b"\r\n", at)
        found = self._known.get(head[:at] + head[end:])
        if found is None:
            return None
        size, like = found
        digits = head[at:end]
        if len(head) > size or not digits.isdigit():
            return None
        length = int(digits)
        if length > max_body:
            return None
        fields = like.fields.copy()
        fields[b"content-length"] = digits
        return Request(like.method, like.path, like.query, fields, like.minor, length, like.keep_alive, like.expects)

    def add(self, head: bytes, request: Request) -> None:
        """Keep a head that was read in full."""
        at = head.find(_LENGTH)
        if at < 0 or len(head) > _KNOWN_SIZE or head[at - len(_NAME) : at].lower() != _NAME:
            return
        at += len(_LENGTH)
        end = head.find(b"\r\n", at)
        if not head[at:end].isdigit():
            return
        if len(self._known) >= _KNOWN_AT_MOST:
            self._known.clear()
        like = msgspec.structs.replace(request, fields=request.fields.copy())
        self._known[head[:at] + head[end:]] = len(head), like


class HeadReader:
    """Reads the heads of one connection, one after another, on one llhttp parser, made for the first head that is not
    known. `known`: heads of its server."""

    __slots__ = ("_fields", "_host", "_known", "_parser", "_parsing", "_settings")

    def __init__(self, settings: ServerSettings, known: KnownHeads) -> None:
        self._settings = settings
        self._known = known
        self._parsing = False  # whether the parser has read the head whose body comes next
        self._fields: _Fields | None = None
        self._parser: httptools.HttpRequestParser | None = None
        self._host: bytes | None = None  # the last Host found well-formed: clients repeat it

    def read(self, head: bytes) -> Request:
        """The request of one complete head (request line to the empty line). Raises WireError."""
        known = self._known.read(head, self._settings.max_body)
        self._parsing = known is None
        return self._read(head) if known is None else known

    def _read(self, head: bytes) -> Request:
        settings = self._settings
        if not 0x41 <= head[0] <= 0x5A:  # llhttp would skip line ends of any kind
            raise WireError(400, "request does not start with a method")
        line_end = head.find(b"\r\n")
        if line_end > settings.max_request_line:
            raise WireError(414, f"request line is over {settings.max_request_line} bytes")
        if len(head) - line_end - 2 > settings.max_headers:
            raise WireError(431, f"headers are over {settings.max_headers} bytes")
        if head.count(b"\n") - 2 > settings.max_header_fields:
            raise WireError(431, f"more than {settings.max_header_fields} header fields")
        parts = head[:line_end].split(b" ")
        if len(parts) != 3:
            raise WireError(400, "request line is not `method target version`")
        method, target, version = parts
        minor = 1 if version == b"HTTP/1.1" else _minor_version(method, version)
        if target[:1] == b"/":
            if b"#" in target:
                raise WireError(400, "request target has a fragment")
            path, _, query = target.partition(b"?")
        else:
            path, query = _unusual_target(method, target)
        headers = self._parse(method, head)
        index = dict(headers)
        if len(index) != len(headers):
            index = _joined_values(headers)
        self._check_host(index.get(b"host"), minor)
        length = _body_length(index, minor, settings.max_body)
        if length == CHUNKED and self._parser is not None:
            self._parser.feed_data(b"0\r\n\r\n")  # the parser is told of an empty body; body.py reads the real one
        connection = index.get(b"connection")
        if connection is None:
            keep_alive = minor == 1
        else:
            keep_alive = connection == b"keep-alive" or _keeps_alive(connection, minor)
        expect = index.get(b"expect")
        expects = expect is not None and minor == 1 and expect.lower() == b"100-continue"
        request = Request(method, path, query, index, minor, length, keep_alive, expects)
        self._known.add(head, request)
        return request

    def skip(self, body: bytes | bytearray) -> None:
        """Take the parser past a body of announced length, all of it, so that it is ready for the next head."""
        if self._parsing and self._parser is not None:
            self._parser.feed_data(body)

    def check_part(self, part: bytes | bytearray, scanned: int) -> None:
        """Refuse early what no further bytes can mend. `part` is an incomplete head, `scanned` of it seen before."""
        if not 0x41 <= part[0] <= 0x5A:
            raise WireError(400, "request does not start with a method")
        if part.count(b"\n", scanned) != part.count(b"\r\n", max(0, scanned - 1)):
            raise WireError(400, "line does not end with CRLF")
        settings = self._settings
        line_end = part.find(b"\r\n", 0, settings.max_request_line + 2)
        if line_end < 0:
            if len(part) > settings.max_request_line + 1:
                raise WireError(414, f"request line is over {settings.max_request_line} bytes")
        elif len(part) - line_end - 2 > settings.max_headers:
            raise WireError(431, f"headers are over {settings.max_headers} bytes")

    def _parse(self, method: bytes, head: bytes) -> list[tuple[bytes, bytes]]:
        fields, parser = self._fields, self._parser
        if fields is None or parser is None:
            self._fields = fields = _Fields()
            self._parser = parser = httptools.HttpRequestParser(fields)
        try:
            try:
                parser.feed_data(head)
            except httptools.HttpParserUpgrade:
                # We never upgrade. llhttp would drop the body of such a request, and clients do offer h2c on a POST,
                # so the head is read again without the offer.
                if method == b"CONNECT":
                    raise WireError(501, "CONNECT is not served") from None
                lines = [line for line in head.split(b"\r\n") if line[:8].lower() != b"upgrade:"]
                fields.items = []
                self._parser = parser = httptools.HttpRequestParser(fields)
                parser.feed_data(b"\r\n".join(lines))
        except httptools.HttpParserError as error:
            raise WireError(400, f"malformed request: {error}") from None
        headers, fields.items = fields.items, []
        return headers

    def _check_host(self, host: bytes | None, minor: int) -> None:
        if host is None:
            if minor == 1:
                raise WireError(400, "Host header is missing")
        elif host != self._host:
            if _HOST.fullmatch(host) is None:
                raise WireError(400, "Host header is malformed")
            self._host = host


def _minor_version(method: bytes, version: bytes) -> int:
    if version == b"HTTP/1.0":
        return 0
    if method == b"PRI" or _VERSION.fullmatch(version) is None:
        raise WireError(400, "request line is not of HTTP/1.1")
    raise WireError(505, "only HTTP/1.1 and HTTP/1.0 are served")


def _unusual_target(method: bytes, target: bytes) -> tuple[bytes, bytes]:
    """Path and query of a target that is not in origin-form."""
    if method == b"CONNECT":
        raise WireError(501, "CONNECT is not served")
    if target == b"*" and method == b"OPTIONS":
        return b"*", b""
    absolute = _ABSOLUTE.fullmatch(target)
    if absolute is None or _HOST.fullmatch(absolute[1]) is None:
        raise WireError(400, "request target is malformed")
    return absolute[2] or b"/", absolute[3] or b""


def _joined_values(headers: list[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """The value of each name, where some name is repeated: its lines joined as a list's (RFC 9110, 5.3).

    What decides about a request and is no list must be there once, or a client could send it before a proxy does. A
    name that only a policy knows, a tenant's header, has a value that no tenant has.
    """
    index: dict[bytes, bytes] = {}
    for name, value in headers:
        if name not in index:
            index[name] = value
        elif name in _ONCE or name.startswith(b"x-weir-"):
            raise WireError(400, f"{name.decode()} header is repeated")
        else:
            index[name] += b", " + value
    return index


def _body_length(index: dict[bytes, bytes], minor: int, max_body: int) -> int:
    announced = index.get(b"content-length")
    coding = index.get(b"transfer-encoding")
    if coding is not None:
        if announced is not None or minor == 0 or coding.lower() != b"chunked":
            raise WireError(400, "Transfer-Encoding must be exactly `chunked`, in HTTP/1.1, without Content-Length")
        return CHUNKED
    if announced is None:
        return 0
    if not announced.isdigit() or len(announced) > 20:
        raise WireError(400, "Content-Length is not a decimal number")
    length = int(announced)
    if length > max_body:
        raise WireError(413, f"body of {length} bytes is over the limit of {max_body}")
    return length


def _keeps_alive(connection: bytes, minor: int) -> bool:
    options = {option.strip() for option in connection.lower().split(b",")}
    return b"close" not in options and (minor == 1 or b"keep-alive" in options)
