"""Values of the data port: its settings, requests, whole answers, refusals. No sockets, no clock."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from gateway.core.answer.error_shape import shaped
from gateway.core.request.body_memory import BodyLease, BodyMemory
from gateway.core.request.outcome import error_body

if TYPE_CHECKING:
    from gateway.relay.epp.lending import LentCall

STRANGER_HEADERS = 5.0  # seconds for the first head on a port with a token


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the data port. Times in seconds, sizes in bytes."""

    max_connections: int = 10_000
    max_per_peer: int = 10_000  # of these, from one address; of a port with a token, those that have not shown it
    strangers: int = 0  # of these, that have not shown the port's token yet; 0: the port has none
    refused_at_once: int = 256  # connections without a seat that are answered 503; beyond, they are only reset
    exempt: Callable[[str], bool] = lambda _: False  # whether the share of an address does not hold for this one
    max_request_line: int = 8192
    max_headers: int = 16384  # all header lines together, without the request line; trailers likewise
    max_header_fields: int = 100
    headers_timeout: float = 10.0  # from the first byte of a request to the end of its head; TLS handshakes too
    body_timeout: float = 30.0  # without a byte of the body
    body_total: float = 300.0  # from the first byte of a request to the last of its body
    keep_alive: float = 75.0
    max_body: int = 16 * 1024 * 1024
    write_high_water: int = 256 * 1024
    write_stall: float = (
        15.0  # a client over high water must take something in this time, and all of it in 20 times that
    )
    max_pipelined: int = 16  # requests waiting behind the one being answered
    max_pipelined_bytes: int = 64 * 1024
    half_open_timeout: float = 15.0
    linger: float = 2.0  # how long a refused client's bytes are still read, so that it can read the refusal
    drain_notice: float = 1.0  # between telling watchers "drain" and aborting


