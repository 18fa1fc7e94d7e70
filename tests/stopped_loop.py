"""Event loop whose process seems to be stopped and continued: no test waits for it, and none depends on its machine.

A process that is stopped while it waits for its sockets (SIGSTOP, a paused container or machine) goes on with an
interrupted system call: its timers are due, and what came meanwhile lies unread.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable


class _Selector(selectors.DefaultSelector):
    stop: Callable[[], bool] | None = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        stop, self.stop = self.stop, None
        if stop is None:
            return super().select(timeout)
        return super().select(0) if stop() else []


class StoppedLoop(asyncio.SelectorEventLoop):
    """`stopped` stops the process as it next waits for its sockets."""

    def __init__(self) -> None:
        self._stops = _Selector()
        self._skipped = 0.0
        super().__init__(self._stops)

    def time(self) -> float:
        return super().time() + self._skipped

    def stopped(self, seconds: float, meanwhile: Callable[[], object], *, reads: bool = False) -> None:
        """Stop for `seconds`, in which `meanwhile` happens: what others do in so long a time. `reads`: the process only
        comes late, and reads what came before its timers ring, in the same turn."""

        def stop() -> bool:
            meanwhile()
            self._skipped += seconds
            return reads

        self._stops.stop = stop


def stopped(seconds: float, meanwhile: Callable[[], object], *, reads: bool = False) -> None:
    """See StoppedLoop."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, StoppedLoop)
    loop.stopped(seconds, meanwhile, reads=reads)
