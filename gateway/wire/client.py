"""To the engines: one pool of connections per engine, strict framing, no coroutine per chunk.

The pool is a deque used as a stack; it has no queue of its own, since the ledger bounds what is in flight. A reused
connection may have been closed by the engine a moment ago (vLLM keeps them 5 s): a send on it that fails before any
byte of the answer is repeated once on a fresh one. Leaving an answer before its end closes the connection, and vLLM
aborts the request. One timer per connection, compared lazily: progress only stores a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import ssl as tls
from collections import deque
from collections.abc import Callable
from typing import Literal, cast

import msgspec
from httptools import HttpParserCallbackError, HttpParserError, HttpResponseParser

from gateway.wire.origin import Origin, parse_origin

__all__ = ["Client", "ClientSettings", "EngineError", "Origin", "Reply", "parse_origin"]

Kind = Literal["connect", "reset", "timeout", "garbage", "stall", "truncated", "closed"]


class ClientSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds and bytes. `idle_for` stays below the engine's own keep-alive (vLLM: 5 s)."""

    connect_timeout: float = 2.0
    stall_timeout: float = 60.0
    max_idle: int = 256
    idle_for: float = 4.0
    max_head: int = 16 * 1024
    write_high_water: int = 256 * 1024


class EngineError(Exception):
    """The engine failed at the level of HTTP. `before_bytes`: no byte of the answer had come, so it may be repeated."""

    def __init__(self, kind: Kind, message: str, *, before_bytes: bool = False) -> None:
        super().__init__(message)
        self.kind: Kind = kind
        self.before_bytes = before_bytes


class Client:
    """The connections to one engine. `active` counts those with an answer under way, `idle` those in the pool."""

    def __init__(
        self, origin: Origin, settings: ClientSettings, *, ssl: tls.SSLContext | None = None, api_key: str | None = None
    ) -> None:
        self.origin = origin
        self.settings = settings
        self.active = 0
        self._ssl = (ssl or tls.create_default_context()) if origin.tls else None
        self._pool: deque[_Connection] = deque()
        key = b"" if api_key is None else b"authorization: Bearer %b\r\n" % api_key.encode()
        self._static = b" HTTP/1.1\r\nhost: %b\r\n%b" % (origin.authority.encode(), key)
        self._base = origin.base_path.encode()
        self._closed = False

    def __repr__(self) -> str:
        return f"<Client {self.origin.url} {self.active} active {self.idle} idle>"

    @property
    def idle(self) -> int:
        return len(self._pool)

    async def send(self, method: bytes, path: bytes, headers: bytes, body: bytes, *, timeout: float) -> Reply:  # noqa: ASYNC109 # see the deadline below
        """Send a request; the reply, once its head and first body bytes (or the end of its body) are here.

        `headers` are preformatted lines; host, content-length and the engine's key are added. `timeout` seconds cover
        it all. Raises EngineError. Cancellation closes the connection.
        """
        if self._closed:
            raise EngineError("closed", "the client of this engine is closed", before_bytes=True)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        head = b"%b %b%b%b%bcontent-length: %d\r\n\r\n" % (
            method, self._base, path, self._static, headers, len(body)
        )  # fmt: skip
        message = head + body if len(body) <= 65536 else None
        while True:
            connection = self._pool.pop() if self._pool else None
            reused = connection is not None
            self.active += 1
            try:
                if connection is None:
                    connection = await self._connect(deadline)
                await connection.exchange(message, head, body, deadline)
            except EngineError as error:
                self.active -= 1
                if reused and error.before_bytes and error.kind == "reset":
                    self._drop_pool()  # its neighbours are as old: the engine has restarted or timed them out
                    continue
                raise
            except BaseException:
                self.active -= 1
                raise
            return Reply(connection)

    def _drop_pool(self) -> None:
        while self._pool:
            self._pool.pop().abort()

    async def _connect(self, deadline: float) -> _Connection:
        loop, origin = asyncio.get_running_loop(), self.origin
        within = min(self.settings.connect_timeout, deadline - loop.time())

        def made() -> _Connection:
            return _Connection(self, loop)

        try:
            async with asyncio.timeout(within):
                if origin.unix is not None:
                    _, connection = await loop.create_unix_connection(
                        made, origin.unix, ssl=self._ssl, server_hostname=origin.host if self._ssl else None
                    )
                else:
                    _, connection = await loop.create_connection(made, origin.host, origin.port, ssl=self._ssl)
        except TimeoutError:
            raise EngineError("connect", f"no connection within {within:.1f} s", before_bytes=True) from None
        except OSError as error:
            raise EngineError("connect", f"cannot connect: {error}", before_bytes=True) from error
        return connection

    def _returned(self, connection: _Connection) -> None:
        """The answer is over, one way or the other."""
        self.active -= 1
        if self._closed or not connection.reusable or len(self._pool) >= self.settings.max_idle:
            connection.abort()
        else:
            connection.rest()
            self._pool.append(connection)

    def _forget(self, connection: _Connection) -> None:
        with contextlib.suppress(ValueError):
            self._pool.remove(connection)

    async def aclose(self) -> None:
        """Close the idle connections; those with an answer under way close when it ends."""
        self._closed = True
        self._drop_pool()


