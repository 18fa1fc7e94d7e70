"""Counts of the last seconds: calls, and those among or beside them that are marked, such as failures or retries."""

from __future__ import annotations

WINDOW = 10  # seconds, in as many slots


class RecentCalls:
    """Calls and marks of the last WINDOW seconds, in slots of one. O(1) per event; `now` never goes back."""

    def __init__(self) -> None:
        self._calls = [0] * WINDOW
        self._marked = [0] * WINDOW
        self._slot = self._index = 0
        self._ends = 0.0  # when the slot is over
        self.calls = self.marked = 0  # sums over the window, as of the last event or advance

    def advance(self, now: float) -> None:
        """Forget what has left the window."""
        slot = int(now)
        for passed in range(max(self._slot, slot - WINDOW) + 1, slot + 1):
            index = passed % WINDOW
            self.calls -= self._calls[index]
            self.marked -= self._marked[index]
            self._calls[index] = self._marked[index] = 0
        self._slot, self._index, self._ends = slot, slot % WINDOW, slot + 1.0

    def count(self, now: float) -> None:
        """Count a call."""
        if now >= self._ends:
            self.advance(now)
        self._calls[self._index] += 1
        self.calls += 1

    def mark(self) -> None:
        """Count a mark at the time of the last event or advance."""
        self._marked[self._index] += 1
        self.marked += 1
