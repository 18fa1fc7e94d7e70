"""A clock that leaves out what the machine stands still: nobody is late there who could not run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

TURN = 0.01  # seconds between two looks at the clock, however idle the loop is
LONGEST = 0.03  # seconds between two looks that count; in what is more, no task of the loop could run


class RunningTime:
    """Seconds of `clock` in which this process ran. Only while `tick` runs is it looked at often enough."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen = clock()
        self._stood_still = 0.0

    def __call__(self) -> float:
        now = self._clock()
        self._stood_still += max(0.0, now - self._seen - LONGEST)
        self._seen = now
        return now - self._stood_still

    async def tick(self) -> None:
        while True:
            self()
            await asyncio.sleep(TURN)
