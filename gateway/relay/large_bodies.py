"""Pacing of large request bodies that are refused, and the thread that parses large bodies.

The parser holds the interpreter while it reads, about 10 ms for 16 MiB, and every other call waits for it. For a call
that is taken this is the price of a long prompt. The large bodies of an owner that are refused are parsed at RATE at
most: his next one waits for as long as the refused one is worth. One large body of an owner is parsed at a time, so
more connections do not help. What a body occupies meanwhile counts as his share of the memory for bodies.

An owner is a tenant, or the address of a client without a key (`core.request.body_memory`). Times are
monotonic seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

LARGE = 64 * 1024  # bytes of a body; a smaller one is parsed in the event loop itself
RATE = 16 * 1024**2  # bytes of refused bodies a second: 1 % of the time, so fewer than one call in a hundred meets one
SOON = 0.01  # seconds; a timer may be that early
T = TypeVar("T")


class LargeBodies:
    """Turns of owners at `parser`. An owner is remembered while a body of his waits, and until his pause is over."""

    def __init__(self, parser: Executor, clock: Callable[[], float]) -> None:
        self._parser = parser
        self._clock = clock
        self._owners: dict[str, _Owner] = {}

    def __len__(self) -> int:
        return len(self._owners)

    async def parsed(self, owner: str, parse: Callable[[], T]) -> T:
        """The answer of `parse`, in the thread, when it is the owner's turn and his pause is over."""
        state = self._of(owner)
        state.bodies += 1
        try:
            async with state.turn:
                if (pause := state.until - self._clock()) > 0:
                    await asyncio.sleep(pause)
                return await asyncio.get_running_loop().run_in_executor(self._parser, parse)
        finally:
            state.bodies -= 1
            self._forget(owner)

    def refused(self, owner: str, size: int) -> None:
        """Note that a body of `size` bytes was parsed in vain."""
        if size > LARGE:
            state, now = self._of(owner), self._clock()
            state.until = max(state.until, now + size / RATE)  # one is parsed at a time, so nothing is owed twice
            asyncio.get_running_loop().call_later(state.until - now + SOON, self._forget, owner)

    def _of(self, owner: str) -> _Owner:
        return self._owners.setdefault(owner, _Owner())

    def _forget(self, owner: str) -> None:
        state = self._owners.get(owner)
        if state is not None and not state.bodies and state.until <= self._clock():
            del self._owners[owner]


class _Owner:
    """Turn of one owner. `bodies`: of his that wait or are parsed; `until`: when the next may be parsed."""

    __slots__ = ("bodies", "turn", "until")

    def __init__(self) -> None:
        self.bodies = 0
        self.turn = asyncio.Lock()
        self.until = 0.0
