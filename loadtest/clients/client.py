"""HTTP client for load: one request and one `Answer`, on a connection of its own or a kept one.

It is cheap enough not to be the bottleneck. An asyncio protocol reads heads and chunks itself and looks into an event
only where it has to: about 10 us for a read that carries one event. It is as strict as a load test needs: an answer
is complete only if its framing says so, and a stream is ok only if it ended with `[DONE]` and carried no error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Protocol, cast

from loadtest.clients.answer import END, Answer

MAX_HEAD = 65536  # bytes
MAX_EVENT = 1 << 22
MAX_LINE = 4096  # bytes of the line before a chunk


class ResponseListener(Protocol):
    """Listener to an answer as it comes: its head with names in lower case, then the pieces of its body."""

    def head(self, status: int, fields: Mapping[bytes, bytes]) -> None: ...
    def body(self, data: bytes) -> None: ...


class Exchange(asyncio.Protocol):
    """Request and its answer on one connection. `over` is set once, when nothing more will come. With `keep` the
    connection stays open if it can take another request, and `reusable` then says so: call
    `transport.set_protocol(another)` and `another.connection_made(transport)`."""

    def __init__(
        self,
        request: bytes,
        answer: Answer,
        over: asyncio.Future[None],
        listener: ResponseListener | None = None,
        *,
        keep: bool = False,
    ) -> None:
        self.transport: asyncio.Transport | None = None
        self.reusable = keep
        self._listener = listener
        self._request = request
        self._answer = answer
        self.over = over
        self._head = b""
        self._in_head = True
        self._chunked = False
        self._left: int | None = None  # body bytes to come; None: chunked, or until the connection closes
        self._raw = b""  # bytes of an unfinished chunk line
        self._need = 0  # bytes of the current chunk, its line end included
        self._event = b""  # the unfinished event
        self._pieces: list[bytes] = []  # of the body of an answer that is not streamed

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is one, but not by inheritance
        if self.over.done():  # nobody waits any more
            self.transport.abort()
            return
        # Not the loop's clock: uvloop's stands still within a turn, and tells milliseconds.
        self._answer.sent = self._answer.sent or time.monotonic()
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self.over.done():
            self.reusable = False
            return
        try:
            self._read(data)
        except (ValueError, IndexError):
            self._finish("an answer that is not HTTP")

    def _read(self, data: bytes) -> None:
        if self._in_head:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                if len(self._head) > MAX_HEAD:
                    self._finish("a response head that does not end")
                return
            data = self._head[end + 4 :]
            if self._head.startswith((b"HTTP/1.1 1", b"HTTP/1.0 1")):  # 100 or 103: the answer is still to come
                self._head = b""
                self._read(data)
                return
            self._answer.first_byte = time.monotonic()
            self._read_head(self._head[:end])
            self._in_head = False
        if self._chunked:
            self._read_chunks(data)
        else:
            self._read_body(data)
            if self._left is not None:
                self._left -= len(data)
                if self._left <= 0:
                    self._answer.complete = self._left == 0
                    self.reusable &= self._left == 0
                    self._finish()

    def _read_head(self, head: bytes) -> None:
        answer = self._answer
        line, *lines = head.split(b"\r\n")
        if not line.startswith(b"HTTP/1."):
            raise ValueError
        answer.status = int(line.split(b" ", 2)[1])
        self.reusable &= line.startswith(b"HTTP/1.1")
        fields: dict[bytes, bytes] = {}
        for field in lines:
            name, _, value = field.partition(b":")
            name = name.lower()
            value = fields[name] = value.strip()
            if name == b"transfer-encoding":
                self._chunked = value.lower() == b"chunked"
            elif name == b"content-length":
                self._left = int(value)
            elif name == b"content-type":
                answer.streamed = value.startswith(b"text/event-stream")
                answer.content_type = value.decode("latin-1").partition(";")[0]
            elif name == b"x-weir-reason":
                answer.reason = value.decode("latin-1")
            elif name == b"connection":
                self.reusable &= value.lower() != b"close"
        if answer.status in (204, 304):
            self._left = 0
        self.reusable &= self._chunked or self._left is not None
        if answer.status != 200:
            answer.fields = fields
        if self._listener is not None:
            self._listener.head(answer.status, fields)

    def _read_chunks(self, data: bytes) -> None:
        data = self._raw + data
        at, end = 0, len(data)
        self._raw = b""
        while at < end:
            if self._need:
                take = min(self._need, end - at)
                body = min(take, max(0, self._need - 2))  # the chunk's own CRLF is not body
                if body:
                    self._read_body(data[at : at + body])
                self._need -= take
                at += take
                continue
            line = data.find(b"\r\n", at)
            if line < 0:
                if end - at > MAX_LINE:
                    raise ValueError
                self._raw = data[at:]
                return
            size = int(data[at:line].split(b";")[0], 16)
            if size == 0:
                self._answer.complete = True
                self.reusable &= data[line + 2 :] == b"\r\n"  # trailers, or a line end still to come: not worth it
                self._finish()
                return
            self._need = size + 2
            at = line + 2

    def _read_body(self, data: bytes) -> None:
        if self._listener is not None:
            self._listener.body(data)
        if not self._answer.streamed:
            self._pieces.append(data)
            return
        if b"\r" in data:  # a raw one is never within JSON
            data = data.replace(b"\r", b"")
        if self._event:
            data = self._event + data
        if data.endswith(END) and data.find(END) == len(data) - 2:  # one event, as it mostly is
            self._event = b""
            self._answer.read_events(data[:-2], time.monotonic())
            return
        events, separator, self._event = data.rpartition(END)
        if len(self._event) > MAX_EVENT:
            raise ValueError
        if separator:
            self._answer.read_events(events, time.monotonic())

    def eof_received(self) -> None:
        if not self._in_head and not self._chunked and self._left is None:
            self._answer.complete = True  # delimited by the close of the connection

    def failed(self, error: str) -> None:
        """Nothing more is waited for; `error`: what the socket said, if it did."""
        self.reusable = False
        self._finish(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        self._finish(str(exc) if exc else "")

    def _finish(self, error: str = "") -> None:
        if self.over.done():
            return
        answer = self._answer
        answer.finished = time.monotonic()
        if error:
            answer.error = answer.error or error
            self.reusable = False
        elif not answer.streamed:
            answer.read_whole(b"".join(self._pieces))
        self.over.set_result(None)
        if self.transport is not None and not self.reusable:
            self.transport.close()
