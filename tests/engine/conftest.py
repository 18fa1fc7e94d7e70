"""Simulated engine on a thread of its own, for synchronous clients and raw sockets."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import pytest
import uvloop

from loadtest.engine.config import sim_config
from loadtest.engine.server import SimServer

T = TypeVar("T")
WITHIN = 60.0  # seconds for anything to happen


class Sim:
    """A running SimServer. `do` runs a function in its loop; `until` waits for a condition on it."""

    def __init__(self, server: SimServer, loop: asyncio.AbstractEventLoop) -> None:
        self.server = server
        self.url = server.url
        self._loop = loop

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").partition(":")
        return host, int(port)

    def do(self, function: Callable[[SimServer], T]) -> T:
        async def run() -> T:
            return function(self.server)

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(WITHIN)

    def until(self, condition: Callable[[SimServer], bool], within: float = WITHIN) -> None:
        async def wait() -> None:
            async with asyncio.timeout(within):
                while not condition(self.server):
                    await asyncio.sleep(0.002)

        asyncio.run_coroutine_threadsafe(wait(), self._loop).result(within + WITHIN)

    def idle(self) -> bool:
        """Nothing running, waiting or held, and every block free."""
        return self.do(lambda server: not server.engine.unfinished() and server.engine.scheduler.blocks.used == 0)

    def raw(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=WITHIN)


@contextmanager
def started(**config: Any) -> Iterator[Sim]:
    """`sim_config(**config)` served from a thread until the block ends. Ten times as fast unless told otherwise."""
    given: dict[str, Any] = {"models": ("m",), "speed": 10.0} | config
    server = SimServer(sim_config(**given))
    ready: Future[asyncio.AbstractEventLoop] = Future()

    async def serve() -> None:
        ended = asyncio.Event()
        await server.load(lambda line: None)
        async with server:
            server.ended = ended  # type: ignore[attr-defined] # the test's own handle
            ready.set_result(asyncio.get_running_loop())
            await ended.wait()

    thread = threading.Thread(target=lambda: uvloop.run(serve()), daemon=True)
    thread.start()
    loop = ready.result(WITHIN)
    try:
        yield Sim(server, loop)
    finally:
        loop.call_soon_threadsafe(server.ended.set)  # type: ignore[attr-defined]
        thread.join(WITHIN)
        assert not thread.is_alive()


@pytest.fixture
def sim() -> Iterator[Callable[..., Sim]]:
    """`sim(**config)` starts an engine that ends with the test."""
    with ExitStack() as stack:
        yield lambda **config: stack.enter_context(started(**config))
