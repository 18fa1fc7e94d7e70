"""Virtual time: an asyncio event loop whose clock jumps to the next timer instead of waiting for it.

An hour of traffic passes in the seconds its callbacks take, and the same seed gives the same run: what is due at one
moment runs in the order in which it was asked for. Real sockets have no place in it: a loop with nothing to run and no
timer left would wait for ever, so that is an error (`Deadlock`).

asyncio's own loop is a seventh of a simulation: a call of a method to compare two timers, a look at the selector in
every turn. Here turn and timers are our own, and all else is asyncio's.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextvars import Context, copy_context
from itertools import count
from selectors import BaseSelector
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

TURNS = 1000  # of the loop at one moment, before the clock moves as far as it can tell times apart, as a real one would
TICK = 1e-9  # seconds; timers may ring so much early, and would be set again for the same moment for ever
MOST_TURNS = 100 * TURNS
CANCELLED = 100  # timers, before it is worth throwing them out


class Deadlock(Exception):
    """Everything waits and nothing will ever happen, a lost wake-up in the code under simulation; or it never stops
    happening, and time never passes."""


class _Soon(asyncio.Handle):
    """asyncio's handle, made with less ado."""

    __slots__ = ()

    def __init__(
        self, loop: VirtualLoop, callback: Callable[..., object], args: Sequence[Any], context: Context | None
    ) -> None:
        self._context = copy_context() if context is None else context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._repr = self._source_traceback = None


class _Timer(asyncio.TimerHandle):
    """asyncio's timer handle, made with less ado."""

    __slots__ = ()

    _callback: Any  # None, once it is cancelled
    _args: Any

    def __init__(
        self, when: float, loop: VirtualLoop, callback: Callable[..., object], args: Sequence[Any],
        context: Context | None,
    ) -> None:  # fmt: skip
        self._context = copy_context() if context is None else context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._repr = self._source_traceback = None
        self._when = when
        self._scheduled = True

    def cancel(self) -> None:
        if not self._cancelled:
            self._cancelled = True
            self._callback = self._args = None  # what they hold on to is let go
            if self._scheduled:
                self._loop.timers_cancelled += 1


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` is virtual seconds, from 0."""

    _ready: deque[Any]  # handles; these are asyncio's own
    _closed: bool
    _stopping: bool
    _selector: BaseSelector
    _check_closed: Callable[[], None]
    _process_events: Callable[[list[Any]], None]

    def __init__(self) -> None:
        self._now = 0.0
        self._turns = 0  # since the clock last moved
        self._at_rest: Callable[[], None] | None = None
        self._timers: list[tuple[float, int, _Timer]] = []
        self._numbers = count()
        self.timers_cancelled = 0  # that have not left the heap yet
        super().__init__()

    def time(self) -> float:
        return self._now

    @property
    def timers(self) -> list[asyncio.TimerHandle]:
        """Timers that are still to ring, in no order."""
        return [entry[2] for entry in self._timers if not entry[2].cancelled()]

    def watch(self, at_rest: Callable[[], None]) -> None:
        """Have `at_rest` called at each moment at which something happened, once nothing is left to be done at it."""
        self._at_rest = at_rest

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        if self._closed:
            self._check_closed()
        handle = _Soon(self, callback, args, context)
        self._ready.append(handle)
        return handle

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        if self._closed:
            self._check_closed()
        timer = _Timer(when, self, callback, args, context)
        heapq.heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def _run_once(self) -> None:
        """asyncio's name for a turn; here all turns until the loop is to stop."""
        ready, timers = self._ready, self._timers
        while True:
            if self.timers_cancelled:
                self._forget_cancelled()
            if not ready and not self._stopping and (not timers or timers[0][0] > self._now):
                self._move()
            else:
                self._turns += 1
                if not self._turns % TURNS:
                    self._stay()
            if timers and timers[0][0] < self._now + TICK:
                self._ring()
            for _ in range(len(ready)):  # what these ask for has its turn in the next
                handle = ready.popleft()
                if not handle._cancelled:
                    handle._run()
            if self._stopping:
                return

    def _ring(self) -> None:
        timers, due = self._timers, self._now + TICK
        while timers and timers[0][0] < due:
            timer = heapq.heappop(timers)[2]
            timer._scheduled = False
            if timer._cancelled:
                self.timers_cancelled -= 1
            else:
                self._ready.append(timer)

    def _forget_cancelled(self) -> None:
        """Timers that were cancelled: the first ones, and all of them where they are more than the others."""
        timers = self._timers
        if self.timers_cancelled > CANCELLED and 2 * self.timers_cancelled > len(timers):
            timers[:] = [entry for entry in timers if not entry[2]._cancelled]
            heapq.heapify(timers)
            self.timers_cancelled = 0
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
            self.timers_cancelled -= 1

    def _move(self) -> None:
        """Nothing is left to be done now: on to the next timer."""
        if not self._timers:
            raise Deadlock(f"nothing left to happen at {self._now:.3f} s of virtual time")
        if self._at_rest is not None:
            self._at_rest()
        self._poll()
        self._now = self._timers[0][0]
        self._turns = 0

    def _stay(self) -> None:
        """Advance virtual time by TICK, because too many turns happened at one moment. Raises Deadlock after MOST_TURNS
        turns."""
        self._now += TICK
        if self._turns >= MOST_TURNS:
            self._turns = 0
            raise Deadlock(f"{MOST_TURNS} turns of the event loop at {self._now:.3f} s of virtual time, and no end")
        self._poll()

    def _poll(self) -> None:
        # The loop's own wake-up pipe is always there, and wakes nobody: asking the kernel costs 5 % of a simulation.
        if len(self._selector.get_map()) > 1:
            self._process_events(self._selector.select(0))


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` in virtual time. Raises Deadlock where a real loop would hang."""
    found: list[T] = []

    async def kept() -> None:
        # Not a task's result: asyncio's runner makes the text of its task at the end, a minute for a million calls.
        found.append(await main)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(kept())
    return found[0]
