"""Server's side of one HTTP/1.1 connection, as uvicorn behaves, but for pipelined requests: it ends where one comes.

`Connection` parses, and knows how to send a whole answer or a chunked one. What the answer is, `handle` decides; it is
called once per request, and answers now or later. A client that leaves is noticed at once: the answer's
`gone` is called, so that its sequences are aborted. Idle connections are closed after five seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import cast

import msgspec
from httptools import HttpParserCallbackError, HttpParserError, HttpRequestParser

KEEP_ALIVE = 5.0  # seconds, uvicorn's default
_BAD_REQUEST = b"Invalid HTTP request received."
JSON = b"content-type: application/json\r\n"


class Request(msgspec.Struct):
    """Parsed request. Header names are lower case; `path` has no query."""

    method: bytes = b""
    path: bytes = b""
    query: bytes = b""
    headers: dict[bytes, bytes] = {}
    body: bytes = b""
    keep_alive: bool = True


class Connection(asyncio.Protocol):
    """`gone` is to be set by whoever answers later; it is cleared when the answer is complete."""

    def __init__(self, handle: Callable[[Request, Connection], None], connections: set[Connection]) -> None:
        self._handle = handle
        self._connections = connections
        self._pieces: list[bytes] = []
        self._url = b""
        self._timer: asyncio.TimerHandle | None = None
        self._idle_since = 0.0
        self._extra = b""
        self.current: Request | None = None
        self.gone: Callable[[], None] | None = None
        self.closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._loop = asyncio.get_running_loop()
        self._parser = HttpRequestParser(self)
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._connections.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        gone, self.gone = self.gone, None
        if gone is not None:
            gone()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except HttpParserCallbackError:  # our own bug, not the client's
            raise
        except HttpParserError:
            if not self.closed:
                self.closed = True
                head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain; charset=utf-8\r\nconnection: close\r\n"
                self.transport.write(b"%bcontent-length: %d\r\n\r\n%b" % (head, len(_BAD_REQUEST), _BAD_REQUEST))
                self.transport.close()

    def on_message_begin(self) -> None:
        self._next = Request()
        self._url = b""
        self._pieces = []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._next.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        if self._next.headers.get(b"expect", b"").lower() == b"100-continue" and self.current is None:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        self._pieces.append(data)

    def on_message_complete(self) -> None:
        request = self._next
        request.method = self._parser.get_method()
        request.path, _, request.query = self._url.partition(b"?")
        request.body = b"".join(self._pieces)
        request.keep_alive = self._parser.should_keep_alive()
        if self.current is not None:
            self.transport.abort()
            return
        self.current = request
        request_id = request.headers.get(b"x-request-id")
        self._extra = b"" if request_id is None else b"x-request-id: %b\r\n" % request_id
        self._handle(request, self)

    def send(self, status: int, body: bytes, headers: bytes = JSON) -> None:
        """A whole answer. `headers` are complete lines, without the length."""
        if self.closed:
            return
        end = b"" if self.current is not None and self.current.keep_alive else b"connection: close\r\n"
        head = b"HTTP/1.1 %d %b\r\nserver: uvicorn\r\ncontent-length: %d\r\n%b%b%b\r\n" % (
            *(status, reason(status), len(body)),
            *(headers, self._extra, end),
        )
        sends_body = self.current is None or self.current.method != b"HEAD"
        self.transport.write(head + body if sends_body else head)
        self._complete()

    def start(self) -> None:
        """The head of a stream of events, chunked."""
        if not self.closed:
            self.transport.write(
                b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
                b"%btransfer-encoding: chunked\r\n\r\n" % self._extra
            )

    def write(self, framed: bytes) -> None:
        """Bytes of a stream, framed already (`chunk`)."""
        if not self.closed:
            self.transport.write(framed)

    def end(self) -> None:
        """The end of a stream."""
        if not self.closed:
            self.transport.write(b"0\r\n\r\n")
            self._complete()

    def _complete(self) -> None:
        self.gone = None
        request, self.current = self.current, None
        if request is not None and not request.keep_alive:
            self.closed = True
            self.transport.close()
        else:
            self._idle_since = self._loop.time()
            if self._timer is None:
                self._timer = self._loop.call_later(KEEP_ALIVE, self._expire)

    def _expire(self) -> None:
        self._timer = None
        if self.current is not None or self.closed:
            return
        left = self._idle_since + KEEP_ALIVE - self._loop.time()
        if left > 0.0:
            self._timer = self._loop.call_later(left, self._expire)
        else:
            self.transport.close()


def reason(status: int) -> bytes:
    """The words behind a status code; the standard's own class where the code has none."""
    try:
        return HTTPStatus(status).phrase.encode()
    except ValueError:
        return b"Client Error" if status < 500 else b"Server Error"


def chunk(data: bytes) -> bytes:
    """Chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)
