"""Harness for the engine side on real sockets: a client, and an engine whose every byte the test writes.

`run(scenario)` gives a scenario both ends and checks afterwards that nothing is left: no active reply, no descriptor,
no task, and no exception that only the event loop saw.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import uvloop

from gateway.upstream.client import Client, ClientSettings, EngineError, Reply, parse_origin
from gateway.upstream.trust import Trust
from tests.wire.server_harness import UnhurriedLoop

OK = b"HTTP/1.1 200 OK\r\n"
PLAIN = OK + b"content-length: 2\r\n\r\nok"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Peer:
    """A connection as the engine sees it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def request(self) -> bytes:
        """Head and body of the next request."""
        async with asyncio.timeout(60):
            head = await self.reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"\r\ncontent-length: (\d+)\r\n", head)
            assert length is not None
            return head + await self.reader.readexactly(int(length[1]))

    async def send(self, *pieces: bytes) -> None:
        """Each piece reaches the client by itself. What the client does not wait for is not sent."""
        for piece in pieces:
            if not self.writer.transport.is_closing():
                self.writer.write(piece)
            for _ in range(3):
                await asyncio.sleep(0)

    def put(self, data: bytes) -> None:
        """Send at once, into the client's socket, without a turn of the loop."""
        own: socket.socket = self.writer.get_extra_info("socket")
        assert os.write(own.fileno(), data) == len(data)

    def close(self) -> None:
        """FIN. With bytes of the client unread, the kernel makes it a RST."""
        self.writer.close()

    def reset(self) -> None:
        """RST."""
        own: socket.socket | None = self.writer.get_extra_info("socket")
        if own is not None:  # else the client was first
            own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def ended(self) -> None:
        """Until the client has closed this connection; it sends nothing before."""
        async with asyncio.timeout(60):
            with contextlib.suppress(ConnectionError):
                assert await self.reader.read(1) == b""


class Taken:
    """What a reply handed over."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.wholes = 0
        self.ends: list[EngineError | None] = []
        self.over = asyncio.Event()

    def data(self, data: bytes) -> None:
        self.pieces.append(data)

    def whole(self, chunk: bytes) -> None:
        size, _, rest = chunk.partition(b"\r\n")
        assert (len(rest), rest[-2:]) == (int(size, 16) + 2, b"\r\n")
        self.wholes += 1
        self.pieces.append(rest[:-2])

    def done(self, error: EngineError | None) -> None:
        self.ends.append(error)
        self.over.set()

    def of(self, reply: Reply, *, whole: bool = True) -> Taken:
        reply.relay(self.data, self.done, self.whole if whole else None)
        return self

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)

    async def end(self) -> EngineError | None:
        async with asyncio.timeout(60):
            await self.over.wait()
        assert len(self.ends) == 1
        return self.ends[0]


class Rig:
    """A client, an engine, and the two ends of each connection between them."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.peers: asyncio.Queue[Peer] = asyncio.Queue()
        self.all: list[Peer] = []
        self.errors: list[dict[str, Any]] = []  # what the event loop saw

    def accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(reader, writer)
        self.all.append(peer)
        self.peers.put_nowait(peer)

    async def peer(self) -> Peer:
        """The next new connection."""
        async with asyncio.timeout(60):
            return await self.peers.get()

    def sending(self, body: bytes = b"{}", timeout: float = 60.0) -> asyncio.Task[Reply]:
        return asyncio.create_task(self.client.send(b"POST", b"/v1/x", b"a: b\r\n", body, timeout=timeout))

    async def reply(self, *pieces: bytes) -> tuple[Peer, Reply]:
        """A new connection, asked once, and the reply to these pieces. They hold some of the body."""
        sending = self.sending()
        peer = await self.peer()
        await peer.request()
        await peer.send(*pieces)
        return peer, await sending

    async def again(self, peer: Peer, *pieces: bytes) -> Reply:
        """A reply on a connection that is there."""
        sending = self.sending()
        await peer.request()
        await peer.send(*pieces)
        return await sending

    async def pooled(self) -> Peer:
        """A connection that has served one answer and rests."""
        idle = self.client.idle
        peer, reply = await self.reply(PLAIN)
        reply.close()
        assert self.client.idle == idle + 1
        return peer

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():  # gauges have no event
                await asyncio.sleep(0.001)


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


async def failure(sending: Awaitable[Reply]) -> EngineError:
    """The error of a send that is to fail."""
    try:
        reply = await sending
    except EngineError as error:
        return error
    raise AssertionError(f"answered {reply.status}")


def run(
    scenario: Callable[[Rig], Awaitable[None]],
    *,
    path: str | None = None,
    tls: tuple[ssl.SSLContext, Trust] | None = None,
    errors: int = 0,
    api_key: str | None = None,
    base: str = "",
    loop: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop,
    **settings: Any,
) -> None:
    """Run a scenario over TCP, a unix socket (`path`) or TLS (the server's context, and whom the client trusts).

    `errors`: how many exceptions the event loop is to have seen.
    """

    async def main() -> None:
        running = asyncio.get_running_loop()
        ticking = running.create_task(running.running_time.tick()) if isinstance(running, UnhurriedLoop) else None
        warm = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)  # uvloop opens descriptors of its own
        warm.close()
        await asyncio.sleep(0)
        fds = open_fds()

        over = False

        def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            rig.accepted(reader, writer)
            if over:  # it was on its way: a send that was cancelled as it connected
                writer.transport.abort()

        if path is not None:
            server: asyncio.Server = await asyncio.start_unix_server(accepted, path)
            url = f"unix://{path}"
        else:
            server = await asyncio.start_server(accepted, "127.0.0.1", 0, ssl=tls[0] if tls else None)
            port = server.sockets[0].getsockname()[1]
            url = f"https://localhost:{port}{base}" if tls else f"http://127.0.0.1:{port}{base}"
        client = Client(parse_origin(url), ClientSettings(**settings), trust=tls[1] if tls else None, api_key=api_key)
        rig = Rig(client)
        asyncio.get_running_loop().set_exception_handler(lambda _, context: rig.errors.append(context))
        try:
            await scenario(rig)
            assert client.active == 0, client
            await client.aclose()
            assert client.idle == 0
        finally:
            over = True
            for peer in rig.all:
                peer.writer.transport.abort()
            server.close()
        if ticking is not None:
            ticking.cancel()
            await asyncio.gather(ticking, return_exceptions=True)
        await rig.until(lambda: open_fds() <= fds)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert len(rig.errors) == errors, rig.errors

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())
