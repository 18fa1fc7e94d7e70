"""Batching window: the time a call waits for others that it could be merged with.

It grows with the rate of calls. A lone call does not wait.
"""

from __future__ import annotations

import math

GAIN = 0.125  # weight of the newest gap in the moving average


class BatchWindow:
    """Moving average of the gaps between calls of one key. `at`: arrival of the last one, in monotonic seconds."""

    def __init__(self) -> None:
        self.at = -math.inf
        self._gap = 0.0  # mean gap in seconds, no more than the window

    def wait(self, now: float, window: float) -> float:
        """Seconds that a call which arrives now shall wait for others: the window less the mean gap.

        It is 0 where one other call is expected within the window, and approaches the whole window for short gaps. A
        call after a silence of a window goes at once, and the mean starts anew.
        """
        since = now - self.at
        self.at = now
        if since >= window:
            self._gap = window
        else:
            self._gap += GAIN * (since - self._gap)
        return max(0.0, window - self._gap)
