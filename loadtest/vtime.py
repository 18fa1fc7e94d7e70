"""Virtual time: an asyncio event loop whose clock jumps to the next timer instead of waiting for it.

An hour of traffic passes in the seconds its callbacks take, and the same seed gives the same run. Real sockets have
no place in it: a loop with nothing to run and no timer left would wait for ever, so that is an error (`Deadlock`).
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(Exception):
    """Everything waits and nothing will ever happen: a lost wake-up in the code under simulation."""


class _JumpingSelector(selectors.SelectSelector):
    """`select(timeout)` is where an event loop waits; here it moves the clock instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Deadlock(f"nothing left to happen at {self.now:.3f} s of virtual time")
        if timeout > 0:
            self.now += timeout
        # The loop's own wake-up pipe is always there, and wakes nobody: asking the kernel costs 5 % of a simulation.
        return super().select(0) if len(self.get_map()) > 1 else []


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` is virtual seconds, from 0."""

    def __init__(self) -> None:
        self._clock = _JumpingSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` in virtual time. Raises Deadlock where a real loop would hang."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