def with_token(settings: ServerSettings) -> ServerSettings:
    """Return the settings of a port with a token. A connection that has shown the token has no share to mind; those
    that have not have a quarter of the connections in all, and an address a quarter of these."""
    strangers = max(4, settings.max_connections // 4)
    return msgspec.structs.replace(
        settings,
        strangers=strangers,
        max_per_peer=max(1, strangers // 4),
        headers_timeout=min(settings.headers_timeout, STRANGER_HEADERS),
    )


class WireError(Exception):
    """A request that is not served because of its bytes. The connection closes after the answer. `reason`: a word for
    what there is too much of, where the status is 503."""

    def __init__(self, status: int, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.reason = reason


CHUNKED: Final = -1
UNLIMITED: Final = 1 << 62

STATUS_LINES: Final = MappingProxyType(
    {each.value: b"HTTP/1.1 %d %b\r\n" % (each, each.phrase.encode()) for each in HTTPStatus}
)

# Error type, code and retry advice of the answers the wire gives by itself.
_INVALID = "invalid_request_error"
_NO_RETRY = b"x-should-retry: false\r\n"
_REFUSALS: Final = MappingProxyType({
    400: (_INVALID, "invalid_request_error", _NO_RETRY),
    408: (_INVALID, "request_timeout", b""),
    413: (_INVALID, "request_too_large", _NO_RETRY),
    414: (_INVALID, "uri_too_long", _NO_RETRY),
    431: (_INVALID, "headers_too_large", _NO_RETRY),
    501: (_INVALID, "not_implemented", _NO_RETRY),
    503: ("server_error", "server_is_overloaded", b"retry-after: 2\r\n"),
    504: ("server_error", "deadline_exceeded", b""),
    505: (_INVALID, "http_version_not_supported", _NO_RETRY),
})  # fmt: skip


# Answers for a body that finds no memory, by the limit that was reached.
NO_ROOM: Final = MappingProxyType({
    "memory": "all the memory that this gateway has for requests' bodies (body.memory) is in use; try again shortly",
    "share": "your requests hold as much of this gateway's memory for bodies as one client may (half of body.memory): "
             "send fewer or smaller ones at once, or try again shortly",
})  # fmt: skip


def leased(held: BodyLease | None, bodies: BodyMemory, owner: str, size: int) -> BodyLease:
    """Return the lease on so many bytes of bodies in all, made if there is none yet. Raises WireError where there is no
    room for them."""
    lease = BodyLease(bodies, owner) if held is None else held
    full = lease.resize(size)
    if full:
        raise WireError(503, NO_ROOM[full], "bodies")
    return lease


def status_line(status: int) -> bytes:
    """`HTTP/1.1 status reason` with its CRLF; a status without a known reason has an empty one."""
    return STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status


def answer(status: int, headers: bytes, body: bytes, *, close: bool = False) -> bytes:
    """A whole HTTP/1.1 answer. `headers` are preformatted lines without content-length and connection."""
    length = b"" if status == 204 else b"content-length: %d\r\n" % len(body)
    connection = b"connection: close\r\n" if close else b""
    return b"%b%b%b%b\r\n%b" % (status_line(status), headers, length, connection, body)


def refusal(error: WireError, path: bytes = b"") -> bytes:
    """The answer to a `WireError`: the error object of the API at `path`, as far as that is known, and the end of the
    connection."""
    type_, code, advice = _REFUSALS[error.status]
    body = shaped(path.decode("latin-1"), error.status, error_body(error.message, type_, code))
    if error.reason:
        reason = error.reason.encode()
        advice += b'x-weir-reason: %b\r\nlink: </outcomes/%b>; rel="help"\r\n' % (reason, reason)
    return answer(error.status, b"content-type: application/json\r\n" + advice, body, close=True)


PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\n"  # the first bytes of an HTTP/2 client (RFC 9113, 3.4)
_DEBUG: Final = b"this port speaks HTTP/1.1"
# The end of an HTTP/2 connection: an empty SETTINGS frame, then GOAWAY with HTTP_1_1_REQUIRED (RFC 9113, 6.5, 6.8, 7).
HTTP_1_1_REQUIRED: Final = (
    b"\0\0\0\4\0\0\0\0\0" + (8 + len(_DEBUG)).to_bytes(3, "big") + b"\7\0\0\0\0\0\0\0\0\0\0\0\0\x0d" + _DEBUG
)


class Sink(Protocol):
    """Taker of a body that is not kept in memory. `feed` may raise WireError."""

    def flow(self, pause: Callable[[], None], resume: Callable[[], None]) -> None:
        """Take the functions that pause and resume the client. Called once, if the body comes in pieces."""

    def feed(self, data: bytes) -> None:
        """The next bytes of the body."""

    def lost(self) -> None:
        """The body does not come to its end. Of one that is whole, its handler alone says so."""


class Request(msgspec.Struct, eq=False):
    """HTTP request. Names of headers are in lower case, and values stripped."""

    method: bytes
    path: bytes  # as sent, without the query
    query: bytes
    fields: dict[bytes, bytes]  # headers by name; the values of a repeated one are joined by commas
    minor: int  # of the version: HTTP/1.0 or 1.1
    length: int  # bytes of the body as announced, or CHUNKED
    keep_alive: bool
    expects: bool = False  # its client waits for 100 Continue
    body: bytes = b""  # empty until the request is complete
    peer: str = ""  # the client's address, or `unix`
    at: float = 0.0  # loop time in seconds of its first byte; of a pipelined request, when its turn came
    limit: int = UNLIMITED  # bytes that the body may have; the handler may lower it when it sees the head
    owner: str = ""  # name on which the body's memory counts, set by the handler; empty: the peer
    known: bool = False  # the client has shown the port's token, which the handler checks
    held: BodyLease | None = None  # lease on the body's memory
    sink: Sink | None = None  # receives the body in place of memory, set when the handler sees the head
    subset: frozenset[str] | None = None  # ids of the only engines that may get it; None: any
    lent: LentCall | None = None  # its granted call, where a proxy forwards it; the answer is then empty

    def release(self) -> None:
        """Free the body's memory. A second time changes nothing."""
        self.body = b""
        if self.held is not None:
            self.held.release()
            self.held = None
