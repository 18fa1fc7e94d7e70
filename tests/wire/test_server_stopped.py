"""Time limits of clients in a gateway that was stopped: what they sent meanwhile is no silence."""

from __future__ import annotations

import asyncio
import os
import ssl
from functools import partial
from pathlib import Path

import pytest

from gateway.core.request.body_memory import BodyMemory
from gateway.relay.wire.server import Server, ServerSettings
from tests.certificates import made
from tests.stopped_loop import StoppedLoop, stopped
from tests.wire.server_harness import ALIVE, Client, Recorder, Rig

LONG = 30.0  # seconds, more than any limit on the client, and less than those of the tests
HEAD = b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n"


async def put(client: Client, data: bytes, rest: bytes = b"") -> tuple[int, bytes]:
    """Send `data` while the process is stopped, and `rest` later. Return the answer."""
    stopped(LONG, partial(os.write, client.socket.fileno(), data))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await client.send(rest)
    answer = await client.answer()
    return answer.status, answer.body


async def scenario(rig: Rig) -> None:
    client = await rig.client()
    for part in (5, 2):
        await client.send(HEAD)
        await client.exactly(b"HTTP/1.1 100 Continue\r\n\r\n")
        assert await put(client, b"hello"[:part], b"hello"[part:]) == (200, b"POST /x? hello")
    assert await put(client, ALIVE) == (200, b"GET /alive? ")
    await client.send(HEAD)
    await client.exactly(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert (await put(client, b""))[0] == 408


def test_what_a_client_sent_meanwhile_has_come() -> None:
    async def main() -> None:
        server = Server(
            Recorder(), ServerSettings(keep_alive=10.0, body_timeout=10.0, headers_timeout=10.0), BodyMemory()
        )
        await server.listen("127.0.0.1:0")
        rig = Rig(server, Recorder())
        try:
            await scenario(rig)
        finally:
            server.stop_accepting()
            for client in rig.clients:
                client.writer.transport.abort()
        await rig.quiet()

    with asyncio.Runner(loop_factory=StoppedLoop) as runner:
        runner.run(main())


async def shaken(rig: Rig, trusted: ssl.SSLContext, stops: int) -> None:
    """Shake hands with a server that is stopped before it reads each of the first `stops` flights; then be answered."""
    client, came, goes = await rig.client(), ssl.MemoryBIO(), ssl.MemoryBIO()
    hands = trusted.wrap_bio(came, goes, server_hostname="localhost")
    await asyncio.sleep(0)  # it is accepted
    while True:
        try:
            hands.do_handshake()
        except ssl.SSLWantReadError:
            done = False
        else:
            done = True
        flight = goes.read()
        if stops:
            stopped(LONG, partial(os.write, client.socket.fileno(), flight))
            stops -= 1
            await asyncio.sleep(0)
        else:
            client.writer.write(flight)
        if done:
            break
        async with asyncio.timeout(60):
            came.write(await client.reader.read(65536))
    hands.write(ALIVE)
    client.writer.write(goes.read())
    async with asyncio.timeout(60):
        data = await client.reader.read(65536)
    assert data, "it is closed"


@pytest.mark.parametrize("stops", [0, 1])
def test_a_client_that_shakes_hands_has_waited_for_the_server(tmp_path: Path, stops: int) -> None:
    context = made(tmp_path)
    trusted = ssl.create_default_context(cafile=str(tmp_path / "localhost.pem"))

    async def main() -> None:
        server = Server(Recorder(), ServerSettings(headers_timeout=10.0, linger=0.1), BodyMemory())
        await server.listen("127.0.0.1:0", ssl=context)
        rig = Rig(server, Recorder())
        try:
            await shaken(rig, trusted, stops)
        finally:
            server.stop_accepting()
            for client in rig.clients:
                client.writer.transport.abort()
        await rig.quiet()

    with asyncio.Runner(loop_factory=StoppedLoop) as runner:
        runner.run(main())
