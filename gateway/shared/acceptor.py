"""Acceptor: takes connections off a listening socket as they come, in turns with the rest of the loop."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import Final

_AT_ONCE: Final = 64  # accepted in a row; others get their turn in between
_PAUSE: Final = 0.1  # seconds without accepting, where no descriptor was left
_LOOK: Final = 0.02  # seconds between two looks whether it may accept again
_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)


class Acceptor:
    """Acceptor on one bound socket, which is closed with it. `taken` receives each connection's socket, which does not
    block, and its peer: the address, or `unix`. `may` is called before each; while it returns False, connections are
    left to other processes."""

    def __init__(
        self,
        listening: socket.socket,
        taken: Callable[[socket.socket, str], None],
        may: Callable[[], bool] = lambda: True,
    ) -> None:
        self.listening = listening
        self._taken = taken
        self._may = may
        self._loop = asyncio.get_running_loop()
        self._paused: asyncio.TimerHandle | None = None
        self._closed = False
        listening.setblocking(False)
        self._loop.add_reader(listening, self._accept)

    def close(self) -> None:
        """Accept no more. Twice is once."""
        if self._closed:
            return
        self._closed = True
        if self._paused is not None:
            self._paused.cancel()
        self._loop.remove_reader(self.listening)
        self.listening.close()

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            if not self._may():
                self._rest(_LOOK)
                return
            try:
                sock, address = self.listening.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError:  # no descriptor is left: the listener stays readable, and must not spin
                self._rest(_PAUSE)
                return
            sock.setblocking(False)
            self._taken(sock, address[0] if isinstance(address, tuple) else "unix")

    def _rest(self, seconds: float) -> None:
        """Accept nothing for a while."""
        self._loop.remove_reader(self.listening)
        self._paused = self._loop.call_later(seconds, self._loop.add_reader, self.listening, self._accept)


def reset(sock: socket.socket) -> None:
    """Close a connection at once, over TCP by a reset."""
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    sock.close()
