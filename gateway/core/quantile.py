"""Quantiles of the last samples, exact over those remembered, and sorted only on demand.

A read changes no later result. Values change after every SORT_EVERY samples, whether or not they were read.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

REMEMBERED = 128  # samples
SORT_EVERY = 8  # samples; the first value is known after as many


def nearest_rank(ordered: Sequence[float], q: float) -> float:
    """The q-quantile by nearest rank: the smallest value that at least a share `q` (0..1) of the values is not above.

    `ordered`: ascending, not empty.
    """
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]


class TTFTQuantile:
    """Quantiles of one class's time to first token (TTFT). Hedging waits so long before its second attempt."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=REMEMBERED)
        self._sample: list[float] = []  # the copy that values are computed from
        self._sorted = True
        self._pending = 0  # samples added since the copy

    def add(self, seconds: float) -> None:
        """Add one time to first byte."""
        self._last.append(seconds)
        self._pending += 1
        if self._pending == SORT_EVERY:
            self._pending = 0
            self._sample, self._sorted = list(self._last), False

    def value(self, q: float) -> float | None:
        """The q-quantile in seconds; None: fewer than SORT_EVERY samples so far."""
        if not self._sorted:
            self._sample.sort()
            self._sorted = True
        return nearest_rank(self._sample, q) if self._sample else None
