"""Data port: accepts connections and drains them. `connection.py` serves one, `handshake.py` has TLS.

Listening sockets carry the TCP options; Linux hands them on to every accepted socket, so they cost nothing per
connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl as tls
import stat
from collections.abc import Sequence
from typing import Any

from gateway.core.request.body_memory import BodyMemory
from gateway.relay.wire.connection import ClientConnection
from gateway.relay.wire.handshake import SharedListener, TlsListener
from gateway.relay.wire.http1 import KnownHeads
from gateway.relay.wire.messages import Request, ServerSettings, answer
from gateway.relay.wire.responder import Responder
from gateway.relay.wire.seat_board import RelaySeats
from gateway.relay.wire.shared import Handler, Shared

__all__ = ["Handler", "Request", "Responder", "Server", "ServerSettings", "answer"]

_BACKLOG = 4096
TURNS = 4  # of the event loop, from a connection that was accepted to its protocol


class Server:
    """Server of one handler on any number of listeners. `bodies`: the budget for its requests' bodies. `board`: seats
    of other relays that accept from the same sockets."""

    def __init__(
        self,
        handler: Handler,
        settings: ServerSettings,
        bodies: BodyMemory | None = None,
        board: RelaySeats | None = None,
    ) -> None:
        held = BodyMemory() if bodies is None else bodies
        self._shared = Shared(handler, settings, held, asyncio.get_running_loop().time, board)
        self._listeners: list[asyncio.Server | TlsListener | SharedListener] = []
        self._context: tls.SSLContext | None = None
        self._unix_paths: list[tuple[str, int]] = []  # path and inode: a successor may have bound the path anew
        self.addresses: list[str] = []

    def __repr__(self) -> str:
        state = "draining" if self._shared.draining else "serving"
        return f"<Server {' '.join(self.addresses)} {state} {self.connections} connections>"

    @property
    def settings(self) -> ServerSettings:
        return self._shared.settings

    @settings.setter
    def settings(self, settings: ServerSettings) -> None:
        """For connections that come from now on and, where they look at them again, for those that are there."""
        self._shared.settings = settings
        self._shared.heads = KnownHeads()  # those were read within other limits

    @property
    def connections(self) -> int:
        """Open connections, those being refused or closed included."""
        return len(self._shared.open)

    @property
    def refusals(self) -> dict[int, int]:
        """Answers that the wire gave by itself, counted by status."""
        return self._shared.refusals

    async def listen(
        self,
        host: str | None,
        port: int | None,
        *,
        path: str | None = None,
        ssl: tls.SSLContext | None = None,
        sock: socket.socket | None = None,
        owner: bool = False,
    ) -> None:
        """Listen on TCP, on a unix socket at `path`, or on a bound `sock`. `owner`: the path of a unix `sock` is
        removed at the end, as that of `path` is. Raises OSError if that is not possible."""
        loop = asyncio.get_running_loop()
        if ssl is not None:
            self.go_by(ssl)
            bound = (
                [sock] if sock is not None else [unix_socket(path)] if path is not None else await _tcp(host, port or 0)
            )
            listening = tuple(bound)
            self._listeners += [TlsListener(self._shared, each, self._next_context) for each in listening]
        elif sock is not None and self._shared.board is not None:
            listening = (sock,)
            self._listeners.append(SharedListener(self._shared, sock))
        else:
            if path is not None:
                listener = await loop.create_unix_server(self._connection, path, backlog=_BACKLOG)
            elif sock is not None and sock.family == socket.AF_UNIX:
                listener = await loop.create_unix_server(self._connection, sock=sock, backlog=_BACKLOG)
            elif sock is not None:
                listener = await loop.create_server(self._connection, sock=sock, backlog=_BACKLOG)
            else:
                listener = await loop.create_server(self._connection, host, port or 0, backlog=_BACKLOG)
            listening = tuple(listener.sockets)
            self._listeners.append(listener)
        if owner and sock is not None and sock.family == socket.AF_UNIX:
            path = sock.getsockname()
        if path is not None:
            self._unix_paths.append((path, os.stat(path).st_ino))
        for each in listening:
            if each.family in (socket.AF_INET, socket.AF_INET6):
                _find_half_open(each, self._shared.settings.half_open_timeout)
            self.addresses.append(address_of(each, ssl is not None))
        self._shared.tell_board()

    def go_by(self, context: tls.SSLContext) -> None:
        """Use this certificate for handshakes that begin from now on."""
        self._context = context

    def _next_context(self) -> tls.SSLContext:
        assert self._context is not None  # noqa: S101 # listen() has set it
        return self._context

    def sockets(self) -> list[int]:
        """The file descriptors of the listening sockets."""
        return [
            each.fileno()
            for listener in self._listeners
            for each in (
                [listener.listening] if isinstance(listener, TlsListener | SharedListener) else listener.sockets
            )
        ]

    def stop_accepting(self, *, given: bool = False) -> None:
        """Close the listeners; connections stay. `given`: another process has the sockets, and their paths."""
        if given:
            self._unix_paths.clear()
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        for path, inode in self._unix_paths:
            try:
                if os.stat(path).st_ino == inode:
                    os.unlink(path)
            except FileNotFoundError:
                pass
        self._unix_paths.clear()

    async def drain(self, timeout: float, *, gently: bool = False) -> None:  # noqa: ASYNC109 - a phase of it
        """Stop accepting, close what is idle, and wait until every answer in flight is complete and sent.

        After `timeout` seconds each remaining watcher is told `drain`; what is left `drain_notice` seconds later is
        aborted. Returns when no connection is left. `gently`: another process accepts from the same sockets, so a
        connection that is idle is closed only then, or with its next answer: a request may be on its way on it.
        """
        shared = self._shared
        shared.draining, shared.gently = True, gently
        shared.tell_board()
        self.stop_accepting(given=gently)
        for _ in range(TURNS):  # the loop may have accepted connections that are not made yet
            await asyncio.sleep(0)
        if not gently:
            for connection in list(shared.open):
                connection.close_if_idle()
        if await self._emptied(timeout):
            return
        shared.gently = False
        for connection in list(shared.open):
            connection.close_if_idle()
            connection.warn()
        if await self._emptied(shared.settings.drain_notice):
            return
        for connection in list(shared.open):
            connection.expel()
        await shared.empty.wait()

    def _connection(self) -> ClientConnection:
        return ClientConnection(self._shared)

    async def _emptied(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                while self._shared.open:  # a handshake leaves before its connection joins
                    await self._shared.empty.wait()
        except TimeoutError:
            return False
        return True


async def _tcp(host: str | None, port: int) -> list[socket.socket]:
    """Listening sockets on every address that a name stands for. Raises OSError."""
    loop = asyncio.get_running_loop()
    return _bound(await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE))


def bound_sockets(listen: str) -> list[socket.socket]:
    """Listening sockets for HOST:PORT or unix:PATH, for other processes to accept from. Raises OSError."""
    if listen.startswith("unix:"):
        return [unix_socket(listen.removeprefix("unix:"))]
    host, _, port = listen.rpartition(":")
    flags = socket.AI_PASSIVE
    return _bound(socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=flags))


def _bound(found: Sequence[tuple[Any, Any, Any, Any, Any]]) -> list[socket.socket]:
    """A listening socket on each of these addresses. Raises OSError."""
    bound: list[socket.socket] = []
    try:
        for family, _, _, _, address in dict.fromkeys(found):
            bound.append(socket.create_server(address[:2], family=family, backlog=_BACKLOG))
    except OSError:
        for each in bound:
            each.close()
        raise
    return bound


def unix_socket(path: str, mode: int | None = None) -> socket.socket:
    """A listening unix socket, in place of one that an earlier process left. `mode`: its permissions; None: as the
    umask leaves them. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.stat(path).st_mode):
            os.unlink(path)
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        bound.bind(path)
        if mode is not None:
            os.chmod(path, mode)  # nobody can connect before it listens
        bound.listen(_BACKLOG)
    except OSError:
        bound.close()
        raise
    return bound


def _find_half_open(listening: socket.socket, timeout: float) -> None:
    """A peer that vanished is found within `timeout` seconds: by keep-alive probes when nothing is under way to it,
    by TCP_USER_TIMEOUT when something is."""
    every = max(1, int(timeout) // 3)
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)]
    for name, value in (
        ("TCP_KEEPIDLE", every),
        ("TCP_KEEPINTVL", every),
        ("TCP_KEEPCNT", 2),
        ("TCP_USER_TIMEOUT", int(timeout * 1000)),
    ):
        if hasattr(socket, name):  # Linux has them all; elsewhere the system's defaults stay
            options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
    for level, option, value in options:
        listening.setsockopt(level, option, value)


def address_of(listening: socket.socket, secure: bool) -> str:
    """The URL of a listening socket, or `unix:PATH`."""
    name = listening.getsockname()
    if isinstance(name, str):
        return f"unix:{name}"
    host = f"[{name[0]}]" if ":" in name[0] else name[0]
    return f"{'https' if secure else 'http'}://{host}:{name[1]}"
