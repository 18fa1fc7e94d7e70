"""Parts for tests of the sidecar's requests: real simulated engines as child processes, a server that answers anything,
and `play`, which runs a coroutine and asserts that no task, connection or descriptor is left behind.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from loadtest.processes import Child, executed

WITHIN = 60.0  # seconds any of these tests may take


@contextmanager
def engine(folder: Path, *flags: str) -> Iterator[tuple[Child, str]]:
    """A simulated engine and its origin. It is ended however it is then: stopped, killed or well."""
    argv = [sys.executable, "-m", "loadtest.engine", "--model", "m", *flags]
    child = Child("engine", argv, folder / "engine.log")
    try:
        yield child, child.line(r"^ready (\S+)", 60.0)
    finally:
        child.kill()


@contextmanager
def stopped(child: Child) -> Iterator[None]:
    """SIGSTOP, and SIGCONT in the end: a process that is there and does nothing."""
    child.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        child.signal(signal.SIGCONT)


def play(scene: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await asyncio.sleep(0)
        before = len(os.listdir("/proc/self/fd"))
        async with asyncio.timeout(WITHIN):
            await scene()
            while len(asyncio.all_tasks()) > 1 or len(os.listdir("/proc/self/fd")) > before:
                await asyncio.sleep(0.001)  # transports close one turn of the loop after they are told to

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Child, "started", staticmethod(executed))  # a nursery's descriptor would stay
        asyncio.run(main())


def answer(body: bytes, status: int = 200, *headers: bytes) -> bytes:
    """A whole answer, framed by its length."""
    lines = [b"HTTP/1.1 %d X" % status, b"content-length: %d" % len(body), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


class Scripted:
    """A server that answers `targets[target]`, or `rest`, byte for byte, then closes; None: it never answers.

    A list is answered one by one, its last for ever. `asked` are the requests as (method, target, body); `open` is
    how many connections there are, `headers` what came with the last request.
    """

    def __init__(self, rest: bytes | None = None, **targets: Any) -> None:
        self.rest = rest
        self.targets: dict[str, bytes | list[bytes] | None] = targets
        self.asked: list[tuple[str, str, bytes]] = []
        self.headers: dict[str, str] = {}
        self.open = 0
        self.delay = 0.0  # seconds before each answer
        self.endless = b""  # written again and again after the answer, until the other side leaves

    async def __aenter__(self) -> Scripted:
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.origin = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        async with asyncio.timeout(60.0):
            while self.open:  # every connection is ended by whoever opened it, or was by us
                await asyncio.sleep(0.001)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            first, *lines = head.split("\r\n")
            self.headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
            body = await reader.readexactly(int(self.headers.get("content-length", "0")))
            method, target = first.split()[:2]
            self.asked.append((method, target, body))
            said = self.targets.get(target, self.rest)
            if isinstance(said, list):
                said = said.pop(0) if len(said) > 1 else said[0]
            if said is None:
                await reader.read()
                return
            await asyncio.sleep(self.delay)
            writer.write(said)
            await writer.drain()
            while self.endless:
                writer.write(self.endless)
                await writer.drain()
                await asyncio.sleep(0)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.open -= 1
            writer.close()
