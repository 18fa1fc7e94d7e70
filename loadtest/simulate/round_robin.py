"""Baselines of a simulation, round robin and direct: the same engines and clients, and nothing between them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

from loadtest.load.workload import Planned
from loadtest.simulate.memory_engine import MemoryEngine
from loadtest.simulate.memory_requests import Taker
from loadtest.simulate.simulated_client import ClientCall, Try
from loadtest.simulate.step_times import Gaps


class RoundRobin:
    """No gateway: each call goes to the next engine at once, and waits inside it."""

    def __init__(self, engines: Sequence[MemoryEngine]) -> None:
        self._engines = engines
        self._next = 0

    def send(self, call: Planned, client_call: ClientCall, tried: Try) -> Callable[[], None]:
        engine = self._engines[self._next % len(self._engines)]
        self._next += 1
        tried.upstream = 1
        return _post(engine, call, client_call)


class Direct:
    """No gateway and nobody who takes turns: each conversation, and each call that is none, goes to the engine that
    chance has given it, as where clients are told one address each."""

    def __init__(self, engines: Sequence[MemoryEngine]) -> None:
        self._engines = engines

    def send(self, call: Planned, client_call: ClientCall, tried: Try) -> Callable[[], None]:
        asked = call.asked
        drawn = zlib.crc32((asked.session or str(asked.index)).encode())
        tried.upstream = 1
        return _post(self._engines[drawn % len(self._engines)], call, client_call)


def _post(engine: MemoryEngine, call: Planned, client_call: ClientCall) -> Callable[[], None]:
    try:
        return engine.post(call.path, call.body, DirectAnswer(client_call))
    except ConnectionRefusedError:
        client_call.over(False)
        return _nothing


def paced(taker: Taker, gaps: Gaps) -> None:
    """For the engines' `Pace`, where nothing stands before them."""
    if isinstance(taker, DirectAnswer):
        taker.client_call.tried.gaps = gaps


class DirectAnswer:
    """An engine's answer, straight to the client."""

    __slots__ = ("client_call",)

    def __init__(self, client_call: ClientCall) -> None:
        self.client_call = client_call

    def begin(self, status: int, content_type: bytes, data: bytes, length: int | None) -> None:
        self.client_call.head(status, {b"content-type": content_type})
        self.client_call.body(data)

    def data(self, data: bytes) -> None:
        self.client_call.body(data)

    def end(self) -> None:
        self.client_call.over(True)

    def failed(self, kind: str, message: str) -> None:
        self.client_call.over(False)


def _nothing() -> None:
    return None
