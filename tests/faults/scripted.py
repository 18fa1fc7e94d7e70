"""Engine and clients that misbehave on demand: real sockets, one event loop, everything countable."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from msgspec import structs

from gateway.core.policy.policy import EngineEntry, Policy
from gateway.decider.loading import Configuration
from gateway.serve.run import Gateway
from gateway.shared.vllm.answers import ModelCard
from loadtest.processes import free_port

EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"hello"}}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3,"total_tokens":10}}\n\n'
DONE = b"data: [DONE]\n\n"
NOW = b"Thu, 26 Nov 2026 09:00:00 GMT"
SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
GZIP = b"content-encoding: gzip\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def answer(status: int, body: bytes, fields: bytes = b"") -> bytes:
    head = b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\n%bcontent-length: %d\r\n\r\n"
    return head % (status, fields, len(body)) + body


PLAIN = answer(200, b'{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3,"total_tokens":10}}')


PAUSES = {"pause": 0.02, "long_pause": 1.2}  # seconds after the first piece of a stream


class ScriptedEngine:
    """Answers each request as `behaviour` says: one of the names of `_act`, or a list of which one is drawn.

    `requests` holds the bodies received, `open` counts connections, `gone` those a client of ours closed on us.
    """

    def __init__(
        self, behaviour: str | list[str], rng: random.Random | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        self.behaviour = behaviour
        self.tls = tls
        self.rng = rng or random.Random(0)
        self.requests: list[bytes] = []
        self.heads: list[bytes] = []
        self.open = 0
        self.closed = asyncio.Event()  # set at each end of a connection
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @asynccontextmanager
    async def running(self) -> AsyncIterator[ScriptedEngine]:
        self.port = self.port or free_port()  # one that nobody else is given where it is stopped
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", self.port, ssl=self.tls)
        try:
            yield self
        finally:
            self.stop()

    def stop(self) -> None:
        self._server.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"content-length: (\d+)", head)
                body = await reader.readexactly(int(length[1])) if length else b""
                self.requests.append(body)
                self.heads.append(head)
                name = self.behaviour if isinstance(self.behaviour, str) else self.rng.choice(self.behaviour)
                stream = bool(json.loads(body).get("stream")) and b"/render HTTP" not in head
                if not await self._act(name, stream, reader, writer):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.open -= 1
            self.closed.set()
            writer.transport.abort()

    async def _act(self, name: str, stream: bool, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """True if the connection can take another request."""
        if name == "die_before_headers":
            return False
        if name == "hang":
            await reader.read()  # until the other side leaves
            return False
        if name.startswith("slow"):  # longer than any hedging waits: `slow` and then good, `slow_503` and then that
            await _turns(0.3)
            name = name.removeprefix("slow_").replace("slow", "good")
        status, _, after = name.partition(" after ")
        if status.isdigit():
            fields = b"date: %b\r\nRetry-After: %b\r\n" % (NOW, after.encode()) if after else b""
            told = b'{"error":{"message":"scripted","type":"x","param":null,"code":null}}'
            writer.write(answer(int(status), told, fields))
            return True
        if name == "empty":
            writer.write(answer(200, b""))
            return True
        if name == "no_content":
            writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
            return True
        if name == "gzip":  # of the right type, whether it streams or not
            writer.write(SSE.replace(b"\r\n\r\n", b"\r\ncontent-encoding: gzip\r\n\r\n") if stream else b"")
            writer.write(chunk(b"\x1f\x8b") + b"0\r\n\r\n" if stream else answer(200, b"\x1f\x8b", GZIP))
            return True
        if "/" in name:  # a good status, and a body of this type in place of the answer
            page = b"<html>Sign in</html>"
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: 20\r\n\r\n" % name.encode() + page)
            return True
        if name == "no_route":  # FastAPI's answer
            writer.write(answer(404, b'{"detail":"Not Found"}'))
            return True
        if name == "500_cut":
            writer.write(answer(500, b"x" * 100)[:-50])
            await writer.drain()
            return False
        if name.endswith("until_close"):  # HTTP/1.0: the end of the connection is that of the body
            whole = EVENT + USAGE + DONE if stream else PLAIN.partition(b"\r\n\r\n")[2]
            head = b"HTTP/1.0 200 OK\r\ncontent-type: %b\r\n\r\n" % (
                b"text/event-stream" if stream else b"application/json"
            )
            writer.write(head + (whole[: len(EVENT) + 9 if stream else -1] if name.startswith("cut") else whole))
            await writer.drain()
            return False
        if name == "garbage":
            writer.write(b"\x00\x01 this is not HTTP\r\n\r\n")
            await writer.drain()
            return False
        return await (self._stream(name, reader, writer) if stream else self._plain(name, writer))

    async def _stream(self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        writer.write(SSE)
        if name == "die_after_headers":
            await writer.drain()
            return False
        if name == "no_newline":
            for _ in range(20):
                writer.write(chunk(b"x" * 65536))
                await writer.drain()
            await reader.read()
            return False
        if name == "endless":
            for _ in range(200_000):
                writer.write(chunk(EVENT * 50))
                await writer.drain()
            return False
        writer.write(chunk(EVENT) + chunk(EVENT[:20]))
        await writer.drain()
        if name == "die_mid_body":
            return False
        if name == "stall":
            await reader.read()
            return False
        if name in PAUSES:
            await asyncio.sleep(PAUSES[name])
        writer.write(chunk(EVENT[20:]))
        if name == "no_done":
            writer.write(b"0\r\n\r\n")
            return True
        writer.write(chunk(USAGE + DONE))
        if name.endswith("_after_done"):
            writer.write(b"no size of a chunk\r\n" if name == "garbage_after_done" else b"")
            await writer.drain()
            return False
        if name == "late_end":  # the end of the body is a read of its own
            await writer.drain()
            await asyncio.sleep(0.005)
            if writer.is_closing():
                return False
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True

    async def _plain(self, name: str, writer: asyncio.StreamWriter) -> bool:
        if name in ("die_after_headers", "die_mid_body", "stall"):
            writer.write(PLAIN[:-10])
            await writer.drain()
            return False
        writer.write(PLAIN)
        await writer.drain()
        return True


async def _turns(seconds: float) -> None:
    """Sleep in small parts: a machine that stands still takes one of them, and what was due meanwhile goes first."""
    for _ in range(round(seconds / 0.01)):
        await asyncio.sleep(0.01)


@asynccontextmanager
async def gateway_over(
    engines: list[ScriptedEngine] | list[str], policy: Policy | None = None, seed: int = 1, **wire: float
) -> AsyncIterator[Gateway]:
    """A gateway on an ephemeral port over `engines` (or URLs), all up and serving model `m`, and the policy's
    providers. `wire`: settings of the data port that differ."""
    entries = [EngineEntry(url=engine if isinstance(engine, str) else engine.url) for engine in engines]
    policy = policy or Policy()
    keys = {name: f"key-of-{name}" for name in policy.providers}
    gateway = Gateway(Configuration(policy, keys), entries, None, random.Random(seed))
    gateway.limits.money.restore((), gateway.clock(), kept=True)  # no storage: nothing was spent before
    gateway.limits.money.ahead = False
    for engine in [engine for engine in gateway.fleet if not engine.provider]:
        gateway.fleet.has_models(engine, [ModelCard(id="m", max_model_len=8192)])
        engine.check(True, gateway.clock())
    gateway.server.settings = structs.replace(gateway.server.settings, **wire)
    await gateway.server.listen("127.0.0.1:0")
    try:
        yield gateway
    finally:
        await gateway.server.drain(0.0)
        await gateway.aclose()


def port_of(gateway: Gateway) -> int:
    return int(gateway.server.addresses[0].rpartition(":")[2])


def request(stream: bool = False, model: str = "m", **more: object) -> bytes:
    body = json.dumps(
        {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 10, "stream": stream, **more}
    ).encode()
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(body), body)
    )


class Answer:
    """A whole answer read from a socket. `complete`: its framing came to an end."""

    def __init__(self, raw: bytes) -> None:
        head, _, self.body = raw.partition(b"\r\n\r\n")
        lines = head.split(b"\r\n")
        self.status = int(lines[0].split(b" ")[1]) if len(lines[0].split(b" ")) > 1 else 0
        self.headers = {
            name.strip().lower().decode(): value.strip().decode()
            for name, _, value in (line.partition(b":") for line in lines[1:])
        }
        if "content-length" in self.headers:
            self.complete = len(self.body) == int(self.headers["content-length"])
        else:
            self.complete = raw.endswith(b"0\r\n\r\n")


async def ask(port: int, payload: bytes) -> Answer:
    """Send one request, read to its end (or the connection's)."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(payload)
    raw = b""
    try:
        while True:
            data = await reader.read(65536)
            if not data:
                break
            raw += data
            if b"\r\n\r\n" in raw and Answer(raw).complete:
                break
    except ConnectionError:
        pass
    finally:
        writer.transport.abort()
    return Answer(raw)


async def fds_at_rest() -> int:
    """Open descriptors of this process, those counted that uvloop opens for itself with its first listener."""
    async with ScriptedEngine("good").running():
        pass
    await asyncio.sleep(0)
    return open_fds()


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


async def settled(gateway: Gateway) -> None:
    """Wait (bounded) until nothing is held, then assert it of everything there is to hold."""
    async with asyncio.timeout(60):
        while (
            gateway.pipeline.tasks
            or any(client.active for client in gateway.engines.clients.values())
            or any(engine.ledger.in_flight for engine in gateway.fleet)  # its end may be on its way to another process
        ):
            await asyncio.sleep(0.001)
    for engine in gateway.fleet:
        assert (engine.ledger.held, engine.ledger.in_flight, engine.prefills.queued) == (0, 0, 0), engine
    assert all(not queues for queues in gateway.dispatch.queues.values())
    assert not any(gateway.dispatch.running.values())
    assert gateway.bodies.held == 0, gateway.bodies
