"""HTTP client for load: one request and one `Answer`, on a connection of its own or a kept one.

It is cheap enough not to be the bottleneck: an asyncio protocol over httptools, which looks into an event only where it
has to. It is as strict as a load test needs: an answer is complete only if its framing says so, and a stream is ok only
if it ended with `[DONE]` and carried no error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Protocol, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from loadtest.clients.answer import END, Answer

MAX_HEAD = 65536  # bytes
MAX_EVENT = 1 << 22


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
        self._parser = HttpResponseParser(self)
        self._head = 0  # bytes before the end of the head
        self._fields: dict[bytes, bytes] = {}
        self._framed = False  # its end does not depend on the connection's
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
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade):
            self.failed("an answer that is not HTTP")
        if not self._answer.status:
            self._head += len(data)
            if self._head > MAX_HEAD:
                self.failed("a response head that does not end")

    # -- callbacks of the parser ----------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._fields = {}
        if self.over.done():  # what comes after an answer is nobody's
            self.reusable = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields[name.lower()] = value.strip()

    def on_headers_complete(self) -> None:
        answer, fields, status = self._answer, self._fields, self._parser.get_status_code()
        if status < 200 or self.over.done():  # 100 or 103: the answer is still to come
            return
        answer.first_byte = time.monotonic()
        answer.status = status
        kind = fields.get(b"content-type", b"")
        answer.streamed = kind.startswith(b"text/event-stream")
        answer.content_type = kind.decode("latin-1").partition(";")[0]
        answer.reason = fields.get(b"x-weir-reason", b"").decode("latin-1")
        self._framed = status in (204, 304) or b"content-length" in fields or b"transfer-encoding" in fields
        if status != 200:
            answer.fields = fields
        if self._listener is not None:
            self._listener.head(status, fields)

    def on_message_complete(self) -> None:
        if self._answer.status and not self.over.done():
            self._answer.complete = True
            self.reusable &= self._parser.should_keep_alive()
            self._finish()

    def on_body(self, data: bytes) -> None:
        if self.over.done():
            return
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
        if self._answer.status and not self._framed:
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
