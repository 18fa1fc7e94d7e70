"""Time limits of clients in a gateway that was stopped: what they sent meanwhile is no silence."""

from __future__ import annotations

import asyncio
import os
from functools import partial

from gateway.core.request.body_memory import BodyMemory
from gateway.relay.wire.server import Server, ServerSettings
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
