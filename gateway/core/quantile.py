"""Quantiles of the last few samples: exact over what is remembered, sorted only when somebody asks."""

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

    __slots__ = ("_last", "_ordered", "_unsorted")

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=REMEMBERED)
        self._ordered: list[float] = []
        self._unsorted = 0  # samples since the last sort

    def add(self, seconds: float) -> None:
        """A first byte came after `seconds`."""
        self._last.append(seconds)
        self._unsorted += 1

    def value(self, q: float) -> float | None:
        """Seconds that a share `q` (0..1) of the last first bytes did not exceed; None: too few are known."""
        if self._unsorted >= SORT_EVERY:
            self._unsorted = 0
            self._ordered = sorted(self._last)
        return nearest_rank(self._ordered, q) if self._ordered else None
