"""Rates and quantiles of counters that were read at different times.

A counter that has become smaller began again: the gateway was restarted, and all it counts now has come since. So no
rate is negative. Calls that the old process counted after the last sample are lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from gateway.top.sample import Counts, Point

WINDOW = 10.0  # seconds a rate looks back, or one interval where that is longer


def began_again(older: Counts, newer: Counts) -> bool:
    """Whether the process that counts is another one. Every counter began again if one did."""
    return any(newer.get(key, 0.0) < value for key, value in older.items())


def growth(older: Counts, newer: Counts) -> Counts:
    """What was counted between the two, never negative."""
    base = {} if began_again(older, newer) else older
    return {key: value - base.get(key, 0.0) for key, value in newer.items()}


class Grown:
    """What was counted in the last WINDOW of `points`, the oldest first, and in how many `seconds` that was really.

    Of a single point nothing is known: `seconds` is 0, every rate None.
    """

    def __init__(self, points: Sequence[Point]) -> None:
        steps = [(older, newer) for older, newer in pairwise(points) if newer.at > older.at]
        self.steps = [(newer.at - older.at, growth(older.counts, newer.counts)) for older, newer in steps]
        recent = sum(older.at >= points[-1].at - WINDOW for older, _ in steps)
        last = slice(len(steps) - max(1, recent), None) if steps else slice(0)
        self.restarted = any(began_again(older.counts, newer.counts) for older, newer in steps[last])
        self.seconds = sum(seconds for seconds, _ in self.steps[last])
        self.counts: Counts = {}
        for _, counts in self.steps[last]:
            for key, value in counts.items():
                self.counts[key] = self.counts.get(key, 0.0) + value

    def rate(self, *keys: tuple[str, ...]) -> float | None:
        """Of some counters together, per second. None: two samples are needed."""
        return _rate(self.counts, keys, self.seconds) if self.seconds > 0.0 else None

    def history(self, *keys: tuple[str, ...]) -> list[float]:
        """The same in every step between two points."""
        return [_rate(counts, keys, seconds) for seconds, counts in self.steps]

    def quantile(self, q: float, *first: str) -> float | None:
        """The quantile `q` (0..1) of the histogram whose buckets' keys begin with `first`, in the unit of the bounds.

        Interpolated within its bucket as Prometheus' histogram_quantile does. None where nothing was observed.
        """
        buckets = sorted((float(key[-1]), count) for key, count in self.counts.items() if key[:-1] == first)
        total = buckets[-1][1] if buckets else 0.0
        if total <= 0.0:
            return None
        below, lower = 0.0, 0.0
        for bound, count in buckets:
            if count > below and count >= q * total:
                break
            below, lower = count, bound
        share = (q * total - below) / (count - below)
        return lower if bound == float("inf") else lower + (bound - lower) * share


def _rate(counts: Counts, keys: Sequence[tuple[str, ...]], seconds: float) -> float:
    return sum(counts.get(key, 0.0) for key in keys) / seconds
