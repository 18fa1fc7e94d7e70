"""Calls of the API server to EngineCore, which does one thing after the other, and nothing while it hangs."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable


class CoreCalls:
    """`call` at once, or as soon as what is under way is over; `hangs` tells whether nothing goes on at all."""

    def __init__(self, hangs: Callable[[], bool]) -> None:
        self._hangs = hangs
        self._waiting: deque[Callable[[], None]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def call(self, call: Callable[[], None]) -> None:
        """In order."""
        self._waiting.append(call)
        self.go_on()

    def occupy(self, seconds: float, then: Callable[[], None]) -> None:
        """To be called by a call: it takes so long, and ends with `then`."""
        if seconds:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._ended, then)
        else:
            then()

    def _ended(self, then: Callable[[], None]) -> None:
        self._timer = None
        then()
        self.go_on()

    def go_on(self) -> None:
        """To be called when it no longer hangs."""
        while self._waiting and self._timer is None and not self._hangs():
            self._waiting.popleft()()

    def close(self) -> None:
        """Drop all waiting calls and stop the timer; calls under way never end."""
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()
