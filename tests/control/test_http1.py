"""Connection limits of the control port: HTTP/1.1 alone, total and per peer, unread answers, refusals."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.shared.control import http1
from gateway.shared.control.http1 import ControlPort
from tests.certificates import made
from tests.control.parts import TOKEN, Parts, play

LIVEZ = b"GET /livez HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
LARGE = 32 * 1024 * 1024  # more than a kernel keeps for one connection

Run = Callable[[Coroutine[Any, Any, None]], None]
Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Door:
    """The listener, and its clients, which are closed in the end."""

    def __init__(self, listener: ControlPort, port: int) -> None:
        self.listener = listener
        self.port = port
        self.clients: list[Client] = []

    async def connect(self, host: str = "127.0.0.1") -> Client:
        client = await asyncio.open_connection("127.0.0.1", self.port, local_addr=(host, 0))
        self.clients.append(client)
        return client

    async def turned_away(self, host: str = "127.0.0.1") -> bool:
        """Whether one more client is reset, which may come before it has noticed that it is connected."""
        try:
            return not await ended(await self.connect(host))
        except ConnectionError:
            return True


async def ended(client: Client) -> bytes:
    """What still comes before the end, which must come."""
    async with asyncio.timeout(60):
        with contextlib.suppress(ConnectionError):
            return await client[0].read()
    return b""


def serve(
    scene: Callable[[Door], Awaitable[None]],
    connections: int = http1.CONNECTIONS,
    tls: ssl.SSLContext | None = None,
    run: Run = asyncio.run,
) -> None:
    """A listener with `/livez`, and with `/large`, which is more than anybody keeps for a client."""

    async def livez(_: Request) -> Response:
        return Response("ok\n")

    async def large(_: Request) -> Response:
        return Response(b"x" * LARGE)

    async def main() -> None:
        app = Starlette(routes=[Route("/livez", livez), Route("/large", large)])
        listening = socket.create_server(("127.0.0.1", 0))
        listener = ControlPort(app, "127.0.0.1:0", connections, tls)
        await listener.start(listening)
        door = Door(listener, listener.port)
        try:
            await scene(door)
        finally:
            for _, writer in door.clients:
                writer.transport.abort()
            await listener.aclose()
        assert listener.connections == 0

    run(main())


@pytest.mark.parametrize("token", [None, TOKEN])
@pytest.mark.parametrize(
    "offer",
    [
        b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: upgrade, http2-settings\r\nupgrade: h2c\r\n"
        b"http2-settings: AAMAAABkAAQAAP__\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0",
    ],
)
def test_http_2_is_not_spoken(offer: bytes, token: str | None) -> None:
    async def scene(gateway: Parts) -> None:
        with gateway.connect() as client:
            client.sendall(offer)
            answer = await asyncio.to_thread(client.recv, 4096)
            assert answer.startswith(b"HTTP/1.1 ")
            assert b"101 " not in answer[:14]

    play(scene, token)


def test_one_peer_has_a_share_of_the_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http1, "PER_PEER", 3)

    async def scene(door: Door) -> None:
        greedy = [await door.connect() for _ in range(3)]
        for client in greedy:
            client[1].write(LIVEZ)
            await client[0].readuntil(b"ok\n")
        assert await door.turned_away(), "one too many"
        other = await door.connect("127.0.0.2")
        other[1].write(LIVEZ)
        assert await other[0].readuntil(b"ok\n")
        assert door.listener.connections == 4
        greedy[0][1].close()
        async with asyncio.timeout(60):
            while door.listener.connections > 3:
                await asyncio.sleep(0.001)
        again = await door.connect()
        again[1].write(LIVEZ)
        assert await again[0].readuntil(b"ok\n")

    serve(scene)


def test_there_are_at_most_so_many_connections() -> None:
    async def scene(door: Door) -> None:
        for number in range(1, 4):
            client = await door.connect(f"127.0.0.{number}")
            client[1].write(LIVEZ)
            await client[0].readuntil(b"ok\n")
        assert await door.turned_away("127.0.0.9")
        assert door.listener.connections == 3

    serve(scene, connections=3)


def test_an_answer_that_nobody_takes_does_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http1, "TAKEN_WITHIN", 0.2)

    async def scene(door: Door) -> None:
        with socket.create_connection(("127.0.0.1", door.port)) as client:
            client.sendall(b"GET /large HTTP/1.1\r\nhost: a\r\n\r\n")
            async with asyncio.timeout(60):
                while not any(transport.get_write_buffer_size() for transport in door.listener._unsent):
                    await asyncio.sleep(0.001)
                while door.listener.connections:
                    await asyncio.sleep(0.001)

    serve(scene)


@pytest.mark.slow
@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_client_in_its_handshake_has_a_place_like_any_other(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http1, "READ_TIMEOUT", 2.0)

    async def scene(door: Door) -> None:
        silent = [await door.connect() for _ in range(3)]
        silent[0][1].write(b"\x16\x03\x01\x02\x00\x01")  # the beginning of a ClientHello
        async with asyncio.timeout(60):
            while door.listener.connections < 3:
                await asyncio.sleep(0.001)
        assert await door.turned_away(), "one too many"
        for client in silent:
            assert await ended(client) == b""
        async with asyncio.timeout(60):
            while door.listener.connections:
                await asyncio.sleep(0.001)
        plain = await door.connect()
        plain[1].write(LIVEZ)
        assert b"HTTP" not in await ended(plain)
        trusting = ssl.create_default_context(cafile=str(tmp_path / "a.pem"))
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", door.port, ssl=trusting, server_hostname="localhost"
        )
        door.clients.append((reader, writer))
        writer.write(LIVEZ)
        assert await reader.readuntil(b"ok\n")

    serve(scene, 3, made(tmp_path, "a"), run)


def test_an_answer_that_is_taken_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http1, "TAKEN_WITHIN", 5.0)

    async def scene(door: Door) -> None:
        reader, writer = await door.connect()
        writer.write(b"GET /large HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"200" in head
        assert len(await ended((reader, writer))) == LARGE

    serve(scene)


def test_many_refusals_are_late_and_answers_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http1, "REFUSALS", 3)
    monkeypatch.setattr(http1, "REFUSED_AFTER", 1e6)

    async def scene(gateway: Parts) -> None:
        gateway.up("e0")
        for _ in range(3):
            assert (await gateway.get("/fleet")).status_code == 401
        late = asyncio.create_task(gateway.get("/fleet"))
        for _ in range(10):
            assert (await gateway.get("/fleet", authorization=f"Bearer {TOKEN}")).status_code == 200
        assert not late.done()
        late.cancel()

    play(scene, TOKEN)
