"""Virtual time: an asyncio event loop whose clock jumps to the next timer instead of waiting for it.

An hour of traffic passes in the seconds its callbacks take, and the same seed gives the same run: what is due at one
moment runs in the order in which it was asked for. Real sockets have no place in it: a loop with nothing to run and no
timer left would wait for ever, so that is an error (`Deadlock`).

The loop is asyncio's own. Where it would wait, in its selector, the clock moves.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Coroutine
from contextvars import Context
from itertools import count
from selectors import DefaultSelector, SelectorKey
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

TURNS = 1000  # of the loop at one moment, before the clock moves as far as it can tell times apart, as a real one would
TICK = 1e-9  # seconds; timers may ring so much early, and would be set again for the same moment for ever
MOST_TURNS = 100 * TURNS


class Deadlock(Exception):
    """Everything waits and nothing will ever happen, a lost wake-up in the code under simulation; or it never stops
    happening, and time never passes."""


class _Timer(asyncio.TimerHandle):
    """Timer with a place among those of the same moment, which asyncio leaves to chance."""

    __slots__ = ("place",)

    place: tuple[float, int]

    def __lt__(self, other: Any) -> bool:
        return bool(self.place < other.place)


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` is virtual seconds, from 0."""

    _scheduled: list[_Timer]  # asyncio's own, and so is the resolution
    _clock_resolution: float

    def __init__(self) -> None:
        self._now = 0.0
        self._turns = 0  # since the clock last moved
        self._at_rest: Callable[[], None] | None = None
        self._numbers = count()
        super().__init__(_Clock(self._turn))
        self._clock_resolution = TICK

    def time(self) -> float:
        return self._now

    @property
    def timers(self) -> list[asyncio.TimerHandle]:
        """Timers that are still to ring, in no order."""
        return [timer for timer in self._scheduled if not timer.cancelled()]

    def watch(self, at_rest: Callable[[], None]) -> None:
        """Have `at_rest` called at each moment at which something happened, once nothing is left to be done at it."""
        self._at_rest = at_rest

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = _Timer(when, callback, args, self, context)
        timer.place = when, next(self._numbers)
        heapq.heappush(self._scheduled, timer)
        timer._scheduled = True  # type: ignore[attr-defined] # so that asyncio counts it where it is cancelled
        return timer

    def _turn(self, timeout: float | None) -> bool:
        """Begin a turn that would wait so long; 0: something is to be done. Return whether to look at sockets. Raises
        Deadlock."""
        if timeout is None:
            raise Deadlock(f"nothing left to happen at {self._now:.3f} s of virtual time")
        if timeout > 0.0:
            if self._at_rest is not None:
                self._at_rest()
            self._now = self._scheduled[0].when()
            self._turns = 0
            return True
        self._turns += 1
        if self._turns % TURNS:
            return False
        self._now += TICK
        if self._turns >= MOST_TURNS:
            self._turns = 0
            raise Deadlock(f"{MOST_TURNS} turns of the event loop at {self._now:.3f} s of virtual time, and no end")
        return True


class _Clock(DefaultSelector):
    """Selector that never waits. `turn` hears how long asyncio would, and says whether to look."""

    def __init__(self, turn: Callable[[float | None], bool]) -> None:
        super().__init__()
        self._turn = turn

    def select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        # The loop's own wake-up pipe is always there, and wakes nobody: asking the kernel costs 5 % of a simulation.
        return super().select(0) if self._turn(timeout) and len(self.get_map()) > 1 else []


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` in virtual time. Raises Deadlock where a real loop would hang."""
    found: list[T] = []

    async def kept() -> None:
        # Not a task's result: asyncio's runner makes the text of its task at the end, a minute for a million calls.
        found.append(await main)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(kept())
    return found[0]
