"""Reader of one connection's requests: bytes in, requests to the handler, and the end of each answer back.

Requests are served one at a time. Bytes that follow the request being answered are kept unparsed, up to a bound. All
that is held of a request or of what follows is counted. `connection.py` has the socket and the timer, `states.py` the
states, which both share.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Final

from gateway.core.request.body_memory import SMALL, BodyLease
from gateway.relay.wire.body import PendingBody
from gateway.relay.wire.http1 import HeadReader
from gateway.relay.wire.messages import CHUNKED, HTTP_1_1_REQUIRED, PREFACE, Request, WireError, leased
from gateway.relay.wire.responder import Responder
from gateway.relay.wire.shared import Shared
from gateway.relay.wire.states import ANSWER, BODY, HEAD, after

if TYPE_CHECKING:
    from gateway.relay.wire.connection import ClientConnection

_WAITS, _CALLS, _ANSWERED = after("wait"), after("call"), after("answer")
_CR: Final = ord("\r")
_BLANK: Final = (b"", b"\r\n")  # a buffer that holds nothing of a request: old clients end a body with an empty line
_PATH_WITHIN: Final = 256  # bytes of a head
TIMER_SLACK: Final = 0.002  # seconds; the loop's clock counts milliseconds


class RequestReader:
    """Reader of a connection's requests, and owner of the responder whose answer is pending."""

    __slots__ = ("_body", "_buffer", "_burst", "_head", "_held", "_last", "_loop", "_request",
                 "_running", "_scanned", "_shared", "_socket", "responder")  # fmt: skip

    def __init__(self, socket: ClientConnection, shared: Shared, loop: asyncio.AbstractEventLoop) -> None:
        self._socket = socket
        self._shared = shared
        self._loop = loop
        self._head: HeadReader | None = None
        self._buffer: bytes | bytearray = b""  # not yet consumed: an incomplete head, or what follows a request
        self._scanned = 0  # how much of the buffer is known not to end a head
        self._request: Request | None = None  # whose body is being read
        self._body: PendingBody | None = None
        self._held: BodyLease | None = None  # what is counted of a buffer that has grown
        self.responder: Responder | None = None  # whose answer is pending
        self._running = False  # inside _consume: it goes on by itself after an answer
        self._last = False  # no request after the current one is served
        self._burst = 0  # requests served since the buffer was last empty

    # -- for the connection

    def received(self, data: bytes) -> None:
        """Take bytes as they come."""
        state = self._socket.state
        if state == HEAD:
            held = self._buffer
            if held in _BLANK:
                self._socket.since = self._loop.time()
                self._burst = 0
            self._consume(_joined(held, data) if held else data)
        elif state == BODY:
            self._socket.since = self._loop.time()
            self._consume(data)
        elif state == ANSWER and not self._last:
            self._hold(_joined(self._buffer, data))

    def leave(self, reason: str) -> None:
        """Tell whoever answers that the client is gone, or is cut off."""
        responder, self.responder = self.responder, None
        if responder is not None:
            responder.left(reason)

    def drop(self) -> None:
        """Hold nothing any more. The body that is being read, if any, will not be whole."""
        self._buffer = b""
        request, self._request, self._body = self._request, None, None
        if request is not None:
            if request.sink is not None:
                request.sink.lost()
            request.release()
        self._release()

    @property
    def blank(self) -> bool:
        """Whether nothing of a request is held."""
        return self._buffer in _BLANK

    @property
    def deadline(self) -> float:
        """Loop time when the wait of the current state ends; infinity if the state has no limit."""
        socket, settings = self._socket, self._shared.settings
        if socket.state == HEAD:
            idle = self.blank and not self._shared.is_stranger(socket)
            return socket.since + (settings.keep_alive if idle else settings.headers_timeout)
        if self._body is not None and socket.state == BODY:
            return min(socket.since + settings.body_timeout, self._body.by)
        return math.inf if self.responder is None else self.responder.by

    def waits(self, now: float) -> bool:
        """Whether bytes that lie unread in the socket may still be in time."""
        return self._socket.state == HEAD or (self._body is not None and now < self._body.by)

    def expired(self) -> bool:
        """The deadline has passed: warn or refuse. False: nothing was asked."""
        state = self._socket.state
        if self.responder is not None:
            self.responder.warned("deadline")
        elif state == BODY:
            self._refuse(self._late())
        elif state == HEAD and not self.blank:
            self._refuse(WireError(408, f"headers were not complete in {self._shared.settings.headers_timeout:g} s"))
        else:
            return False
        return True

    # -- reading

    def _consume(self, data: bytes | bytearray) -> None:
        """Serve what is in `data`, the buffer's bytes among it; keep what cannot be served yet."""
        self._buffer = b""
        self._running = True
        socket = self._socket
        try:
            while data:
                if socket.state == HEAD:
                    rest = self._read_head(data)
                    if rest is None:
                        break
                    data = rest
                elif socket.state == BODY:
                    data = self._read_body(bytes(data))
                else:
                    break
        except WireError as error:
            self._refuse(error, HTTP_1_1_REQUIRED if data.startswith(PREFACE) else None, _path(data))
        except BaseException:  # a bug of the handler's: the client must not wait for an answer that never comes
            self.leave("client_gone")
            socket.reset()
            raise
        finally:
            self._running = False
        if socket.state == ANSWER and data:
            self._hold(data)
        elif socket.state == HEAD:
            self._buffer = data

    def _read_head(self, data: bytes | bytearray) -> bytes | None:
        """Read one head, and its body if that is here too. Returns what is left, None if the head is incomplete."""
        start = 2 if data[0] == _CR and data.startswith(b"\r\n") else 0  # see _BLANK
        end = data.find(b"\r\n\r\n", max(start, self._scanned - 3) if self._scanned else start)
        shared, socket = self._shared, self._socket
        head = self._head
        if head is None:
            head = self._head = HeadReader(shared.settings, shared.heads)
        if end < 0:
            self._keep_part(head, data, start)
            return None
        self._scanned = 0
        end += 4
        data = bytes(data)
        if self._held is not None:
            self._release()
        request = head.read(data[start:end])
        request.peer = socket.peer
        request.at = socket.since
        self._burst += 1
        if self._burst > shared.settings.max_pipelined:
            self._last = True
        refused = shared.handler.head(request)
        if request.known:
            shared.knows(socket)
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
            socket.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body_end = end + length
        if length != CHUNKED and len(data) >= body_end and request.sink is None:
            if length > SMALL:
                request.held = leased(None, shared.bodies, request.owner or request.peer, length)
            request.body = body = data[end:body_end]
            head.skip(body)
            self._request = None
            self._call(request)
            return data[body_end:]
        self._await_body(request, head)
        return data[end:]

    def _keep_part(self, head: HeadReader, data: bytes | bytearray, start: int) -> None:
        """Check and count a part of a head, and limit the time for the rest. Raises WireError."""
        if len(data) > start and data != b"\r":
            head.check_part(data[start:] if start else data, max(0, self._scanned - start))
        self._scanned = len(data)
        if len(data) > SMALL or self._held is not None:
            self._count(len(data))
        self._socket.arm(self._socket.since + self._shared.settings.headers_timeout)

    def _await_body(self, request: Request, head: HeadReader) -> None:
        shared, settings, socket = self._shared, self._shared.settings, self._socket
        socket.state = _WAITS[socket.state]
        if request.sink is not None:
            request.sink.flow(self._pause_reading, self._go_on_reading)
        by = min(request.at + settings.body_total, shared.handler.body_by(request))
        self._body = PendingBody(request, head, settings, shared.bodies, by)
        socket.arm(min(socket.since + settings.body_timeout, by))

    def _read_body(self, data: bytes) -> bytes:
        body = self._body
        if body is None:
            raise RuntimeError("no body is being read")
        rest = body.feed(data)
        if rest is None:
            return b""
        self._request = self._body = None
        self._call(body.request)
        return rest

    def _call(self, request: Request) -> None:
        socket = self._socket
        socket.state = _CALLS[socket.state]
        self.responder = responder = Responder(self, socket.transport, request)
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
                self._count(size)
            self._last = self._last or size > self._shared.settings.max_pipelined_bytes
        except WireError:
            self._last = True
        if self._last:
            self._release()
            data = b""
        self._buffer = data

    def _count(self, size: int) -> None:
        """Count so many bytes as held here, in all. Raises WireError where there is no room for them."""
        self._held = leased(self._held, self._shared.bodies, self._socket.peer, size)

    def _release(self) -> None:
        if self._held is not None:
            self._held.release()
            self._held = None

    def _pause_reading(self) -> None:
        if not self._socket.transport.is_closing():
            self._socket.transport.pause_reading()

    def _go_on_reading(self) -> None:
        if not self._socket.transport.is_closing():
            self._socket.since = self._loop.time()
            self._socket.transport.resume_reading()

    def _resume_reading(self) -> None:
        if self._socket.state == HEAD and self._buffer:
            self._consume(self._buffer)

    def _late(self) -> WireError:
        """Error that ends the wait for a body."""
        now, settings = self._loop.time() + TIMER_SLACK, self._shared.settings
        if self._socket.since + settings.body_timeout <= now:
            return WireError(408, f"no byte of the body came for {settings.body_timeout:g} s")
        if self._request is not None and self._request.at + settings.body_total <= now:
            return WireError(408, f"the body was not complete in {settings.body_total:g} s")
        return WireError(504, "The deadline passed before the request's body was complete.")

    # -- answering: see Owner

    @property
    def write_paused(self) -> bool:
        """Whether what is written waits for the client."""
        return self._socket.write_paused

    def keeps_alive(self, request: Request) -> bool:
        """Whether another request may follow this one, as far as is known now."""
        return request.keep_alive and not self._last and not self._shared.draining

    def leave_by(self, at: float) -> bool:
        """See Owner."""
        self._socket.arm(at)
        return True

    def answered(self, close: bool) -> None:
        """End the pending answer, which is complete. `close`: the connection ends, and the client knows or must see
        it."""
        self.responder = None
        socket, shared = self._socket, self._shared
        if close or self._last or (shared.draining and not shared.gently):
            socket.close(unread=self._last or bool(self._buffer))
            return
        socket.state = _ANSWERED[socket.state]
        socket.since = since = self._loop.time()
        socket.arm(since + shared.settings.keep_alive)
        if self._buffer and not self._running:
            self._loop.call_soon(self._resume_reading)

    def abandoned(self) -> None:
        """The pending answer cannot be finished: the client must see it as broken."""
        self.responder = None
        self._socket.reset()

    def _answer_unread(self, request: Request, message: bytes) -> None:
        """A finished answer of the handler, given before the body was read."""
        head, _, body = message.partition(b"\r\n\r\n")
        told = b"\r\nconnection: close" in head.lower()
        close = told or request.length != 0 or request.minor == 0 or not self.keeps_alive(request)
        if close and not told:
            head += b"\r\nconnection: close"
        self._socket.transport.write(head + b"\r\n\r\n" + (b"" if request.method == b"HEAD" else body))
        if close:
            self._socket.close(unread=request.length != 0 or self._last)

    def _refuse(self, error: WireError, told: bytes | None = None, path: bytes = b"") -> None:
        """Refuse the request that is being read. `path`: as a head that is no good names it."""
        self._socket.refuse(error, told, path if self._request is None else self._request.path)


def _joined(held: bytes | bytearray, data: bytes) -> bytearray:
    """Join both into one buffer. The work does not grow with the size of `held`, however small the pieces are."""
    joined = held if isinstance(held, bytearray) else bytearray(held)
    joined += data
    return joined


def _path(data: bytes | bytearray) -> bytes:
    """The path in the first line of a head; it only tells the shape of a refusal."""
    _, _, rest = bytes(data[:_PATH_WITHIN]).lstrip(b"\r\n").partition(b" ")
    return rest.partition(b" ")[0].partition(b"?")[0]
