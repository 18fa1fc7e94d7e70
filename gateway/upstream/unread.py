"""Time limits of those who wait for bytes from a socket, in a process that may have been stopped meanwhile.

After a stop, and after a long turn, a loop meets its timers before its sockets. What lies in a socket by then is no
silence of the other side, so whoever is about to end a wait looks there first.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
from collections.abc import AsyncIterator

LOOK = 0.01  # seconds in which a loop reads what lies in its sockets


def unread(transport: asyncio.Transport) -> bool:
    """Whether bytes, or the other side's end, wait in the transport's socket."""
    sock = transport.get_extra_info("socket")
    return sock is not None and readable(sock)


def readable(sock: socket.socket) -> bool:
    """Whether bytes, or the other side's end, wait in a socket; not in one that is closed."""
    descriptor = sock.fileno()
    if descriptor < 0:
        return False
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


@contextlib.asynccontextmanager
async def limited(seconds: float) -> AsyncIterator[None]:
    """`asyncio.timeout`, for what a socket ends: once its time has come, the loop looks at its sockets once more."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as limit:
        timer = loop.call_later(seconds, lambda: limit.reschedule(loop.time() + LOOK))
        try:
            yield
        finally:
            timer.cancel()
