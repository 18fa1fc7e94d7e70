"""Retry budget: a bound on the extra work that failures may make.

Retries are bounded by a share of the calls of the last seconds, not per call alone. So when every engine fails the
gateway adds at most that share to the load (Finagle's and Envoy's retry budgets).
"""

from __future__ import annotations

import random

from gateway.core.policy.snapshot import Current

WINDOW = 10  # seconds
AT_LEAST = 3  # retries in the window however few calls there are, so that a single failure is retried
PER_CALL = 2  # retries of one call: where three engines fail it, the fourth hardly answers in time
BACKOFF = 0.025  # seconds, doubled per attempt


class RetryBudget:
    """Counts calls and retries in one-second slots over the window. O(1) per event."""

    def __init__(self, current: Current) -> None:
        self._current = current
        self._calls = [0] * WINDOW
        self._retries = [0] * WINDOW
        self._second = 0
        self.calls = self.retries = 0  # sums over the window

    def _advance(self, now: float) -> None:
        second = int(now)
        if second - self._second >= WINDOW:
            self._calls, self._retries = [0] * WINDOW, [0] * WINDOW
            self.calls = self.retries = 0
        else:
            for passed in range(self._second + 1, second + 1):
                slot = passed % WINDOW
                self.calls -= self._calls[slot]
                self.retries -= self._retries[slot]
                self._calls[slot] = self._retries[slot] = 0
        self._second = second

    def call(self, now: float) -> None:
        """A call was sent for the first time."""
        if int(now) != self._second:
            self._advance(now)
        self._calls[self._second % WINDOW] += 1
        self.calls += 1

    @property
    def left(self) -> float:
        """Retries that may still be made in this window."""
        share = self._current.policy.retries
        return (max(AT_LEAST, share * self.calls) if share else 0) - self.retries

    def take(self, now: float) -> bool:
        """Spend one retry if the budget has one left."""
        if int(now) != self._second:
            self._advance(now)
        if self.left < 1:
            return False
        self._retries[self._second % WINDOW] += 1
        self.retries += 1
        return True

    def backoff(self, attempt: int, rng: random.Random) -> float:
        """Seconds to wait before retry number `attempt` (1, 2, ...): full jitter over a doubling range."""
        return rng.uniform(0, BACKOFF * 2**attempt)
