"""The answer to one request. Every method is synchronous; nothing waits.

Framing is decided here and nowhere else: Content-Length where the length is known, else chunked, or in HTTP/1.0 the
end of the connection. An answer that does not keep its announced length is aborted, never padded or cut in silence.
After the end, the abort, or the client's leaving, everything written is dropped.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Final, Protocol

from gateway.native.loan import plain_socket
from gateway.relay.wire.messages import Request, status_line

_CHUNKS, _COUNTED, _UNTIL_CLOSE, _NONE = range(4)
_NO_LENGTH: Final = frozenset({204, 304})  # answers without a body, whatever is written
_JOINED: Final = 16 * 1024  # up to here copying a body behind its head costs less than a second buffer to write


class Owner(Protocol):
    """Connection, as its responder sees it."""

    @property
    def write_paused(self) -> bool: ...
    def keeps_alive(self, request: Request) -> bool: ...
    def leave_by(self, at: float) -> bool:
        """Whether it tells the responder `deadline` at this time of the loop, if the answer is not over by then."""

    def answered(self, close: bool) -> None: ...
    def abandoned(self) -> None: ...


class Responder:
    """Answers one request: `send`, or `start`, `write`..., `end`.

    `closed`: the client is gone, or the answer is complete or aborted. `started`: a part of the answer was sent.
    `lines`: preformatted header lines that the answer carries whoever gives it and however it ends; set before.
    `by`: time of the loop when who answers has to leave.
    """

    __slots__ = ("_close", "_framing", "_gone", "_left", "_owner", "_pause", "_reason", "_request", "_resume",
                 "_timer", "_transport", "by", "closed", "lines", "started")  # fmt: skip

    def __init__(self, owner: Owner, transport: asyncio.Transport, request: Request) -> None:
        self._owner: Owner | None = owner
        self._transport = transport
        self._request = request
        self._framing = _NONE
        self._left = 0  # bytes of an announced length not yet written
        self._close = False
        self._gone: Callable[[str], None] | None = None
        self._pause: Callable[[], None] | None = None
        self._resume: Callable[[], None] | None = None
        self._reason = ""
        self._timer: asyncio.TimerHandle | None = None  # where its owner has none
        self.by = math.inf
        self.closed = False
        self.started = False
        self.lines = b""

    # -- for whoever answers

    def watch(self, gone: Callable[[str], None]) -> None:
        """`gone` is called at most once, with `client_gone`, `slow_client`, `deadline` or `drain`, if the client leaves
        (or its time is over, or the server is about to close) before the answer is complete. If it has left already:
        now. After `deadline` and `drain` the client is still there, and the answer may be ended properly."""
        if self._reason:
            gone(self._reason)
        elif not self.closed:
            self._gone = gone

    def leave_by(self, at: float) -> None:
        """Have `gone` called at this time of the loop, with `deadline`."""
        if self._owner is not None:
            self.by = at
            if not self._owner.leave_by(at):
                self._timer = asyncio.get_running_loop().call_at(at, self.warned, "deadline")

    def flow(self, pause: Callable[[], None], resume: Callable[[], None]) -> None:
        """Backpressure: `pause` when the unsent bytes pass the high-water mark, `resume` when half of it is sent."""
        if self._owner is not None:
            self._pause = pause
            self._resume = resume
            if self._owner.write_paused:
                pause()

    def send(self, status: int, headers: bytes, body: bytes) -> None:
        """A whole answer. `headers` are preformatted lines, without those of framing and connection."""
        if self.closed:
            return
        head = self._head(status, headers, len(body))
        if self._framing == _NONE:
            self._transport.write(head)
        elif len(body) <= _JOINED:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)
        self._finish()

    def start(self, status: int, headers: bytes, length: int | None = None) -> None:
        """Begin a streamed answer of `length` bytes, or of unknown length."""
        if not self.closed:
            self._transport.write(self._head(status, headers, length))

    def write(self, data: bytes) -> None:
        """Body bytes; framing is added here."""
        if self.closed or not data:
            return
        if self._framing == _CHUNKS:
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        elif self._framing == _COUNTED:
            self._left -= len(data)
            if self._left < 0:
                self.abort()
            else:
                self._transport.write(data)
        elif self._framing == _UNTIL_CLOSE:
            self._transport.write(data)

    def write_chunk(self, chunk: bytes) -> None:
        """Write one whole chunk as an engine sent it, framed already (size line, data, CRLF)."""
        if self._framing == _CHUNKS and not self.closed:
            self._transport.write(chunk)
        else:
            self.write(chunk[chunk.index(b"\r\n") + 2 : -2])

    def end(self, *, close: bool = False) -> None:
        """The body is complete; one that is shorter than announced is aborted instead. `close`: no request follows."""
        if self.closed:
            return
        self._close = self._close or close
        if not self.started:
            raise RuntimeError("answer was ended before it was started")
        if self._framing == _CHUNKS:
            self._transport.write(b"0\r\n\r\n")
        elif self._framing == _COUNTED and self._left:
            self.abort()
            return
        self._finish()

    def abort(self) -> None:
        """Reset the connection: the client must not take what it has for a whole answer."""
        if self.closed:
            return
        owner = self._release()
        owner.abandoned()

    # -- for the pump: see Loan

    def bare_socket(self) -> int | None:
        """See ClientSide."""
        if self.closed or self._framing != _CHUNKS or self._transport.is_closing():
            return None
        return plain_socket(self._transport)

    def write_rest(self, data: bytes) -> None:
        """See ClientSide."""
        if not self.closed:
            self._transport.write(data)

    # -- for the connection

    def paused(self) -> None:
        if self._pause is not None:
            self._pause()

    def resumed(self) -> None:
        if self._resume is not None:
            self._resume()

    def left(self, reason: str) -> None:
        """The client is gone, or is about to be cut off."""
        gone = self._gone
        self._reason = reason
        self._release()
        if gone is not None:
            gone(reason)

    def warned(self, reason: str) -> None:
        """The server is about to close, or the answer's time is over; the client is still there."""
        gone, self._gone = self._gone, None
        self.by = math.inf
        self._reason = reason
        if gone is not None:
            gone(reason)

    # -- inside

    def _head(self, status: int, headers: bytes, length: int | None) -> bytes:
        if self.started or self._owner is None:
            raise RuntimeError("answer was started twice")
        self.started = True
        request = self._request
        keep = self._owner.keeps_alive(request)
        if status in _NO_LENGTH or request.method == b"HEAD":
            framing = _NONE
        elif length is not None:
            framing = _COUNTED
            self._left = length
        elif request.minor:
            framing = _CHUNKS
        else:
            framing = _UNTIL_CLOSE
            keep = False
        self._framing = framing
        self._close = not keep
        if status in _NO_LENGTH:
            size = b""
        elif length is not None:
            size = b"content-length: %d\r\n" % length
        else:
            size = b"transfer-encoding: chunked\r\n" if request.minor else b""
        connection = b"" if request.minor else b"connection: keep-alive\r\n"
        if not keep:
            connection = b"connection: close\r\n"
        return b"".join((status_line(status), headers, self.lines, size, connection, b"\r\n"))

    def _finish(self) -> None:
        close = self._close
        self._release().answered(close)

    def _release(self) -> Owner:
        """Let go of everything, so that an answer kept by its maker keeps nothing else alive."""
        owner = self._owner
        if owner is None:
            raise RuntimeError("answer is already complete")
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._owner = self._gone = self._pause = self._resume = None
        return owner
