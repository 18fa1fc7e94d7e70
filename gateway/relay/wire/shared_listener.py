"""Shared listener: accepts plain HTTP on a socket that other relays accept from too, while it may."""

from __future__ import annotations

import asyncio
import socket

from gateway.relay.wire.connection import ClientConnection
from gateway.relay.wire.shared import Shared
from gateway.shared.acceptor import Acceptor, reset


class SharedListener:
    """Accepts on one bound socket. The event loop's own listener takes all that waits before anybody looks at seats."""

    def __init__(self, shared: Shared, listening: socket.socket) -> None:
        self._shared = shared
        self._loop = asyncio.get_running_loop()
        self._making: set[asyncio.Task[None]] = set()
        self.listening = listening
        self._acceptor = Acceptor(listening, self._taken, shared.accepts)

    def close(self) -> None:
        """Accept no more."""
        self._acceptor.close()

    def _taken(self, sock: socket.socket, _: str) -> None:
        self._shared.coming += 1
        task = self._loop.create_task(self._make(sock))
        self._making.add(task)
        task.add_done_callback(self._making.discard)

    async def _make(self, sock: socket.socket) -> None:
        shared, came = self._shared, False

        def before() -> None:
            nonlocal came
            came = True
            shared.coming -= 1

        try:
            await self._loop.connect_accepted_socket(lambda: ClientConnection(shared, before), sock)
        except OSError:
            reset(sock)
        finally:
            if not came:
                before()
