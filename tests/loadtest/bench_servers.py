"""Hand-made servers for tests of the bench, on real sockets, in a thread with a loop of their own."""

from __future__ import annotations

import asyncio
import re
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

from loadtest.bench.run import Load, Ran, TargetRun, run
from loadtest.clients.retries import Clients
from loadtest.clients.targets import Address, Target
from loadtest.load.arrivals import Arrivals, Rate
from loadtest.load.lengths import Length
from loadtest.load.scenario import Scenario, planned
from loadtest.load.workload import Kind, Sessions, Workload
from tests.beside import beside

SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
WORD = b'data: {"choices":[{"index":0,"delta":{"content":"hi \\"you\\""}}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3,"total_tokens":10}}\n\n'
DONE = b"data: [DONE]\n\n"

Answering = Callable[[int, bytes, asyncio.StreamWriter], Awaitable[None]]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def plain(status: int, body: bytes, *fields: bytes, kind: bytes = b"application/json") -> bytes:
    more = b"".join(field + b"\r\n" for field in fields)
    return b"HTTP/1.1 %d X\r\ncontent-type: %b\r\ncontent-length: %d\r\n%b\r\n%b" % (
        status,
        kind,
        len(body),
        more,
        body,
    )


class Served:
    """A running server. `bodies`: of the requests it got; `connections`: how many were made to it."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.connections = 0
        self.port = 0

    @property
    def address(self) -> Address:
        return Address("127.0.0.1", self.port)


@contextmanager
def served(answer: Answering, *, tls: ssl.SSLContext | None = None, unix: Path | None = None) -> Iterator[Served]:
    """A server that answers request number n with `answer(n, body, writer)` and then reads on, in a thread."""
    server = Served()
    ready = threading.Event()
    ending: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"content-length: (\d+)", head)
                body = await reader.readexactly(int(length[1])) if length else b""
                server.bodies.append(body)
                await answer(len(server.bodies) - 1, body, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, OSError, asyncio.CancelledError):
            pass  # streams would log a cancelled task of theirs as an error
        finally:
            writer.transport.abort()

    async def main() -> None:
        over = asyncio.Event()
        ending.append((asyncio.get_running_loop(), over))
        if unix is None:
            listening = await asyncio.start_server(connection, "127.0.0.1", 0, ssl=tls)
            server.port = listening.sockets[0].getsockname()[1]
        else:
            listening = await asyncio.start_unix_server(connection, unix)
        ready.set()
        await over.wait()
        listening.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def serve() -> None:
        try:
            asyncio.run(main())
        finally:
            ready.set()  # where it failed before: whoever waits sees `ending` empty

    with beside(serve):
        assert ready.wait(60)
        try:
            yield server
        finally:
            loop, over = ending[0]
            loop.call_soon_threadsafe(over.set)


def always(*data: bytes) -> Answering:
    """Each of these in turn."""

    async def answer(number: int, body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(data[number % len(data)])

    return answer


def stream(*events: bytes) -> bytes:
    return SSE + b"".join(chunk(event) for event in events) + b"0\r\n\r\n"


def scenario_of(
    arrivals: Arrivals, seconds: float, *, streamed: bool = True, kind: str = "chat", session: Sessions | None = None
) -> Scenario:
    own = Kind(
        kind=kind,  # type: ignore[arg-type] # one of its words
        prompt=Length(constant=20), output=Length(constant=8), stream=streamed, session=session,
    )  # fmt: skip
    return Scenario(arrivals=arrivals, duration=seconds, workload=Workload(model="m", mix=(own,)))


def sent(
    address: Address, scenario: Scenario | None = None, *, count: int | None = None, retries: int = 0,
    timeout: float = 60.0, drain: float = 60.0, tls: ssl.SSLContext | None = None,
    sources: tuple[tuple[str, Address], ...] = (),
) -> Ran:  # fmt: skip
    """One run; a scenario left out: ten requests in a tenth of a second. `count`: no more than so many."""
    if scenario is None:  # with a later end than theirs: what is late then is not sent
        scenario, count = scenario_of(Arrivals(constant=Rate(100.0)), 60.0), 10
    load = Load(
        planned=islice(planned(scenario), count), seconds=scenario.seconds, users=scenario.clients, drain=drain,
        clients=Clients(retries=retries, timeout=timeout),
    )  # fmt: skip
    target = Target(name="t", addresses=[address], sources=sources)
    return run(TargetRun(target, load, 0, lambda share, words: None), tls)
