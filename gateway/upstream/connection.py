"""Connection to an engine: writes a request, reads its answer, strictly. No pool, no retry.

llhttp (httptools) reads the answer and refuses malformed ones. This module refuses what llhttp lets through: versions
other than HTTP/1.0 and 1.1, codings other than exactly `chunked`, heads over their limit, and anything after the end of
an answer. The end of an answer takes effect only once the whole read is parsed, because only then is it known what
follows.

No coroutine and no timer per chunk: the socket's own callback passes the bytes to the reader of the answer. Each
connection has one timer, compared lazily, so that progress only stores a time.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Literal, Protocol, cast

import msgspec
from httptools import HttpParserCallbackError, HttpParserError, HttpParserUpgrade, HttpResponseParser

from gateway.native.loan import Loan, plain_socket
from gateway.upstream.unread import LOOK, unread

Kind = Literal["connect", "reset", "timeout", "garbage", "stall", "truncated", "closed"]
REASONS_OF: dict[Kind, str] = {
    "connect": "unreachable",
    "reset": "reset",
    "timeout": "timeout",
    "garbage": "garbage",
    "stall": "timeout",
    "truncated": "truncated",
    "closed": "reset",
}


# A head after which a new parser is where one is that has read a whole chunk.
_CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n%b\r\n"
_PLAIN = b"HTTP/1.1 2"  # the first bytes of a head that is the answer's own, no interim one


class ClientSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds and bytes. `idle_for` stays below the engine's own keep-alive (vLLM: 5 s). `network`: addresses to
    connect to; private: those of this machine and of private networks. `resends`: whether a request that went out whole
    on a reused connection is sent again after a reset; not where its first sending may cost money."""

    connect_timeout: float = 2.0
    stall_timeout: float = 60.0
    max_idle: int = 256
    idle_for: float = 4.0
    buffer: int = 256 * 1024  # of body that nobody relays yet; beyond, the socket is not read
    network: Literal["any", "public", "private"] = "any"
    resends: bool = True
    max_head: int = 16 * 1024  # status line and headers, interim answers included; trailers likewise


class EngineError(Exception):
    """The engine failed at the level of HTTP. `before_bytes`: no byte of the answer had come, so it may be repeated.
    `reason`: one of `core/trouble.py`'s. `sent`: the request, or a part of it, may have gone out; `whole`: all of it
    may have."""

    def __init__(
        self,
        kind: Kind,
        message: str,
        *,
        before_bytes: bool = False,
        reason: str = "",
        sent: bool = True,
        whole: bool = True,
    ) -> None:
        super().__init__(message)
        self.kind: Kind = kind
        self.before_bytes = before_bytes
        self.sent = sent
        self.whole = whole
        self.reason = reason or REASONS_OF[kind]


class ConnectionPool(Protocol):
    """Owner of connections."""

    def forget(self, connection: EngineConnection) -> None:
        """Take note that it has ended while it was idle."""


