"""Client connection: bytes in, requests to the handler, answers out in order. `states.py` has its states.

A connection serves its requests one at a time. The socket is read while an answer is pending, so that a client that
leaves is seen at once, even behind trailing bytes. Those bytes are kept unparsed, up to a bound. A FIN means that the
client leaves; half-close is not supported. Every wire error ends the connection, after the client has had `linger`
seconds to finish sending and read the answer.

Each connection has one timer, armed lazily: progress only stores a time, and the timer compares when it fires. The
timer moves only towards an earlier deadline. Requests that arrive whole, one after another, leave the timer as it is. A
request in pieces moves it, and so does the end of an answer for which the timer had moved on to the call's deadline.
"""

from __future__ import annotations

import asyncio
import math
import socket
import struct
from collections.abc import Callable
from typing import Final, cast

from gateway.core.request.body_memory import SMALL, BodyLease
from gateway.relay.wire.body import ChunkedBody, CountedBody
from gateway.relay.wire.http1 import HeadReader
from gateway.relay.wire.messages import (
    CHUNKED,
    HTTP_1_1_REQUIRED,
    PREFACE,
    Request,
    ServerSettings,
    WireError,
    leased,
    refusal,
)
from gateway.relay.wire.responder import Responder
from gateway.relay.wire.shared import Shared
from gateway.relay.wire.states import ANSWER, BODY, HEAD, LINGER, NAMES, after
from gateway.relay.wire.taken import taken
from gateway.shared.strangers import UNIX
from gateway.upstream.unread import LOOK, unread

DROPPED_AT_ONCE = 256 * 1024  # bytes after a refusal that are read and dropped before a pause
DROP_PAUSE = 0.02  # seconds; so 12 MiB a second at most, and 24 MiB in the usual time
_WAITS, _CALLS, _ANSWERED = after("wait"), after("call"), after("answer")
_REFUSES, _CLOSES, _RESETS, _LOST = after("refuse"), after("close"), after("reset"), after("lost")

_CR: Final = ord("\r")
_BLANK: Final = (b"", b"\r\n")  # a buffer that holds nothing of a request: old clients end a body with an empty line
_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)
_PATH_WITHIN: Final = 256  # bytes of a head
_TIMER_SLACK: Final = 0.002  # the loop's clock counts milliseconds
_STALLS: Final = 20  # times write_stall in which a slow client has to take a buffer of the high-water mark