class _Connection(asyncio.Protocol):
    __slots__ = (
        "_chunk_over",
        "_client",
        "_data",
        "_deadline",
        "_done",
        "_early",
        "_error",
        "_framed",
        "_head_size",
        "_headers_over",
        "_loop",
        "_parser",
        "_paused",
        "_progress_at",
        "_synced",
        "_timer",
        "_timer_at",
        "_transport",
        "_waiter",
        "_whole",
        "bytes_seen",
        "complete",
        "headers",
        "idle",
        "length",
        "lost",
        "reusable",
        "status",
    )  # fmt: skip

    def __init__(self, client: Client, loop: asyncio.AbstractEventLoop) -> None:
        self._client = client
        self._loop = loop
        self._parser = HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._progress_at = 0.0
        self._deadline = math.inf
        self._data: Callable[[bytes], None] | None = None
        self._done: Callable[[EngineError | None], None] | None = None
        self._whole: Callable[[bytes], None] | None = None
        self.idle = self.lost = self._paused = False
        self._reset()

    def _reset(self) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.length: int | None = None
        self.complete = self.reusable = self.bytes_seen = self._headers_over = self._framed = False
        self._chunk_over = self._synced = False
        self._head_size = 0
        self._early: list[bytes] = []
        self._error: EngineError | None = None

    # -- one exchange -------------------------------------------------------------------------------------------

    async def exchange(self, message: bytes | None, head: bytes, body: bytes, deadline: float) -> None:
        """Write the request and wait for the head and the first body bytes, or the end. Raises EngineError."""
        if self.lost:
            raise EngineError("reset", "the engine closed the connection", before_bytes=True)
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
        try:
            await waiter
        except BaseException:
            self.abort()
            raise
        finally:
            self._waiter = None
            self._deadline = math.inf

    def _first(self) -> None:
        """Head and first bytes are here: wake the sender, once."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            self._arm(self._progress_at + self._client.settings.stall_timeout)
            waiter.set_result(None)

    def _fail(self, kind: Kind, message: str) -> None:
        """The exchange is over, badly: tell whoever waits, and close."""
        if self.complete or self._error is not None:
            return
        error = self._error = EngineError(kind, message, before_bytes=not self.bytes_seen)
        self.reusable = False
        waiter, done = self._waiter, self._done
        if waiter is not None and not waiter.done():
            waiter.set_exception(error)
        elif done is not None:
            self._data = self._done = self._whole = None
            done(error)
        self.abort()

    # -- asyncio's side -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self.idle or self.complete:
            # Nothing is owed to us: whatever this is, the framing of this connection cannot be trusted any more.
            self.reusable = False
            self.abort()
            return
        self._progress_at = self._loop.time()
        if self._synced:
            # The usual read of a stream is one whole chunk, and needs no parser: the bytes can go on as they are.
            line = data.find(b"\r\n", 1, 9)
            size = len(data) - line - 4
            if size and data[:line] == b"%x" % size and data[-2:] == b"\r\n" and self._whole is not None:
                self._whole(data)
                return
        self.bytes_seen = True
        if not self._headers_over:
            self._head_size += len(data)
        try:
            self._parser.feed_data(data)
        except HttpParserCallbackError:  # a bug of whoever takes the bytes, not of the engine
            self.abort()
            raise
        except HttpParserError as error:
            if self.complete:  # bytes after the end of the answer
                self.reusable = False
                self.abort()
            else:
                self._fail("garbage", f"the engine's answer is not HTTP: {error}")
            return
        # A chunk's end was the last thing read, and no begun size line follows it: that would have no line end yet.
        self._synced = self._chunk_over and data[-1:] == b"\n"
        if not self._headers_over and self._head_size > self._client.settings.max_head:
            self._fail("garbage", f"the head of the engine's answer is over {self._client.settings.max_head} bytes")

    def eof_received(self) -> bool:
        if self._headers_over and not self._framed and not self.complete:
            self._finish()  # a body that ends with the connection
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.idle:
            self._client._forget(self)
        elif not self.complete:
            kind: Kind = "truncated" if self._headers_over else "reset"
            where = "in the middle of its answer" if self._headers_over else "before answering"
            self._fail(kind, f"the engine closed the connection {where}")

    # -- httptools' side ----------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self.status < 200:
            return
        self._headers_over = True
        length = self.headers.get(b"content-length")
        self.length = int(length) if length is not None else None
        self._chunk_over = b"transfer-encoding" in self.headers
        self._framed = length is not None or self._chunk_over or self.status in (204, 304)

    def on_chunk_header(self) -> None:
        self._chunk_over = False

    def on_chunk_complete(self) -> None:
        self._chunk_over = True

    def on_body(self, data: bytes) -> None:
        sink = self._data
        if sink is not None:
            sink(data)
        else:
            self._early.append(data)
            self._first()

    def on_message_complete(self) -> None:
        if self.status < 200:  # 100 Continue, 103 Early Hints: the answer is still to come
            self.headers = {}
            return
        self._finish()

    def _finish(self) -> None:
        if self._error is not None:
            return
        self.complete = True
        self.reusable = self._framed and self._parser.should_keep_alive()
        done = self._done
        if done is not None:
            self._data = self._done = self._whole = None
            done(None)
        else:
            self._first()

    # -- for the reply ------------------------------------------------------------------------------------------

    def relay(
        self,
        data: Callable[[bytes], None],
        done: Callable[[EngineError | None], None],
        whole: Callable[[bytes], None] | None,
    ) -> None:
        early, self._early = self._early, []
        for piece in early:
            data(piece)
        if self.complete or self._error is not None:
            done(self._error)
        else:
            self._data, self._done, self._whole = data, done, whole

    def pause(self) -> None:
        if not self._paused and not self.lost:
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._paused and not self.lost:
            self._paused = False
            self._progress_at = self._loop.time()
            self._transport.resume_reading()

    def leave(self) -> None:
        """The reply is closed: keep the connection if its answer is whole, else close it."""
        self._data = self._done = self._whole = None
        if not self.complete:
            self.reusable = False
        self._client._returned(self)

    def rest(self) -> None:
        """Into the pool."""
        self.resume()
        self._reset()
        self.idle = True
        self._progress_at = self._loop.time()
        self._arm(self._progress_at + self._client.settings.idle_for)

    def abort(self) -> None:
        self.reusable = False
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
        now, settings = self._loop.time() + 0.002, self._client.settings
        if self.idle:
            at = self._progress_at + settings.idle_for
            if at <= now:
                self._client._forget(self)
                self.abort()
                return
        elif self.complete or self._error is not None:
            return
        elif self._waiter is not None:
            at = self._deadline
            if at <= now:
                self._fail("timeout", "the engine did not begin its answer in time")
                return
        else:
            at = math.inf if self._paused else self._progress_at + settings.stall_timeout
            if at <= now:
                self._fail("stall", f"the engine sent nothing for {settings.stall_timeout:g} s")
                return
            at = min(at, now + settings.stall_timeout)
        self._arm(at)


class Reply:
    """An engine's answer: its head and first bytes are here. `close` it, whatever happens."""

    __slots__ = ("_closed", "_connection", "headers", "length", "status")

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection
        self._closed = False
        self.status = connection.status
        self.headers = connection.headers
        self.length = connection.length

    @property
    def complete(self) -> bool:
        """The whole body is here."""
        return self._connection.complete

    def relay(
        self,
        data: Callable[[bytes], None],
        done: Callable[[EngineError | None], None],
        whole: Callable[[bytes], None] | None = None,
    ) -> None:
        """Hand over the body: what is here at once, the rest from the socket's own callback. `done` runs once.

        A read that is exactly one chunk goes to `whole`, if given, with its framing; every other to `data`, without.
        """
        self._connection.relay(data, done, whole)

    def pause(self) -> None:
        """Stop reading the engine: whoever takes the bytes cannot take more."""
        self._connection.pause()

    def resume(self) -> None:
        self._connection.resume()

    async def read(self, limit: int) -> bytes:
        """The whole body, at most `limit` bytes. Raises EngineError."""
        loop = asyncio.get_running_loop()
        over: asyncio.Future[None] = loop.create_future()
        parts: list[bytes] = []
        size = 0

        def data(piece: bytes) -> None:
            nonlocal size
            size += len(piece)
            if size <= limit:
                parts.append(piece)
            elif not over.done():
                over.set_exception(EngineError("garbage", f"the answer is over {limit} bytes"))

        def done(error: EngineError | None) -> None:
            if not over.done():
                if error is None:
                    over.set_result(None)
                else:
                    over.set_exception(error)

        self.relay(data, done)
        await over
        return b"".join(parts)

    def close(self) -> None:
        """Idempotent. A whole answer's connection goes back to the pool; any other is closed, and vLLM aborts."""
        if not self._closed:
            self._closed = True
            self._connection.leave()
