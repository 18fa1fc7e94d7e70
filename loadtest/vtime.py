"""Virtual time: an asyncio event loop whose clock jumps to the next timer instead of waiting for it.

An hour of traffic passes in the seconds its callbacks take, and the same seed gives the same run. Real sockets have
no place in it: a loop with nothing to run and no timer left would wait for ever, so that is an error (`Deadlock`).
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


TURNS = 1000  # of the loop at one moment, before the clock moves as far as it can tell times apart, as a real one would
TICK = 1e-9  # seconds; timers may ring so much early, and would be set again for the same moment for ever
MOST_TURNS = 100 * TURNS


class Deadlock(Exception):
    """Everything waits and nothing will ever happen, a lost wake-up in the code under simulation; or it never stops
    happening, and time never passes."""


class _JumpingSelector(selectors.SelectSelector):
    """`select(timeout)` is where an event loop waits; here it moves the clock instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.turns = 0  # of the loop, since the clock last moved
        self.at_rest: Callable[[], None] | None = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Deadlock(f"nothing left to happen at {self.now:.3f} s of virtual time")
        if timeout > 0:
            if self.at_rest is not None:
                self.at_rest()
            self.now += timeout
            self.turns = 0
        else:
            self.turns += 1
            if not self.turns % TURNS:
                self.now += TICK
            if self.turns > MOST_TURNS:
                self.turns = 0
                raise Deadlock(f"{MOST_TURNS} turns of the event loop at {self.now:.3f} s of virtual time, and no end")
        # The loop's own wake-up pipe is always there, and wakes nobody: asking the kernel costs 5 % of a simulation.
        return super().select(0) if len(self.get_map()) > 1 else []


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` is virtual seconds, from 0."""

    def __init__(self) -> None:
        self._clock = _JumpingSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now

    def watch(self, at_rest: Callable[[], None]) -> None:
        """Have `at_rest` called at each moment at which something happened, once nothing is left to be done at it."""
        self._clock.at_rest = at_rest


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` in virtual time. Raises Deadlock where a real loop would hang."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
