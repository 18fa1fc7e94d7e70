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

from gateway.core.request.body_memory import BodyMemory
from gateway.relay.wire.connection import ClientConnection
from gateway.relay.wire.handshake import ClientListener
from gateway.relay.wire.http1 import KnownHeads
from gateway.relay.wire.messages import Request, ServerSettings, answer
from gateway.relay.wire.responder import Responder
from gateway.relay.wire.seat_board import RelaySeats
from gateway.relay.wire.shared import Handler, Shared
from gateway.shared.half_open import find_half_open

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
        self._listeners: list[asyncio.Server | ClientListener] = []
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
        self, where: str | socket.socket, *, ssl: tls.SSLContext | None = None, owner: bool = True
    ) -> None:
        """Listen at HOST:PORT, at unix:PATH, or on a listening socket. `owner`: the path of a unix socket is removed at
        the end. Raises OSError if that is not possible."""
        loop = asyncio.get_running_loop()
        if ssl is not None:
            self.go_by(ssl)
        bound = await asyncio.to_thread(bound_sockets, where) if isinstance(where, str) else [where]
        for each in bound:
            unix = each.family == socket.AF_UNIX
            if ssl is not None or self._shared.board is not None:
                context = None if ssl is None else self._next_context
                self._listeners.append(ClientListener(self._shared, each, context))
            else:
                create = loop.create_unix_server if unix else loop.create_server
                self._listeners.append(await create(self._connection, sock=each, backlog=_BACKLOG))
            if unix and owner:
                path = each.getsockname()
                self._unix_paths.append((path, os.stat(path).st_ino))
            elif not unix:
                find_half_open(each, self._shared.settings.half_open_timeout)
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
        return [each.fileno() for listener in self._listeners for each in listener.sockets]

    def give_paths(self) -> None:
        """Leave the paths of unix sockets to another process, which has the sockets."""
        self._unix_paths.clear()

    def stop_accepting(self, *, given: bool = False) -> None:
        """Close the listeners; connections stay. `given`: another process has the sockets, and their paths."""
        if given:
            self.give_paths()
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


def bound_sockets(listen: str) -> list[socket.socket]:
    """Listening sockets for HOST:PORT, on every address that the name stands for, or for unix:PATH. Raises OSError."""
    if listen.startswith("unix:"):
        return [unix_socket(listen.removeprefix("unix:"))]
    host, _, port = listen.rpartition(":")
    flags, bound = socket.AI_PASSIVE, list[socket.socket]()
    try:
        for family, _, _, _, address in dict.fromkeys(
            socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=flags)
        ):
            bound.append(socket.create_server(address[:2], family=family, backlog=_BACKLOG))
    except OSError:
        for each in bound:
            each.close()
        raise
    return bound


def unix_socket(path: str) -> socket.socket:
    """A listening unix socket, in place of one that an earlier process left. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.stat(path).st_mode):
            os.unlink(path)
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        bound.bind(path)
        bound.listen(_BACKLOG)
    except OSError:
        bound.close()
        raise
    return bound


def address_of(listening: socket.socket, secure: bool) -> str:
    """The URL of a listening socket, or `unix:PATH`."""
    name = listening.getsockname()
    if isinstance(name, str):
        return f"unix:{name}"
    host = f"[{name[0]}]" if ":" in name[0] else name[0]
    return f"{'https' if secure else 'http'}://{host}:{name[1]}"