class EngineConnection(asyncio.Protocol):
    """To one engine. `idle`: open, and nothing under way. `lost`: ended."""

    __slots__ = ("_chunk_over", "_data", "_deadline", "_done", "_early", "_early_size", "_ended", "_error",
                 "_excess", "_framing", "_full", "_headers_over", "_keep", "_last", "_loan",
                 "_loop", "_parser", "_paused", "_plain", "_pool", "_progress_at", "_seen", "_settings", "_synced",
                 "_tail", "_timer", "_timer_at", "_transport", "_unwritten", "_waiter", "_whole", "complete", "framed",
                 "headers", "idle", "length", "lost", "status")  # fmt: skip

    def __init__(self, settings: ClientSettings, pool: ConnectionPool, loop: asyncio.AbstractEventLoop) -> None:
        self._settings = settings
        self._pool = pool
        self._loop = loop
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._progress_at = 0.0
        self._deadline = math.inf
        self._data: Callable[[bytes], None] | None = None
        self._done: Callable[[EngineError | None], None] | None = None
        self._whole: Callable[[bytes], None] | None = None
        self._loan: Loan | None = None  # to whom the socket is lent
        self.idle = True
        self.lost = self._paused = False
        self._unwritten = False  # a part of the request waits for the socket; known where `resends` is false
        self._reset()

    def _reset(self) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.length: int | None = None
        self.complete = self._seen = self._plain = self._headers_over = self.framed = False
        self._ended = self._excess = self._keep = self._chunk_over = self._synced = False
        self._framing = 0  # bytes read in a row, up to now, that held nothing of a body
        self._early: list[bytes] = []
        self._early_size = 0
        self._full = False  # reading is paused because nobody relays
        self._tail = self._last = b""  # the end of what was read, at least 5 bytes; the last piece of body
        self._error: EngineError | None = None

    # -- one exchange -------------------------------------------------------------------------------------------

    def exchange(self, message: bytes | None, head: bytes, body: bytes, deadline: float) -> asyncio.Future[None]:
        """Write the request. The future waits for the head and the first body bytes, or the end; both raise
        EngineError. Whoever is cancelled while it waits aborts the connection.

        `message`: head and body in one, where that is worth the copy.
        """
        if not self.idle:
            raise EngineError("reset", "the engine closed the connection", before_bytes=True, whole=False)
        self.idle = False
        self._progress_at = self._loop.time()
        transport = self._transport
        if message is not None:
            transport.write(message)
        else:
            transport.write(head)
            transport.write(body)
        self._waiter = waiter = self._loop.create_future()
        self._deadline = deadline
        self._arm(deadline)
        return waiter

    def _first(self) -> None:
        """Head and first bytes are here: wake the sender, once."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            self._deadline = math.inf
            self._arm(self._progress_at + self._settings.stall_timeout)
            self._waiter = None
            waiter.set_result(None)

    def _fail(self, kind: Kind, message: str) -> None:
        """The exchange is over, badly: tell whoever waits, and close."""
        if self.complete or self._error is not None:
            return
        error = self._error = EngineError(kind, message, before_bytes=not self._seen, whole=not self._unwritten)
        waiter, done = self._waiter, self._done
        self.abort()
        if waiter is not None and not waiter.done():
            waiter.set_exception(error)
        elif done is not None:
            self.let_go()
            done(error)

    def give_up(self, message: str) -> None:
        """Fail an exchange whose answer has not begun, by this side's own decision: it is not sent here again."""
        # An answer that began in this turn of the loop, before its sender runs or before it is read, goes on.
        if self._waiter is not None and not unread(self._transport):
            self._fail("closed", message)

    # -- asyncio's side -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if not self._settings.resends:
            # So that the transport tells of bytes that wait. With 0, TLS tells of some where none do; with 1, only of
            # those that are not encrypted yet: in doubt, a request counts as whole.
            self._transport.set_write_buffer_limits(1)
        self._parser = HttpResponseParser(self)

    def pause_writing(self) -> None:
        self._unwritten = True

    def resume_writing(self) -> None:
        self._unwritten = False

    def data_received(self, data: bytes) -> None:
        if self.idle or self.complete:
            # Nothing is owed to us: whatever this is, the framing of this connection cannot be trusted any more.
            self.abort()
            return
        self._progress_at = self._loop.time()
        if self._synced:
            # The usual read of a stream is one whole chunk, and needs no parser: the bytes can go on as they are.
            line = data.find(b"\r\n", 1, 9)
            size = len(data) - line - 4
            if size and data[:line] == b"%x" % size and data[-2:] == b"\r\n" and self._whole is not None:
                try:
                    self._whole(data)
                except BaseException:
                    self._fail("closed", "the reader of the answer failed")
                    raise
                return
        if not self._seen:
            self._seen = True
            self._plain = data.startswith(_PLAIN)
        if not self._headers_over:
            room = self._settings.max_head - self._framing
            if len(data) > room:  # whether a head is over its limit must not depend on what came with it
                self._feed(data[:room])
                if not self._headers_over:
                    self._fail("garbage", f"the head of the engine's answer is over {self._settings.max_head} bytes")
                    return
                data = data[room:]
        self._feed(data)
        # A chunk's end was the last thing read, and no begun size line follows it: that would have no line end yet.
        self._synced = self._chunk_over and data[-1:] == b"\n"
        self._tail = data if len(data) > 4 else self._tail[-4:] + data
        if self._ended and self._error is None:
            self._excess = self._excess or not self._ends_here(data)
            self._finish()
        elif self._framing > self._settings.max_head:
            self._fail("garbage", f"over {self._settings.max_head} bytes of framing in the engine's answer")

    def _ends_here(self, data: bytes) -> bool:
        """Whether no blank lines follow the answer, which llhttp would skip without a word. In doubt: no.

        A counted body ends what was read if the read ends with the body's last piece, unless that piece is itself
        white space. Any other message ends with a blank line: it is the only one if no line end precedes it twice.
        """
        last = self._last
        if self.length and last:
            return data.endswith(last) and not last.isspace()
        tail = self._tail[-5:]
        return len(tail) == 5 and tail[1:] == b"\r\n\r\n" and tail[0] not in b"\r\n"

    def _feed(self, data: bytes) -> None:
        self._framing += len(data)
        if self._parser is None:  # see lend
            self._parser = HttpResponseParser(self)
            self._parser.feed_data(_CHUNKED % (b"" if self._keep else b"connection: close\r\n"))
        try:
            self._parser.feed_data(data)
        except HttpParserCallbackError:  # a bug of whoever takes the bytes, not of the engine
            self._fail("closed", "the reader of the answer failed")
            raise
        except (HttpParserError, HttpParserUpgrade) as error:
            if not self._ended:  # else it is what follows the answer, and on_message_begin has seen it
                words = "it changes the protocol" if isinstance(error, HttpParserUpgrade) else error
                self._fail("garbage", f"the engine's answer is not HTTP: {words}")

    def eof_received(self) -> bool:
        if self._headers_over and not self.framed and self._error is None and not self.complete:
            self._finish()  # a body that ends with the connection
        elif not self.idle and not self.complete:
            self._left()  # now: the transport itself closes only once all of the request is written
        return False

    def _left(self) -> None:
        kind: Kind = "truncated" if self._headers_over else "reset"
        where = "in the middle of its answer" if self._headers_over else "before answering"
        self._fail(kind, f"the engine closed the connection {where}")

    def connection_lost(self, exc: Exception | None) -> None:
        self.end_loan()
        self.lost = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.idle:
            self.idle = False
            self._pool.forget(self)
        elif not self.complete:
            self._left()
        self._parser = cast(HttpResponseParser, None)  # it and its callbacks are a cycle

    # -- httptools' side ----------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._ended:
            self._excess = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._headers_over:  # trailers, or what follows the end of the answer
            return
        name, headers = name.lower(), self.headers
        if name == b"transfer-encoding" and name in headers:
            value = headers[name] + b", " + value
        headers[name] = value

    def on_headers_complete(self) -> None:
        if self._headers_over:
            return
        status = self.status = self._parser.get_status_code()
        # Most answers say so with their first bytes; the parser would format a text.
        version = "1.1" if self._plain else self._parser.get_http_version()
        if version not in ("1.1", "1.0") or not 100 <= status < 600:
            self._fail("garbage", f"the engine's answer is not of HTTP/1.1: status {status}")
            return
        if status < 200:
            return
        self._headers_over = True
        self._framing = 0
        headers = self.headers
        coding, length = headers.get(b"transfer-encoding"), headers.get(b"content-length")
        if coding is not None:
            if coding.lower() != b"chunked" or version == "1.0":
                self._fail("garbage", "the engine's answer has a transfer coding other than `chunked` in HTTP/1.1")
                return
            self._chunk_over = True
        elif length is not None:
            self.length = int(length)
        self.framed = coding is not None or length is not None or status in (204, 304)

    def on_chunk_header(self) -> None:
        self._chunk_over = False

    def on_chunk_complete(self) -> None:
        self._chunk_over = True

    def on_body(self, data: bytes) -> None:
        self._framing = 0
        self._last = data
        sink = self._data
        if sink is not None:
            sink(data)
        elif not self._ended and self._error is None:
            self._early.append(data)
            self._early_size += len(data)
            self._first()
            if self._early_size > self._settings.buffer and not self._paused:
                self._full = True
                self.pause()

    def on_message_complete(self) -> None:
        if self.status >= 200:
            if not self._ended:
                self._keep = self._parser.should_keep_alive()
                self._ended = True
                self._data = self._whole = None  # what may follow in this read is nobody's
        else:  # 100 Continue, 103 Early Hints: the answer is still to come
            self.headers = {}

    def _finish(self) -> None:
        self.complete = True
        done = self._done
        if done is not None:
            done(None)
        else:
            self._first()

    # -- for the reply and the pool -----------------------------------------------------------------------------

    def relay(
        self,
        data: Callable[[bytes], None],
        done: Callable[[EngineError | None], None],
        whole: Callable[[bytes], None] | None,
    ) -> None:
        """See Reply.relay."""
        early, self._early = self._early, []
        self._data, self._done, self._whole = data, done, whole
        if self._full:
            self._full = False
            self.resume()  # before the pieces: who takes them may pause
        for piece in early:
            data(piece)
            if self._done is None:  # the reply was closed by who took the piece
                return
        if self.complete or self._error is not None:
            done(self._error)

    def whole(self) -> bytes:
        """See Reply.whole."""
        early, self._early = self._early, []
        return b"".join(early)

    def let_go(self) -> None:
        """Forget who takes the answer."""
        self.end_loan()
        self._data = self._done = self._whole = None

    # -- for the pump: see Loan

    def bare_socket(self) -> int | None:
        """See EngineSide. A read that begins where a chunk ended is one that the pump understands."""
        synced = self._synced and self._whole is not None and self._error is None
        if not synced or self._paused or self.lost or self._loan is not None or self._transport.is_closing():
            return None
        return plain_socket(self._transport)

    def lend(self, loan: Loan) -> None:
        """See EngineSide."""
        self._loan = loan
        self._transport.pause_reading()
        # For a stream's minutes nothing is kept that its end does not need: bytes before those that the pump passes on,
        # a head that was sent on, and a parser that can be made again.
        self._tail = self._last = b""
        self.headers.clear()
        if self._parser is not None:
            self._keep = self._parser.should_keep_alive()
            self._parser = cast(HttpResponseParser, None)

    def take_back(self, data: bytes, heard_at: float) -> None:
        """See EngineSide."""
        self._loan = None
        self._progress_at = max(self._progress_at, heard_at)
        if not self.lost and not self._transport.is_closing():
            self._transport.resume_reading()
            if data:
                self.data_received(data)

    def end_loan(self) -> None:
        """Take the socket back, if it is lent."""
        if self._loan is not None:
            self._loan.end()

    def pause(self) -> None:
        if not self._paused and not self.lost:
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._paused and not self.lost:
            self._paused = False
            self._progress_at = self._loop.time()
            self._transport.resume_reading()

    @property
    def heard_at(self) -> float:
        """Loop time when bytes were last received, or reading was resumed."""
        return self._progress_at if self._loan is None else max(self._progress_at, self._loan.heard_at)

    @property
    def reusable(self) -> bool:
        """Whether another request may follow: both directions are over, and nothing else has come."""
        return (
            self.complete
            and self._keep
            and not self._excess
            and not self.lost
            and not self._transport.is_closing()
            and not self._transport.get_write_buffer_size()
        )

    def rest(self) -> None:
        """Into the pool."""
        self.resume()
        self._reset()
        self.idle = True
        self._progress_at = self._loop.time()
        self._arm(self._progress_at + self._settings.idle_for)

    def abort(self) -> None:
        self._waiter = None
        self.end_loan()
        if self.idle:
            self.idle = False
            self.complete = True  # nothing is under way
            self._pool.forget(self)
        if not self.lost:
            self._transport.abort()

    # -- time ---------------------------------------------------------------------------------------------------

    def _arm(self, at: float) -> None:
        if self._timer is not None:
            if self._timer_at <= at:
                return
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._loop.call_at(at, self._wake)

    def _wake(self) -> None:
        self._timer = None
        now, settings = self._loop.time() + 0.002, self._settings
        if self.idle:
            at = self._progress_at + settings.idle_for
            if at <= now:
                self.abort()
                return
        elif self.complete or self._error is not None:
            return
        elif self._deadline < math.inf:
            at = self._deadline
            if at <= now and not unread(self._transport):
                self._fail("timeout", "the engine did not begin its answer in time")
                return
        else:
            at = math.inf if self._paused else self.heard_at + settings.stall_timeout
            if at <= now and not unread(self._transport):
                self._fail("stall", f"the engine sent nothing for {settings.stall_timeout:g} s")
                return
            at = min(at, now + settings.stall_timeout)
        self._arm(max(at, now + LOOK))
