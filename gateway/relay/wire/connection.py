"""Client connection: a socket, its seat, its timer and its end. `request_reader.py` reads the requests.

The socket is read while an answer is pending, so that a client that leaves is seen at once, even behind trailing bytes.
A FIN means that the client leaves; half-close is not supported. Every wire error ends the connection, after the client
has had `linger` seconds to finish sending and read the answer.

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

from gateway.relay.wire.messages import WireError, refusal
from gateway.relay.wire.request_reader import TIMER_SLACK, RequestReader
from gateway.relay.wire.shared import Shared
from gateway.relay.wire.states import ANSWER, BODY, HEAD, LINGER, NAMES, after
from gateway.relay.wire.taken import taken
from gateway.shared.strangers import UNIX
from gateway.upstream.unread import LOOK, unread

DROPPED_AT_ONCE = 256 * 1024  # bytes after a refusal that are read and dropped before a pause
DROP_PAUSE = 0.02  # seconds; so 12 MiB a second at most, and 24 MiB in the usual time
_REFUSES, _CLOSES, _RESETS, _LOST = after("refuse"), after("close"), after("reset"), after("lost")
_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)
_STALLS: Final = 20  # times write_stall in which a slow client has to take a buffer of the high-water mark


class ClientConnection(asyncio.Protocol):
    """The protocol of one accepted socket. `before` is called when it is connected, and may say why it is refused: it
    ends a handshake, whose seat the connection takes."""

    __slots__ = ("_before", "_dropped", "_loop", "_owed_since", "_owed_taken", "_seated", "_shared", "_stall_at",
                 "_stall_taken", "_timer", "_timer_at", "peer", "requests", "since", "state", "transport",
                 "write_paused")  # fmt: skip

    def __init__(self, shared: Shared, before: Callable[[], WireError | None] | None = None) -> None:
        self._shared = shared
        self._before = before
        self._seated = False
        self._loop = asyncio.get_running_loop()
        self.transport: asyncio.Transport = cast(asyncio.Transport, None)  # set before anything else happens
        self.peer = ""
        self.state = HEAD
        self.since = 0.0  # last progress of what the state waits for
        self.requests: RequestReader = cast(RequestReader, None)  # while it is connected: both are a cycle
        self._dropped = 0  # bytes since the last pause, after a refusal
        self.write_paused = False
        self._stall_at = math.inf  # when a client that does not take what is written is looked at again
        self._stall_taken = self._owed_taken = 0  # what it had taken at the last look; when it began to owe a buffer
        self._owed_since = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0

    def __repr__(self) -> str:
        return f"<Connection from {self.peer}: {NAMES[self.state]}>"

    # -- the transport's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        shared = self._shared
        settings = shared.settings
        self.requests = RequestReader(self, shared, self._loop)
        address = transport.get_extra_info("peername")
        self.peer = address[0] if isinstance(address, tuple) else UNIX
        refused = None if self._before is None else self._before()
        full = refused or shared.full_for(self.peer)
        self._seated = full is None
        shared.joins(self, seated=self._seated)
        self.since = self._loop.time()
        if len(shared.open) - shared.seats > settings.refused_at_once:
            self.reset()
        elif shared.draining and not shared.gently:
            self.close()
        elif full is not None:
            self.refuse(full)
        else:
            high = settings.write_high_water
            self.transport.set_write_buffer_limits(high, high // 2)
            self.arm(self._deadline())

    def connection_lost(self, exc: Exception | None) -> None:
        self.state = _LOST[self.state]
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        requests = self.requests
        self.requests = cast(RequestReader, None)
        requests.drop()
        self._shared.leaves(self, seated=self._seated)
        requests.leave("client_gone")

    def eof_received(self) -> bool:
        if self.state == ANSWER:
            self.requests.leave("client_gone")
            self.state = _LOST[self.state]
            self.transport.abort()
        elif self.state in (HEAD, BODY):
            self.close()  # a complete answer may still be on its way out
        return False

    def data_received(self, data: bytes) -> None:
        if self.state == LINGER:
            self._drop(len(data))
        else:
            self.requests.received(data)

    def _drop(self, size: int) -> None:
        """Drop what is read after a refusal, slowly: a body that nobody wants may not keep others waiting."""
        self._dropped += size
        if self._dropped >= DROPPED_AT_ONCE:
            self._dropped = 0
            self.transport.pause_reading()
            self._loop.call_later(DROP_PAUSE, self._drop_on)

    def _drop_on(self) -> None:
        if self.state == LINGER and not self.transport.is_closing():
            self.transport.resume_reading()

    def pause_writing(self) -> None:
        self.write_paused = True
        self._expect_reading()
        responder = self.requests.responder
        if responder is not None:
            responder.paused()

    def resume_writing(self) -> None:
        self.write_paused = False
        self._stall_at = math.inf
        responder = self.requests.responder
        if responder is not None:
            responder.resumed()

    # -- the end of the connection

    def refuse(self, error: WireError, told: bytes | None = None, path: bytes = b"") -> None:
        """Answer with an error, and end. `told`: bytes in place of an answer, for a client that would not understand
        one. `path`: of the request; the refusal has the shape of its API."""
        refusals = self._shared.refusals
        refusals[error.status] = refusals.get(error.status, 0) + 1
        self.transport.write(told or refusal(error, path))
        self.close(unread=True)

    def close(self, unread: bool = False) -> None:
        """Close once everything is written. `unread`: the client may be sending still; closing on unread bytes would
        reset the connection and take the answer with it, so they are read and dropped for a while."""
        self.requests.drop()
        self.since = self._loop.time()
        if unread:
            self.state = _REFUSES[self.state]
            if self.transport.can_write_eof():
                self.transport.write_eof()
            self.arm(self.since + self._shared.settings.linger)
        else:
            self.state = _CLOSES[self.state]
            self.transport.close()
            self._expect_reading()

    def reset(self) -> None:
        """Close at once, with a TCP RST."""
        self.state = _RESETS[self.state]
        self._stall_at = math.inf
        sock = self.transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self.transport.abort()

    def _cut_off(self, reason: str) -> None:
        self.requests.leave(reason)
        self.reset()

    @property
    def idle_since(self) -> float:
        """The loop's time of its last answer, or of its beginning; infinity with a request, or an answer not taken."""
        idle = self.state == HEAD and self.requests.blank and not self.transport.get_write_buffer_size()
        return self.since if idle else math.inf

    def close_if_idle(self) -> None:
        """A connection without a request has no reason to stay, when draining or where another needs its seat."""
        if self.state == HEAD and self.requests.blank:
            self.close()

    def warn(self) -> None:
        """Draining is nearly over: tell whoever answers here."""
        responder = self.requests.responder
        if responder is not None:
            responder.warned("drain")

    def expel(self) -> None:
        """Draining is over."""
        self._cut_off("drain")

    # -- time

    def arm(self, at: float) -> None:
        """Have `_wake` run at `at` or earlier."""
        if self._timer is not None:
            if self._timer_at <= at:
                return
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._loop.call_at(at, self._wake)

    def _deadline(self) -> float:
        if self.state == LINGER:
            return self.since + self._shared.settings.linger
        return self.requests.deadline

    def _wake(self) -> None:
        self._timer = None
        now = self._loop.time() + TIMER_SLACK
        if self._stall_at <= now:
            self._stalled(now)
        elif self._deadline() <= now and not self._unread(now):
            self._expired()
        at = min(self._deadline(), self._stall_at)
        if at < math.inf:
            self.arm(max(at, now + LOOK))

    def _unread(self, now: float) -> bool:
        """Whether what the state waits for may have come while this process could not read. In vain, if too late, and
        if a body's sink has paused the reading: it is the sink that does not go on."""
        return self.requests.waits(now) and self.transport.is_reading() and unread(self.transport)

    def _expired(self) -> None:
        if self.requests.expired():
            return
        if self.state == HEAD or not self.transport.get_write_buffer_size():
            self.close()
        else:  # lingering, and the answer itself is not taken: from here on it is a slow client
            self.since = math.inf
            self._expect_reading()

    def _expect_reading(self) -> None:
        """Start the limit on reading: a client that does not take what was written is cut off as too slow."""
        self._owed_since = now = self._loop.time()
        self._owed_taken = self._stall_taken = taken(self.transport)
        self._stall_at = now + self._shared.settings.write_stall
        self.arm(self._stall_at)

    def _stalled(self, now: float) -> None:
        """A client that takes anything is no stalled one; but a whole buffer may not take it for ever."""
        settings = self._shared.settings
        have = taken(self.transport)
        if have != self._stall_taken:
            self._stall_taken = have
            in_time = now - self._owed_since < _STALLS * settings.write_stall
            if not in_time and abs(have - self._owed_taken) >= settings.write_high_water:
                self._owed_since, self._owed_taken, in_time = now, have, True
            if in_time:
                self._stall_at = now + settings.write_stall
                return
        self._cut_off("slow_client")
