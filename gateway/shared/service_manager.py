"""Service manager's notifications: systemd hears that a process is ready, that it ends, and that its event loop lives.

One datagram for each, to the socket that NOTIFY_SOCKET names; without it nothing is sent. Where systemd sets a watchdog
(WATCHDOG_USEC), a heart beat goes out twice in its time, from the event loop itself: a loop that hangs misses it, and
systemd starts the process anew. sd_notify(3) has the protocol.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping


class ServiceManager:
    """Messages of this process to the service manager that `environ` names. `with` closes the socket and ends the heart
    beat. A datagram that cannot be sent is dropped, because a manager that is gone cannot use it."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        path = environ.get("NOTIFY_SOCKET", "")
        self._path = "\0" + path[1:] if path.startswith("@") else path  # @: in the abstract namespace
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) if path else None
        self._beat_every = _watchdog(environ) / 2
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> ServiceManager:
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._socket is not None:
            self._socket.close()

    def ready(self, status: str, *, loops: bool = True) -> None:
        """Report that everything listens; `status` is a line for `systemctl status`. From now on the heart beats, by
        the event loop if there is one."""
        self._send(f"READY=1\nSTATUS={status}")
        if loops and self._beat_every and self._socket is not None:
            self._beat(asyncio.get_running_loop())

    def beat(self) -> None:
        """Send one heart beat, for a process that has no event loop."""
        if self._beat_every:
            self._send("WATCHDOG=1")

    def succeeded_by(self, pid: int) -> None:
        """Report another process as the main process of the service."""
        self._send(f"MAINPID={pid}")

    def stopping(self) -> None:
        """Report that the process drains. Its heart beats on meanwhile."""
        self._send("STOPPING=1")

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        self._send("WATCHDOG=1")
        self._timer = loop.call_later(self._beat_every, self._beat, loop)

    def _send(self, message: str) -> None:
        if self._socket is None:
            return
        try:
            self._socket.sendto(message.encode(), socket.MSG_DONTWAIT, self._path)
        except OSError:
            return


def _watchdog(environ: Mapping[str, str]) -> float:
    """Seconds within which a heart beat is expected, 0 for none: of this process, not of one that started it."""
    micro = environ.get("WATCHDOG_USEC", "")
    own = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    return int(micro) / 1e6 if own and micro.isdecimal() else 0.0
