"""Quantiles of the last few samples: exact over what is remembered, sorted only when somebody asks.

Asking changes no later answer: which samples are seen depends on how many have come, not on who asked when.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

REMEMBERED = 128
SORT_EVERY = 8  # samples; no value is known before there are as many


def nearest_rank(ordered: Sequence[float], q: float) -> float:
    """The smallest of `ordered` (ascending, not empty) that a share of at least `q` of them does not exceed."""
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]


class TTFTQuantile:
    """The usual time to first token of one class: after how long a second attempt is worth its cost."""

    __slots__ = ("_last", "_seen", "_sorted", "_unseen")

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=REMEMBERED)
        self._seen: list[float] = []  # what answers are of
        self._sorted = True
        self._unseen = 0  # samples that no answer is of yet

    def add(self, seconds: float) -> None:
        """A first byte came after `seconds`."""
        self._last.append(seconds)
        self._unseen += 1
        if self._unseen == SORT_EVERY:
            self._unseen = 0
            self._seen, self._sorted = list(self._last), False

    def value(self, q: float) -> float | None:
        """Seconds that a share `q` (0..1) of the last first bytes did not exceed; None: too few are known."""
        if not self._sorted:
            self._seen.sort()
            self._sorted = True
        return nearest_rank(self._seen, q) if self._seen else None
