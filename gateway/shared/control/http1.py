"""Control port, a gateway's or a sidecar's: Hypercorn's connections, with the bounds that it has no setting for.

- HTTP/1.1 alone. HTTP/2 without TLS, by upgrade or by prior knowledge, multiplies what one connection may keep.
- At most `CONNECTIONS` at once and `PER_PEER` of one address, clients in their TLS handshake included. What comes
  beyond is reset.
- A client has `READ_TIMEOUT` for its TLS handshake, and for its next bytes; not while it is answered by a stream of
  events, which has no end.
- A client has `TAKEN_WITHIN` to take what was written. Then its connection is reset, so buffers do not stay.
- Refusals (401, 403, 421) in excess of `REFUSALS` a second are answered `REFUSED_AFTER` late. Guessing a token, or
  asking without one, then costs the data port, which shares the loop, at most a few hundred requests a second.

The socket is bound here and handed over listening, so an address in use is an OSError of `start`, and port 0 has a
number to announce. No signal is handled here. The process ends the port last.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections import Counter
from functools import partial
from typing import Any

from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config
from hypercorn.events import Closed, RawData
from hypercorn.utils import wrap_app

from gateway.shared.acceptor import Acceptor, reset
from gateway.shared.addresses import split_address
from gateway.shared.tasks import cancel

CONNECTIONS = 1200  # a thousand sidecars, and those who watch
PER_PEER = 64
HEADERS = 16 * 1024  # bytes
READ_TIMEOUT = 10  # seconds for the next bytes of a client
TAKEN_WITHIN = 20.0  # seconds
REFUSALS = 20  # a second, answered at once
REFUSED_AFTER = 1.0  # seconds
GRACE = 1.0  # seconds for answers in flight when it ends
REFUSED = frozenset({401, 403, 421})
EVENTS = (b"content-type", b"text/event-stream")
HIGH_WATER = 64 * 1024  # unsent bytes; a larger answer waits for the client


class ControlPort:
    """Listener for one ASGI application at HOST:PORT, over `tls` if any, to `most` clients at once. `address` is its
    URL once started. `log` takes tracebacks of our own bugs, and nothing else."""

    def __init__(
        self,
        app: Any,
        listen: str,
        most: int = CONNECTIONS,
        tls: ssl.SSLContext | None = None,
        log: str = "weir.control",
    ) -> None:
        self.address = ""
        self.port = 0
        self._app = app
        self._listen = listen
        self._most = most
        self._tls = tls
        self._config = Config()
        self._config.h11_max_incomplete_size = HEADERS
        self._config.read_timeout = READ_TIMEOUT
        self._config.include_server_header = False
        self._config.errorlog = logging.getLogger(log)
        self._config.loglevel = "WARNING"
        self._context = WorkerContext(None)
        self._peers: Counter[str] = Counter()
        self._unsent: dict[asyncio.WriteTransport, float] = {}  # since when each connection has had unsent bytes
        self._tasks: set[asyncio.Task[Any]] = set()
        self._acceptor: Acceptor | None = None
        self._sweep: asyncio.TimerHandle | None = None
        self._refusals, self._refusals_at = 0.0, 0.0

    @property
    def connections(self) -> int:
        """Open connections."""
        return self._peers.total()

    async def start(self, bound: socket.socket | None = None) -> None:
        """Accept connections from now on, of a socket that is `bound` where there is one. The socket is closed with the
        port. Raises OSError, ValueError."""
        host, _ = split_address(self._listen)
        listening = bound_to(self._listen) if bound is None else bound
        self.port = listening.getsockname()[1]
        where = f"[{host}]" if ":" in host else host
        self.address = f"{'http' if self._tls is None else 'https'}://{where}:{self.port}"
        self._acceptor = Acceptor(listening, self._taken)
        self._look()

    def sockets(self) -> list[int]:
        """The file descriptor of the listening socket."""
        return [] if self._acceptor is None else [self._acceptor.listening.fileno()]

    def stop_accepting(self) -> None:
        """Take no connection any more; those that are there stay."""
        if self._acceptor is not None:
            self._acceptor.close()

    async def aclose(self) -> None:
        """End it, giving answers in flight a moment; a client that does not finish its request is left behind."""
        if self._acceptor is None:
            return
        self._acceptor.close()
        await self._context.terminated.set()
        if self._sweep is not None:
            self._sweep.cancel()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=GRACE)
            await cancel(*late)
        for transport in list(self._unsent):
            transport.abort()

    def _taken(self, sock: socket.socket, peer: str) -> None:
        if self.connections >= self._most or self._peers[peer] >= PER_PEER or self._context.terminated.is_set():
            reset(sock)
            return
        self._peers[peer] += 1
        task = asyncio.get_running_loop().create_task(self._served(sock))
        self._tasks.add(task)
        task.add_done_callback(partial(self._left, sock, peer))

    def _left(self, sock: socket.socket, peer: str, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            sock.close()  # it may not have begun
        self._tasks.discard(task)
        self._peers[peer] -= 1
        if not self._peers[peer]:
            del self._peers[peer]

    async def _served(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(HEADERS)
        protocol = asyncio.StreamReaderProtocol(reader)
        within = None if self._tls is None else float(READ_TIMEOUT)
        try:
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol, sock, ssl=self._tls, ssl_handshake_timeout=within
            )
        except OSError:  # no client of ours, or gone
            sock.close()
            return
        self._unsent[transport] = 0.0
        transport.set_write_buffer_limits(HIGH_WATER)
        events = asyncio.Event()  # set while it is answered by a stream of them
        app = wrap_app(partial(self._slowed, events), self._config.wsgi_max_body_size, "asgi")
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        try:
            connection = _Connection(app, loop, self._config, self._context, {}, reader, writer)
            connection.events = events
            await connection.run()
        except* (ConnectionError, TimeoutError):
            transport.abort()  # the client is gone
        finally:
            del self._unsent[transport]

    def _look(self) -> None:
        """Reset whoever has not taken its answer in time."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._sweep = loop.call_at(now + TAKEN_WITHIN / 4, self._look)
        for transport, since in self._unsent.items():
            if not transport.get_write_buffer_size():
                self._unsent[transport] = 0.0
            elif not since:
                self._unsent[transport] = now
            elif now - since >= TAKEN_WITHIN:
                transport.abort()

    async def _slowed(self, events: asyncio.Event, scope: Any, receive: Any, send: Any) -> None:
        """The application, whose refusals wait where there are many. `events` is set while it streams events."""

        async def sent(message: Any) -> None:
            if message["type"] == "http.response.start":
                if message["status"] in REFUSED:
                    await self._refused()
                if EVENTS in message["headers"]:
                    events.set()
            await send(message)

        try:
            await self._app(scope, receive, sent)
        finally:
            events.clear()

    async def _refused(self) -> None:
        now = asyncio.get_running_loop().time()
        self._refusals = max(0.0, self._refusals - REFUSALS * (now - self._refusals_at)) + 1.0
        self._refusals_at = now
        if self._refusals > REFUSALS:
            self._refusals = float(REFUSALS)
            with contextlib.suppress(TimeoutError):  # the end of the port does not wait for it
                await asyncio.wait_for(self._context.terminated.wait(), REFUSED_AFTER)


class _Connection(TCPServer):
    """A connection of Hypercorn's that speaks HTTP/1.1 for as long as it lasts."""

    events: asyncio.Event

    async def _read_data(self) -> None:
        self.protocol.protocol._check_protocol = _stay  # type: ignore[union-attr,method-assign] # set by run(), just now
        while not self.reader.at_eof():
            try:
                data = await asyncio.wait_for(self.reader.read(HEADERS), self.config.read_timeout)
            except TimeoutError:
                if self.events.is_set():
                    continue
                break
            except OSError:
                break
            await self.protocol.handle(RawData(data))
        await self.protocol.handle(Closed())
        await self.idle_task.stop()  # else a client that is gone keeps its place until it would have been idle too long


async def _stay(_: object) -> None:
    """An offer of HTTP/2 is ignored, as a server may; its preface is a request like any other, for `*`."""


def bound_to(listen: str) -> socket.socket:
    """A listening socket at HOST:PORT. Raises OSError, ValueError."""
    host, port = split_address(listen)
    listening = socket.create_server(
        (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=128
    )
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening
