"""Distributions of any length in bounded memory: exact while short, log-linear buckets after that.

Up to EXACT values are kept as they are. When more come, all of them go to buckets that are as wide as the highest 16
bits of an IEEE 754 single tell apart: 128 to each power of two, each at most 1/128 of its lower edge wide. A value is
then told as its bucket's middle, so it is off by at most 1/256 of itself (ERROR, 0.4 %), and so is any quantile.
Buckets are counts, so sketches can be merged in any order; there cannot be more than 2^15 of them, whatever comes, and
a range from a microsecond to an hour needs 4,100. The shape is that of HdrHistogram; the bits make it cheap: what puts
values into buckets is a cast.
"""

from __future__ import annotations

import math
import struct
import sys
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import mul

EXACT = 100_000  # values
ERROR = 1 / 256
LARGEST = 1e30  # well inside a single
HIGH = 1 if sys.byteorder == "little" else 0  # which half of a single has the sign and the exponent


def quantile_of(ordered: Sequence[float], q: float) -> float:
    """The `q` quantile (0 to 1) of sorted values, 0.0 of none: linear between the two closest ranks, which is Hyndman
    and Fan's type 7, what `numpy.percentile` does by default and so what `vllm bench serve` prints."""
    if not ordered:
        return 0.0
    rank = q * (len(ordered) - 1)
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


class Sketch:
    """A distribution of values from 0 to LARGEST. Mean, smallest and largest are exact whatever comes, the deviation is
    off by a millionth of the largest at most."""

    __slots__ = ("_buckets", "_count", "_largest", "_smallest", "_squares", "_total", "_values")

    def __init__(self, values: Iterable[float] = ()) -> None:
        self._values = array("d")  # not yet in buckets
        self._buckets: Counter[int] = Counter()
        self._count = 0  # of what is in buckets, and so are those below
        self._total = 0.0
        self._squares = 0.0
        self._smallest = math.inf
        self._largest = 0.0
        self.extend(values)

    def __len__(self) -> int:
        return self._count + len(self._values)

    @property
    def exact(self) -> bool:
        """Whether every value is still known."""
        return not self._buckets

    @property
    def held(self) -> int:
        """Count of the numbers that are kept: values, or buckets."""
        return len(self._values) + len(self._buckets)

    def add(self, value: float) -> None:
        """Add a value. Raises ValueError for a negative one, one over LARGEST, and what is no number."""
        if not 0.0 <= value <= LARGEST:
            raise ValueError(f"not from 0 to {LARGEST}: {value}")
        self._values.append(value)
        if len(self._values) > EXACT:
            self._fold()

    def extend(self, values: Iterable[float]) -> None:
        """More values; as many calls of `add`, but in C."""
        more = array("d", values)
        if not more:
            return
        if not (min(more) >= 0.0 and max(more) <= LARGEST and math.isfinite(sum(more))):
            raise ValueError(f"not all from 0 to {LARGEST}")
        self._values.extend(more)
        if len(self._values) > EXACT:
            self._fold()

    def merge(self, other: Sketch) -> None:
        """All that `other` has seen, too. `other` stays the same distribution."""
        if other._buckets:
            other._fold()  # once, and not in every sum that it is part of
            self._fold()
            self._buckets.update(other._buckets)
            self._count += other._count
            self._total += other._total
            self._squares += other._squares
            self._smallest = min(self._smallest, other._smallest)
            self._largest = max(self._largest, other._largest)
        self.extend(other._values)

    def _fold(self) -> None:
        """Move what is known exactly to the buckets."""
        values, self._values = self._values, array("d")
        self._buckets.update(memoryview(array("f", values)).cast("B").cast("H")[HIGH::2])
        self._count += len(values)
        self._total += math.fsum(values)
        self._squares += math.fsum(map(mul, values, values))
        self._smallest = min(self._smallest, min(values, default=math.inf))
        self._largest = max(self._largest, max(values, default=0.0))

    # -- questions ----------------------------------------------------------------------------------------------------

    def quantiles(self, qs: Sequence[float]) -> list[float]:
        """Value for each of `qs` (0 to 1), 0.0 where there is nothing; see `quantile_of`."""
        if self._buckets:
            self._fold()
            return self._bucketed(qs)
        ordered = sorted(self._values)
        return [quantile_of(ordered, q) for q in qs]

    def _bucketed(self, qs: Sequence[float]) -> list[float]:
        buckets = sorted(self._buckets)
        upto = list(accumulate(self._buckets[bucket] for bucket in buckets))

        def ranked(rank: int) -> float:
            middle = _middle(buckets[bisect_left(upto, rank + 1)])
            return min(max(middle, self._smallest), self._largest)

        found = []
        for q in qs:
            rank = q * (self._count - 1)
            low = math.floor(rank)
            below, above = ranked(low), ranked(min(low + 1, self._count - 1))
            found.append(below + (above - below) * (rank - low))
        return found

    def quantile(self, q: float) -> float:
        """The `q` quantile (0 to 1)."""
        return self.quantiles([q])[0]

    @property
    def mean(self) -> float:
        """0.0 of nothing."""
        return (self._total + math.fsum(self._values)) / len(self) if len(self) else 0.0

    @property
    def deviation(self) -> float:
        """The standard deviation, of the sample as a whole population, as `numpy.std` has it."""
        if not len(self):
            return 0.0
        squares = self._squares + math.fsum(map(mul, self._values, self._values))
        return math.sqrt(max(0.0, squares / len(self) - self.mean**2))

    @property
    def largest(self) -> float:
        """0.0 of nothing."""
        return max(self._largest, max(self._values, default=0.0))


def _middle(bucket: int) -> float:
    """The value halfway between a bucket's edges: its 16 bits with nothing after them, and the next one's."""
    low, high = struct.unpack("<ff", struct.pack("<II", bucket << 16, bucket + 1 << 16))
    return float(low + high) / 2.0
