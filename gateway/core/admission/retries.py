"""Retry budget: a bound on the extra work that failures may make.

Retries are bounded by a share of the calls of the last seconds, not per call alone. So when every engine fails the
gateway adds at most that share to the load (Finagle's and Envoy's retry budgets).
"""

from __future__ import annotations

import random

from gateway.core.policy.snapshot import Current
from gateway.core.recent_calls import RecentCalls

AT_LEAST = 3  # retries in the window however few calls there are, so that a single failure is retried
PER_CALL = 2  # retries of one call: where three engines fail it, the fourth hardly answers in time
BACKOFF = 0.025  # seconds, doubled per attempt


class RetryBudget:
    """Counts calls and retries of the last seconds. O(1) per event."""

    def __init__(self, current: Current) -> None:
        self._current = current
        self.recent = RecentCalls()  # of which the marked are retries
        self.call = self.recent.count  # a call was sent for the first time

    @property
    def left(self) -> float:
        """Retries that may still be made in this window."""
        share, recent = self._current.policy.retries, self.recent
        return (max(AT_LEAST, share * recent.calls) if share else 0) - recent.marked

    def take(self, now: float) -> bool:
        """Spend one retry if the budget has one left."""
        self.recent.advance(now)
        if self.left < 1:
            return False
        self.recent.mark()
        return True

    def backoff(self, attempt: int, rng: random.Random) -> float:
        """Seconds to wait before retry number `attempt` (1, 2, ...): full jitter over a doubling range."""
        return rng.uniform(0, BACKOFF * 2**attempt)
