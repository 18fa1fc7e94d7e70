"""Harness for the data port on a real socket: a handler that records, and a client that speaks bytes.

`serve(scenario)` runs one scenario against a fresh server on uvloop and checks afterwards that nothing is left: no
connection, and no exception that only the event loop saw.
"""

from __future__ import annotations

import asyncio
import json
import math
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import uvloop

from gateway.core.request.body_memory import BodyMemory
from gateway.relay.wire.server import Request, Responder, Server, ServerSettings, answer
from tests.running_time import RunningTime

ALIVE = b"GET /alive HTTP/1.1\r\nHost: a\r\n\r\n"
TEXT = b"content-type: text/plain\r\n"


class UnhurriedLoop(uvloop.Loop):
    """An event loop in which no client is late because the machine stood still."""

    def __init__(self) -> None:
        super().__init__()
        self.running_time = RunningTime(super().time)

    def time(self) -> float:
        return self.running_time()


class Recorder:
    """Answers by path: `/hold...` is left for the test to answer, `/refuse` is refused at its head, the rest is
    echoed as `METHOD path?query body`: at once, or if `later` from the loop's next turn."""

    def __init__(self, later: bool = False) -> None:
        self.later = later
        self.token = b""  # to show in the header `token`; empty: none
        self.body_within = math.inf
        self.sizes: list[int] = []  # of bodies that were counted
        self.requests: list[Request] = []
        self.held: list[Responder] = []
        self.gone: list[str] = []
        self.changed = asyncio.Event()

    def head(self, request: Request) -> bytes | None:
        if self.token:
            if request.fields.get(b"token") != self.token:
                return answer(401, TEXT, b"no token")
            request.known = True
        if request.path.startswith(b"/refuse"):
            return answer(404, TEXT, b"no such route", close=request.path == b"/refuse-close")
        return None

    def body_by(self, request: Request) -> float:
        return request.at + self.body_within

    def call(self, request: Request, responder: Responder) -> None:
        self.requests.append(request)
        if request.held is not None:
            self.sizes.append(request.held.size)
            request.held.release()
        self.changed.set()
        if request.path.startswith(b"/hold"):
            responder.watch(self.left)
            self.held.append(responder)
        elif request.path == b"/bug":
            raise ZeroDivisionError("a bug in the handler")
        else:
            body = b"%b %b?%b %b" % (request.method, request.path, request.query, request.body)
            if self.later:
                asyncio.get_running_loop().call_soon(responder.send, 200, TEXT, body)
            else:
                responder.send(200, TEXT, body)

    def left(self, reason: str) -> None:
        self.gone.append(reason)
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def holding(self, number: int = 1) -> Responder:
        """The answer of the `number`th held request, once it is there."""
        await self.until(lambda: len(self.held) >= number)
        return self.held[number - 1]


class Answer:
    """One answer, read from the wire."""

    def __init__(self, head: bytes, body: bytes) -> None:
        lines = head.split(b"\r\n")
        self.raw = head + b"\r\n\r\n" + body
        self.status = int(lines[0].split(b" ")[1])
        self.headers = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines[1:])}
        self.body = body

    @property
    def error(self) -> dict[str, Any]:
        error = json.loads(self.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error


class Client:
    """A raw socket. `end()` says how the connection ended."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @property
    def socket(self) -> socket.socket:
        return self.writer.get_extra_info("socket")

    async def send(self, *pieces: bytes) -> None:
        """Each piece reaches the server by itself."""
        for piece in pieces:
            self.writer.write(piece)
            for _ in range(3 if len(pieces) > 1 else 0):
                await asyncio.sleep(0)

    async def exactly(self, expected: bytes) -> None:
        async with asyncio.timeout(60):
            assert await self.reader.readexactly(len(expected)) == expected

    async def answer(self, *, bodiless: bool = False) -> Answer:
        async with asyncio.timeout(60):
            head = (await self.reader.readuntil(b"\r\n\r\n"))[:-4]
            lower = head.lower()
            body = b""
            if b"\r\ntransfer-encoding: chunked" in lower and not bodiless:
                while True:
                    size = int(await self.reader.readuntil(b"\r\n"), 16)
                    body += (await self.reader.readexactly(size + 2))[:-2]
                    if not size:
                        break
            elif b"\r\ncontent-length: " in lower and not bodiless:
                length = int(lower.split(b"\r\ncontent-length: ")[1].split(b"\r\n")[0])
                body = await self.reader.readexactly(length)
            return Answer(head, body)

    async def end(self) -> tuple[bytes, str]:
        """All that still comes, and `closed` or `reset`."""
        rest = b""
        async with asyncio.timeout(60):
            while True:
                try:
                    data = await self.reader.read(1 << 20)
                except (ConnectionResetError, BrokenPipeError):
                    return rest, "reset"
                if not data:
                    return rest, "closed"
                rest += data

    async def is_alive(self) -> bool:
        """Whether the connection serves another request, and nothing else was to be read before its answer."""
        await self.send(ALIVE)
        return (await self.answer()).body == b"GET /alive? "

    def reset(self) -> None:
        if self.socket is not None:  # else the server was first
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def close(self) -> None:
        self.writer.close()


class Rig:
    """A server, its handler, and clients for it."""

    def __init__(self, server: Server, handler: Recorder) -> None:
        self.server = server
        self.handler = handler
        self.clients: list[Client] = []

    async def client(
        self, *, ssl: ssl.SSLContext | None = None, limit: int = 1 << 24, source: str | None = None
    ) -> Client:
        """`source`: the loopback address that it comes from."""
        address = self.server.addresses[-1]
        if address.startswith("unix:"):
            reader, writer = await asyncio.open_unix_connection(address[5:], limit=limit)
        else:
            host, _, port = address.split("//")[1].rpartition(":")
            name = "localhost" if ssl else None
            local = None if source is None else (source, 0)
            reader, writer = await asyncio.open_connection(
                host, int(port), limit=limit, ssl=ssl, server_hostname=name, local_addr=local
            )
        client = Client(reader, writer)
        self.clients.append(client)
        return client

    async def quiet(self, connections: int = 0) -> None:
        """Until the server has no more connections than that."""
        async with asyncio.timeout(60):
            while self.server.connections > connections:
                await asyncio.sleep(0.001)


def serve(
    scenario: Callable[[Rig], Awaitable[None]],
    *,
    path: str | None = None,
    tls: ssl.SSLContext | None = None,
    errors: int = 0,
    later: bool = False,
    bodies: BodyMemory | None = None,
    **settings: Any,
) -> Rig:
    """Run a scenario. `errors`: how many exceptions the event loop is to have seen. `later`: see Recorder."""

    async def main() -> Rig:
        seen: list[dict[str, Any]] = []
        loop = asyncio.get_running_loop()
        assert isinstance(loop, UnhurriedLoop)
        loop.set_exception_handler(lambda _, context: seen.append(context))
        ticking = loop.create_task(loop.running_time.tick())
        handler = Recorder(later)
        held = BodyMemory() if bodies is None else bodies
        server = Server(handler, ServerSettings(**settings), held)
        await server.listen(f"unix:{path}" if path else "127.0.0.1:0", ssl=tls)
        rig = Rig(server, handler)
        try:
            await scenario(rig)
        finally:
            server.stop_accepting()
            for client in rig.clients:
                client.writer.transport.abort()
        await rig.quiet()
        ticking.cancel()
        assert held.held == 0, held
        assert len(seen) == errors, seen
        return rig

    return uvloop.run(main(), loop_factory=UnhurriedLoop)
