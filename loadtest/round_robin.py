"""What the gateway is compared with: the same engines and clients, and nothing between them that waits or refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from loadtest.memory_engine import MemoryEngine
from loadtest.simulated_client import Life, Try
from loadtest.workload import Planned


class RoundRobin:
    """No gateway: each call goes to the next engine at once, and waits inside it."""

    def __init__(self, engines: Sequence[MemoryEngine]) -> None:
        self._engines = engines
        self._next = 0

    def send(self, call: Planned, attempt: Life, tried: Try) -> Callable[[], None]:
        engine = self._engines[self._next % len(self._engines)]
        self._next += 1
        tried.upstream = 1
        try:
            return engine.post(b"/v1/chat/completions", call.body, Straight(attempt))
        except ConnectionRefusedError:
            attempt.over(False)
            return _nothing


class Straight:
    """An engine's answer, straight to the client."""

    __slots__ = ("_attempt",)

    def __init__(self, attempt: Life) -> None:
        self._attempt = attempt

    def begin(self, status: int, content_type: bytes, data: bytes, length: int | None) -> None:
        self._attempt.head(status, {b"content-type": content_type})
        self._attempt.body(data)

    def data(self, data: bytes) -> None:
        self._attempt.body(data)

    def end(self) -> None:
        self._attempt.over(True)

    def failed(self, kind: str, message: str) -> None:
        self._attempt.over(False)


def _nothing() -> None:
    return None
