"""Listener that accepts by itself: with TLS, or plain HTTP on a socket that other relays accept from too.

The event loop's own listener takes all that waits before anybody looks at seats, and shakes hands before anybody counts
the client. Here a newcomer has a seat like any other from the moment it is accepted: it counts against
`max_connections` and its address's share. A TLS client has `headers_timeout` in all, its first byte included. One that
speaks plain HTTP is told so in plain HTTP, as nginx does. A new context is for handshakes that begin from then on;
connections that are there keep theirs.
"""

from __future__ import annotations

import asyncio
import math
import socket
import ssl as tls
from collections.abc import Callable
from typing import Final

from gateway.relay.wire.connection import ClientConnection
from gateway.relay.wire.messages import WireError
from gateway.relay.wire.shared import Shared
from gateway.shared.acceptor import Acceptor, reset
from gateway.upstream.unread import readable

_HANDSHAKE: Final = b"\x16"  # the first byte of a TLS client
_OWN_TIMER: Final = 86_400.0  # seconds: the loop's ends nothing before the handshake's own
_PLAIN: Final = "this port speaks HTTPS, and the request came as plain HTTP: use https://"
NextContext = Callable[[], tls.SSLContext]


class ClientListener:
    """Accepts on one bound socket. `context` gives the TLS context of the next handshake; None: plain HTTP."""

    def __init__(self, shared: Shared, listening: socket.socket, context: NextContext | None) -> None:
        self._shared = shared
        self._context = context
        self.sockets = (listening,)
        self._acceptor = Acceptor(listening, self._taken, shared.accepts)

    def close(self) -> None:
        """Accept no more. Handshakes under way may end; their connections find the server draining."""
        self._acceptor.close()

    def _taken(self, sock: socket.socket, peer: str) -> None:
        if self._context is not None and (self._shared.draining or self._shared.full_for(peer) is not None):
            reset(sock)
        else:
            _Newcomer(self._shared, sock, peer, self._context)


class _Newcomer:
    """Accepted socket, until it has a connection. The server counts it as a connection."""

    def __init__(self, shared: Shared, sock: socket.socket, peer: str, context: NextContext | None) -> None:
        self._shared = shared
        self._sock = sock
        self._context = context
        self._loop = asyncio.get_running_loop()
        self.peer = peer
        self._task: asyncio.Task[None] | None = None
        self._timer = self._loop.call_later(shared.settings.headers_timeout, self._look)
        self._seated = True
        shared.joins(self, seated=True)
        if context is None:
            self._begin(None)
        else:
            self._loop.add_reader(sock, self._begun)

    # -- the server's side

    @property
    def idle_since(self) -> float:
        """Infinity: a newcomer is never idle, because it has its own short limit."""
        return math.inf

    def close_if_idle(self) -> None:
        """Draining: nothing was asked yet."""
        self.expel()

    def warn(self) -> None:
        """Do nothing: no HTTP is spoken before the handshake ends."""

    def _look(self) -> None:
        """Out of time. A client whose bytes lie unread has waited for this process: it has the time again, once."""
        if readable(self._sock):
            self._timer = self._loop.call_later(self._shared.settings.headers_timeout, self.expel)
        else:
            self.expel()

    def expel(self) -> None:
        """Out of time, or the drain is over."""
        if self._task is not None:
            self._task.cancel()
        else:
            self._leave()
            reset(self._sock)

    # -- its one life

    def _begun(self) -> None:
        try:
            first = self._sock.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            first = b""
        if not first:
            self._leave()
            self._sock.close()
            return
        self._loop.remove_reader(self._sock)
        self._begin(self._context if first == _HANDSHAKE else None)

    def _begin(self, context: NextContext | None) -> None:
        self._task = self._loop.create_task(self._shake(context))
        self._task.add_done_callback(self._ended)

    async def _shake(self, context: NextContext | None) -> None:
        shared, sock = self._shared, self._sock

        def before() -> WireError | None:
            self._leave()
            return None if context is self._context else WireError(400, _PLAIN)

        def made() -> ClientConnection:
            return ClientConnection(shared, before)

        try:
            if context is None:
                await self._loop.connect_accepted_socket(made, sock)
            else:
                await self._loop.connect_accepted_socket(
                    made,
                    sock,
                    ssl=context(),
                    ssl_handshake_timeout=_OWN_TIMER,
                    ssl_shutdown_timeout=shared.settings.linger,
                )
        except OSError:
            sock.close()

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Clean up after the task. A callback, because a task that is cancelled before it begins runs no `finally`."""
        if task.cancelled():
            self._sock.close()
        self._leave()

    def _leave(self) -> None:
        """Give the seat back. Further calls do nothing."""
        if self._seated:
            self._seated = False
            self._timer.cancel()
            if self._task is None:
                self._loop.remove_reader(self._sock)
            self._shared.leaves(self, seated=True)