class ClientConnection(asyncio.Protocol):
    """The protocol of one accepted socket. `before` is called when it is connected, and may say why it is refused: it
    ends a handshake, whose seat the connection takes."""

    __slots__ = ("_before", "_body", "_body_by", "_buffer", "_burst", "_dropped", "_held", "_last", "_loop",
                 "_owed_since", "_owed_taken", "_reader", "_request", "_responder", "_running", "_scanned", "_seated",
                 "_shared", "_since", "_stall_at", "_stall_taken", "_state", "_timer", "_timer_at", "_transport",
                 "peer", "write_paused")  # fmt: skip

    def __init__(self, shared: Shared, before: Callable[[], WireError | None] | None = None) -> None:
        self._shared = shared
        self._before = before
        self._seated = False
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)  # set before anything else happens
        self.peer = ""
        self._state = HEAD
        self._reader: HeadReader | None = None
        self._buffer: bytes | bytearray = b""  # not yet consumed: an incomplete head, or what follows a request
        self._scanned = 0  # how much of the buffer is known not to end a head
        self._dropped = 0  # bytes since the last pause, after a refusal
        self._request: Request | None = None  # whose body is being read
        self._body: ChunkedBody | CountedBody | None = None
        self._body_by = math.inf  # when it is of no use any more
        self._held: BodyLease | None = None  # what is counted of the body, or of a buffer that has grown
        self._responder: Responder | None = None  # whose answer is pending
        self._running = False  # inside _consume: it goes on by itself after an answer
        self._last = False  # no request after the current one is served
        self._burst = 0  # requests served since the buffer was last empty
        self._since = 0.0  # last progress of what the state waits for
        self.write_paused = False
        self._stall_at = math.inf  # when a client that does not take what is written is looked at again
        self._stall_taken = self._owed_taken = 0  # what it had taken at the last look; when it began to owe a buffer
        self._owed_since = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0

    def __repr__(self) -> str:
        return f"<Connection from {self.peer}: {NAMES[self._state]}, {len(self._buffer)} bytes held>"

    # -- the transport's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        shared = self._shared
        settings = shared.settings
        address = transport.get_extra_info("peername")
        self.peer = address[0] if isinstance(address, tuple) else UNIX
        refused = None if self._before is None else self._before()
        full = refused or shared.full_for(self.peer)
        self._seated = full is None
        shared.joins(self, seated=self._seated)
        self._since = self._loop.time()
        if len(shared.open) - shared.seats > settings.refused_at_once:
            self._reset()
        elif shared.draining and not shared.gently:
            self._close()
        elif full is not None:
            self._refuse(full)
        else:
            high = settings.write_high_water
            self._transport.set_write_buffer_limits(high, high // 2)
            self._arm(self._deadline())

    def connection_lost(self, exc: Exception | None) -> None:
        self._state = _LOST[self._state]
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._drop_body()
        self._reader = None
        self._buffer = b""
        self._release()
        self._shared.leaves(self, seated=self._seated)
        self._leave("client_gone")

    def eof_received(self) -> bool:
        if self._state == ANSWER:
            self._leave("client_gone")
            self._state = _LOST[self._state]
            self._transport.abort()
        elif self._state in (HEAD, BODY):
            self._close()  # a complete answer may still be on its way out
        return False

    def data_received(self, data: bytes) -> None:
        state = self._state
        if state == HEAD:
            held = self._buffer
            if held in _BLANK:
                self._since = self._loop.time()
                self._burst = 0
            self._consume(_joined(held, data) if held else data)
        elif state == BODY:
            self._since = self._loop.time()
            self._consume(data)
        elif state == ANSWER and not self._last:
            self._hold(_joined(self._buffer, data))
        elif state == LINGER:
            self._drop(len(data))

    def _drop(self, size: int) -> None:
        """Drop what is read after a refusal, slowly: a body that nobody wants may not keep others waiting."""
        self._dropped += size
        if self._dropped >= DROPPED_AT_ONCE:
            self._dropped = 0
            self._transport.pause_reading()
            self._loop.call_later(DROP_PAUSE, self._drop_on)

    def _drop_on(self) -> None:
        if self._state == LINGER and not self._transport.is_closing():
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        self.write_paused = True
        self._expect_reading()
        if self._responder is not None:
            self._responder.paused()

    def resume_writing(self) -> None:
        self.write_paused = False
        self._stall_at = math.inf
        if self._responder is not None:
            self._responder.resumed()

    # -- reading requests

    def _consume(self, data: bytes | bytearray) -> None:
        """Serve what is in `data`, the buffer's bytes among it; keep what cannot be served yet."""
        self._buffer = b""
        self._running = True
        try:
            while data:
                if self._state == HEAD:
                    rest = self._read_head(data)
                    if rest is None:
                        break
                    data = rest
                elif self._state == BODY:
                    data = self._read_body(bytes(data))
                else:
                    break
        except WireError as error:
            self._refuse(error, HTTP_1_1_REQUIRED if data.startswith(PREFACE) else None, _path(data))
        except BaseException:  # a bug of the handler's: the client must not wait for an answer that never comes
            self._cut_off("client_gone")
            raise
        finally:
            self._running = False
        if self._state == ANSWER and data:
            self._hold(data)
        elif self._state == HEAD:
            self._buffer = data

    def _read_head(self, data: bytes | bytearray) -> bytes | None:
        """Read one head, and its body if that is here too. Returns what is left, None if the head is incomplete."""
        start = 2 if data[0] == _CR and data.startswith(b"\r\n") else 0  # see _BLANK
        end = data.find(b"\r\n\r\n", max(start, self._scanned - 3) if self._scanned else start)
        reader = self._reader
        if reader is None:
            reader = self._reader = HeadReader(self._shared.settings, self._shared.heads)
        if end < 0:
            self._keep_part(reader, data, start)
            return None
        self._scanned = 0
        end += 4
        data = bytes(data)
        if self._held is not None:
            self._release()
        request = reader.read(data[start:end])
        request.peer = self.peer
        request.at = self._since
        shared = self._shared
        self._burst += 1
        if self._burst > shared.settings.max_pipelined:
            self._last = True
        refused = shared.handler.head(request)
        if request.known:
            shared.knows(self)
        if refused is not None:
            self._answer_unread(request, refused)
            return data[end:]
        length = request.length
        if length == 0:
            self._call(request)
            return data[end:]
        self._request = request  # its path tells the shape of a refusal
        if length > request.limit:
            raise WireError(413, f"body of {length} bytes is over the limit of {request.limit}")
        if request.expects:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body_end = end + length
        if length != CHUNKED and len(data) >= body_end and request.sink is None:
            if length > SMALL:
                self._count(length, request.owner or self.peer)
            request.body = body = data[end:body_end]
            reader.skip(body)
            self._request = None
            self._call(request)
            return data[body_end:]
        self._await_body(request)
        return data[end:]

    def _keep_part(self, reader: HeadReader, data: bytes | bytearray, start: int) -> None:
        """Check and count a part of a head, and limit the time for the rest. Raises WireError."""
        if len(data) > start and data != b"\r":
            reader.check_part(data[start:] if start else data, max(0, self._scanned - start))
        self._scanned = len(data)
        if len(data) > SMALL or self._held is not None:
            self._count(len(data), self.peer)
        self._arm(self._since + self._shared.settings.headers_timeout)

    def _await_body(self, request: Request) -> None:
        shared, settings = self._shared, self._shared.settings
        self._state = _WAITS[self._state]
        sink = request.sink
        if sink is not None:
            sink.flow(self._pause_reading, self._go_on_reading)
        if request.length == CHUNKED:
            self._body = ChunkedBody(
                settings, request.limit if sink is not None else min(request.limit, settings.max_body)
            )
        else:
            self._body = CountedBody(request.length)
        self._body_by = min(request.at + settings.body_total, shared.handler.body_by(request))
        self._arm(min(self._since + settings.body_timeout, self._body_by))

    def _read_body(self, data: bytes) -> bytes:
        request, body, reader = self._request, self._body, self._reader
        if request is None or body is None or reader is None:
            raise RuntimeError("no body is being read")
        rest = body.feed(data)
        if request.sink is not None:
            piece = bytes(body.data)
            body.data.clear()
            if request.length != CHUNKED:
                reader.skip(piece)
            request.sink.feed(piece)
        elif len(body.data) > SMALL:
            self._count(len(body.data), request.owner or self.peer)
        if rest is None:
            return b""
        request.body = bytes(body.data)
        if request.length != CHUNKED and request.sink is None:
            reader.skip(request.body)
        self._request = self._body = None
        self._call(request)
        return rest

    def _call(self, request: Request) -> None:
        self._state = _CALLS[self._state]
        self._responder = responder = Responder(self, self._transport, request)
        request.held, self._held = self._held, None
        try:
            self._shared.handler.call(request, responder)
        except BaseException:
            request.release()
            raise

    def _hold(self, data: bytes | bytearray) -> None:
        """Keep bytes that follow the request being answered. Too many: this answer is the last."""
        size = len(data)
        try:
            if size > SMALL:
                self._count(size, self.peer)
            self._last = self._last or size > self._shared.settings.max_pipelined_bytes
        except WireError:
            self._last = True
        if self._last:
            self._release()
            data = b""
        self._buffer = data

    def _count(self, size: int, owner: str) -> None:
        """Count so many bytes as held here, in all. Raises WireError where there is no room for them."""
        self._held = leased(self._held, self._shared.bodies, owner, size)

    def _drop_body(self) -> None:
        """The body that is being read, if any, will not be whole."""
        request = self._request
        self._request = self._body = None
        if request is not None and request.sink is not None:
            request.sink.lost()

    def _pause_reading(self) -> None:
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def _go_on_reading(self) -> None:
        if not self._transport.is_closing():
            self._since = self._loop.time()
            self._transport.resume_reading()

    def _release(self) -> None:
        if self._held is not None:
            self._held.release()
            self._held = None

    def _resume_reading(self) -> None:
        if self._state == HEAD and self._buffer:
            self._consume(self._buffer)

    # -- answering

    def keeps_alive(self, request: Request) -> bool:
        """Whether another request may follow this one, as far as is known now."""
        return request.keep_alive and not self._last and not self._shared.draining

    def leave_by(self, at: float) -> bool:
        """See Owner."""
        self._arm(at)
        return True

    def answered(self, close: bool) -> None:
        """End the pending answer, which is complete. `close`: the connection ends, and the client knows or must see
        it."""
        self._responder = None
        if close or self._last or (self._shared.draining and not self._shared.gently):
            self._close(unread=self._last or bool(self._buffer))
            return
        self._state = _ANSWERED[self._state]
        self._since = self._loop.time()
        self._arm(self._since + self._shared.settings.keep_alive)
        if self._buffer and not self._running:
            self._loop.call_soon(self._resume_reading)

    def abandoned(self) -> None:
        """The pending answer cannot be finished: the client must see it as broken."""
        self._responder = None
        self._reset()

    def _answer_unread(self, request: Request, message: bytes) -> None:
        """A finished answer of the handler, given before the body was read."""
        head, _, body = message.partition(b"\r\n\r\n")
        told = b"\r\nconnection: close" in head.lower()
        close = told or request.length != 0 or request.minor == 0 or not self.keeps_alive(request)
        if close and not told:
            head += b"\r\nconnection: close"
        self._transport.write(head + b"\r\n\r\n" + (b"" if request.method == b"HEAD" else body))
        if close:
            self._close(unread=request.length != 0 or self._last)

    def _refuse(self, error: WireError, told: bytes | None = None, path: bytes = b"") -> None:
        """`told`: these bytes in place of an answer, for a client that would not understand one. `path`: as a head that
        is no good names it."""
        refusals = self._shared.refusals
        refusals[error.status] = refusals.get(error.status, 0) + 1
        request = self._request
        self._transport.write(told or refusal(error, path if request is None else request.path))
        self._close(unread=True)

    # -- the end of the connection

    def _close(self, unread: bool = False) -> None:
        """Close once everything is written. `unread`: the client may be sending still; closing on unread bytes would
        reset the connection and take the answer with it, so they are read and dropped for a while."""
        self._buffer = b""
        self._drop_body()
        self._release()
        self._since = self._loop.time()
        settings = self._shared.settings
        if unread:
            self._state = _REFUSES[self._state]
            if self._transport.can_write_eof():
                self._transport.write_eof()
            self._arm(self._since + settings.linger)
        else:
            self._state = _CLOSES[self._state]
            self._transport.close()
            self._expect_reading()

    def _reset(self) -> None:
        """Close at once, with a TCP RST."""
        self._state = _RESETS[self._state]
        self._stall_at = math.inf
        sock = self._transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self._transport.abort()

    def _cut_off(self, reason: str) -> None:
        self._leave(reason)
        self._reset()

    def _leave(self, reason: str) -> None:
        responder = self._responder
        if responder is not None:
            self._responder = None
            responder.left(reason)

    @property
    def idle_since(self) -> float:
        """The loop's time of its last answer, or of its beginning; infinity with a request, or an answer not taken."""
        idle = self._state == HEAD and self._buffer in _BLANK and not self._transport.get_write_buffer_size()
        return self._since if idle else math.inf

    def close_if_idle(self) -> None:
        """A connection without a request has no reason to stay, when draining or where another needs its seat."""
        if self._state == HEAD and self._buffer in _BLANK:
            self._close()

    def warn(self) -> None:
        """Draining is nearly over: tell whoever answers here."""
        if self._responder is not None:
            self._responder.warned("drain")

    def expel(self) -> None:
        """Draining is over."""
        self._cut_off("drain")

    # -- time

    def _arm(self, at: float) -> None:
        """Have `_wake` run at `at` or earlier."""
        if self._timer is not None:
            if self._timer_at <= at:
                return
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._loop.call_at(at, self._wake)

    def _deadline(self) -> float:
        """Loop time when the wait of the current state ends; infinity if the state has no limit."""
        settings = self._shared.settings
        if self._state == HEAD:
            idle = self._buffer in _BLANK and not self._shared.is_stranger(self)
            return self._since + (settings.keep_alive if idle else settings.headers_timeout)
        if self._state == BODY:
            return min(self._since + settings.body_timeout, self._body_by)
        if self._state == LINGER:
            return self._since + settings.linger
        return math.inf if self._responder is None else self._responder.by

    def _wake(self) -> None:
        self._timer = None
        now = self._loop.time() + _TIMER_SLACK
        if self._stall_at <= now:
            self._stalled(now)
        elif self._deadline() <= now and not self._unread(now):
            self._expired()
        at = min(self._deadline(), self._stall_at)
        if at < math.inf:
            self._arm(max(at, now + LOOK))

    def _unread(self, now: float) -> bool:
        """Whether what the state waits for may have come while this process could not read. In vain, if too late, and
        if a body's sink has paused the reading: it is the sink that does not go on."""
        waits = self._state == HEAD or (self._state == BODY and now < self._body_by)
        return waits and self._transport.is_reading() and unread(self._transport)

    def _expired(self) -> None:
        if self._responder is not None:
            self._responder.warned("deadline")
        elif self._state == BODY:
            self._refuse(self._late(self._shared.settings))
        elif self._state == HEAD and self._buffer not in _BLANK:
            limit = self._shared.settings.headers_timeout
            self._refuse(WireError(408, f"headers were not complete in {limit:g} s"))
        elif self._state == HEAD or not self._transport.get_write_buffer_size():
            self._close()
        else:  # lingering, and the answer itself is not taken: from here on it is a slow client
            self._since = math.inf
            self._expect_reading()

    def _expect_reading(self) -> None:
        """Start the limit on reading: a client that does not take what was written is cut off as too slow."""
        self._owed_since = now = self._loop.time()
        self._owed_taken = self._stall_taken = taken(self._transport)
        self._stall_at = now + self._shared.settings.write_stall
        self._arm(self._stall_at)

    def _late(self, settings: ServerSettings) -> WireError:
        """Error that ends the wait for a body."""
        now = self._loop.time() + _TIMER_SLACK
        if self._since + settings.body_timeout <= now:
            return WireError(408, f"no byte of the body came for {settings.body_timeout:g} s")
        if self._request is not None and self._request.at + settings.body_total <= now:
            return WireError(408, f"the body was not complete in {settings.body_total:g} s")
        return WireError(504, "The deadline passed before the request's body was complete.")

    def _stalled(self, now: float) -> None:
        """A client that takes anything is no stalled one; but a whole buffer may not take it for ever."""
        settings = self._shared.settings
        have = taken(self._transport)
        if have != self._stall_taken:
            self._stall_taken = have
            in_time = now - self._owed_since < _STALLS * settings.write_stall
            if not in_time and abs(have - self._owed_taken) >= settings.write_high_water:
                self._owed_since, self._owed_taken, in_time = now, have, True
            if in_time:
                self._stall_at = now + settings.write_stall
                return
        self._cut_off("slow_client")


def _joined(held: bytes | bytearray, data: bytes) -> bytearray:
    """Join both into one buffer. The work does not grow with the size of `held`, however small the pieces are."""
    joined = held if isinstance(held, bytearray) else bytearray(held)
    joined += data
    return joined


def _path(data: bytes | bytearray) -> bytes:
    """The path in the first line of a head; it only tells the shape of a refusal."""
    _, _, rest = bytes(data[:_PATH_WITHIN]).lstrip(b"\r\n").partition(b" ")
    return rest.partition(b" ")[0].partition(b"?")[0]
