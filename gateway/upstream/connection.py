"""Connection to an engine: writes a request, passes its answer on as `answer_reader.py` reads it. No pool, no retry.

No coroutine and no timer per chunk: the socket's own callback passes the bytes to the reader of the answer. Each
connection has one timer, compared lazily, so that progress only stores a time.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Literal, Protocol, TypeAlias, cast

import msgspec
from httptools import HttpParserCallbackError

from gateway.native.loan import Loan, plain_socket
from gateway.upstream.answer_reader import AnswerReader, BodySink, nobody
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


Done: TypeAlias = Callable[[EngineError | None], None]  # takes the end of an answer


class ConnectionPool(Protocol):
    """Owner of connections."""

    def forget(self, connection: EngineConnection) -> None:
        """Take note that it has ended while it was idle."""


class EngineConnection(asyncio.Protocol):
    """To one engine. `idle`: open, and nothing under way. `lost`: ended. `stalls_from`: no silence stalls before."""

    __slots__ = ("_deadline", "_done", "_early", "_early_size", "_error", "_full", "_loan", "_loop", "_paused", "_pool",
                 "_progress_at", "_settings", "_timer", "_timer_at", "_transport", "_unwritten", "_waiter", "_whole",
                 "answer", "complete", "idle", "lost", "stalls_from")  # fmt: skip

    def __init__(self, settings: ClientSettings, pool: ConnectionPool, loop: asyncio.AbstractEventLoop) -> None:
        self._settings = settings
        self._pool = pool
        self._loop = loop
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = self._progress_at = self.stalls_from = 0.0
        self._deadline = math.inf
        self.answer = AnswerReader(settings.max_head)
        self._done: Done | None = None
        self._whole: BodySink | None = None
        self._loan: Loan | None = None  # to whom the socket is lent
        self.idle = True
        self.lost = self._paused = False
        self._unwritten = False  # a part of the request waits for the socket; known where `resends` is false
        self._reset()

    def _reset(self) -> None:
        self._early: list[bytes] = []  # body that came before anybody relays
        self._early_size = 0
        self.complete = self._full = False  # full: reading is paused because nobody relays
        self._error: EngineError | None = None

    # -- one exchange -------------------------------------------------------------------------------------------

    def exchange(self, message: bytes | None, head: bytes, body: bytes, deadline: float) -> asyncio.Future[None]:
        """Write the request. The future waits for the head and the first body bytes, or the end; both raise
        EngineError. Whoever is cancelled while it waits aborts the connection. `message`: head and body in one, where
        that is worth the copy.
        """
        if not self.idle:
            raise EngineError("reset", "the engine closed the connection", before_bytes=True, whole=False)
        self.idle = False
        self._progress_at = self.stalls_from = self._loop.time()
        self.answer.sink = self._keep
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
        error = self._error = EngineError(kind, message, before_bytes=not self.answer.seen, whole=not self._unwritten)
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
        answer = self.answer
        if answer.synced:
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
        try:
            answer.feed(data)
        except HttpParserCallbackError:
            self._fail("closed", "the reader of the answer failed")
            raise
        if answer.fault:
            self._fail("garbage", answer.fault)
        elif answer.ended and self._error is None:
            self._finish()

    def eof_received(self) -> bool:
        if self.answer.ends_with_connection and self._error is None and not self.complete:
            self._finish()
        elif not self.idle and not self.complete:
            self._left()  # now: the transport itself closes only once all of the request is written
        return False

    def _left(self) -> None:
        if self.answer.headers_over:
            self._fail("truncated", "the engine closed the connection in the middle of its answer")
        else:
            self._fail("reset", "the engine closed the connection before answering")

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
        self.answer.close()

    # -- for the reply and the pool -----------------------------------------------------------------------------

    def _keep(self, data: bytes) -> None:
        """Keep body that nobody relays yet."""
        self._early.append(data)
        self._early_size += len(data)
        self._first()
        if self._early_size > self._settings.buffer and not self._paused:
            self._full = True
            self.pause()

    def _finish(self) -> None:
        self.complete = True
        self._whole = None  # no more loans
        done = self._done
        if done is not None:
            done(None)
        else:
            self._first()

    def relay(self, data: BodySink, done: Done, whole: BodySink | None) -> None:
        """See Reply.relay."""
        early, self._early = self._early, []
        self.answer.sink, self._done, self._whole = data, done, whole
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
        self.answer.sink, self._done, self._whole = nobody, None, None

    # -- for the pump: see Loan

    def bare_socket(self) -> int | None:
        """See EngineSide. A read that begins where a chunk ended is one that the pump understands."""
        synced = self.answer.synced and self._whole is not None and self._error is None
        if not synced or self._paused or self.lost or self._loan is not None or self._transport.is_closing():
            return None
        return plain_socket(self._transport)

    def lend(self, loan: Loan) -> None:
        """See EngineSide."""
        self._loan = loan
        self._transport.pause_reading()
        self.answer.shrink()

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
            and self.answer.reusable
            and not self.lost
            and not self._transport.is_closing()
            and not self._transport.get_write_buffer_size()
        )

    def rest(self) -> None:
        """Into the pool."""
        self.resume()
        self._reset()
        self.answer.begin()
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
        else:
            kind: Kind = "timeout"
            at, words = self._deadline, "the engine did not begin its answer in time"
            if at == math.inf:
                kind, words = "stall", f"the engine sent nothing for {settings.stall_timeout:g} s"
                at = math.inf if self._paused else max(self.heard_at + settings.stall_timeout, self.stalls_from)
            if at <= now and not unread(self._transport):
                self._fail(kind, words)
                return
            at = min(at, now + settings.stall_timeout)
        self._arm(max(at, now + LOOK))
