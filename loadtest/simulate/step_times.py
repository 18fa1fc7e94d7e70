"""Inter-token latencies of answers in memory, counted by engine step, without a timer for each token.

A sequence that decodes writes a token in every step of its engine. So the steps of an engine are the inter-token
latencies of all its answers: those of an answer are a stretch of steps, or several where it was preempted between. A
hundred answers run at once. Their latencies are not copied for each; a step is counted once, as often as a stretch
contains it.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loadtest.report.sketch import Sketch
    from loadtest.simulate.memory_requests import Taker

KEPT = 1 << 15  # steps; of an answer that took more of them the earliest latencies are lost


class Pace:
    """The steps of one engine. `tell(taker, gaps)` hears of each stream just before its end: the seconds from each of
    its tokens to the one before."""

    def __init__(self, tell: Callable[[Taker, Gaps], None]) -> None:
        self._tell = tell
        self._ends = array("d")
        self._forgotten = 0  # steps before the first of `_ends`
        self._marks: dict[Sketch, Counter[int]] = {}  # by step: stretches that begin there less those that end

    def ended(self, now: float) -> int:
        """Record the end of a step; return its number."""
        ends = self._ends
        if len(ends) >= 2 * KEPT:
            self.settle()
            del ends[:KEPT]
            self._forgotten += KEPT
        ends.append(now)
        return self._forgotten + len(ends) - 1

    def finished(self, taker: Taker, tokens: Sequence[tuple[int, int]], output: int) -> None:
        """An answer of `output` tokens is complete. `tokens`: of each time its prompt was read, the token written at
        the end of it, counted from 1, and the step."""
        following = [token for token, _ in tokens[1:]]
        following.append(output + 1)
        least = self._forgotten
        stretches = [
            (max(least, step), max(least, step + after - token))
            for (token, step), after in zip(tokens, following, strict=True)
        ]
        self._tell(taker, Gaps(self, stretches))

    def when(self, step: int) -> float:
        """End of the step."""
        return self._ends[step - self._forgotten]

    def times(self, first: int, end: int) -> array[float]:
        """Ends of the steps from `first` on, up to `end`."""
        return self._ends[first - self._forgotten : end - self._forgotten]

    def mark(self, sketch: Sketch, first: int, end: int) -> None:
        """Count there, once settled, how long each of these steps was: the time since the one before it."""
        marks = self._marks.get(sketch)
        if marks is None:
            marks = self._marks[sketch] = Counter()
        marks[first] += 1
        marks[end] -= 1

    def settle(self) -> None:
        """Count what is marked. To be called before such a sketch is asked anything."""
        for sketch, marks in self._marks.items():
            steps = sorted(marks)
            times: list[int] = []
            open_ = accumulate(marks[step] for step in steps)
            for (step, after), weight in zip(pairwise(steps), open_, strict=False):
                times += [weight] * (after - step)
            ends = self.times(steps[0] - 1, steps[-1])
            sketch.weigh(array("d", [end - before for before, end in pairwise(ends)]), times)
        self._marks.clear()


class Gaps:
    """The inter-token latencies of one answer, in seconds and in order, as long as its engine's `Pace` has them.
    `total`: their sum; it stays."""

    __slots__ = ("_pace", "_stretches", "total")

    def __init__(self, pace: Pace, stretches: list[tuple[int, int]]) -> None:
        self._pace = pace
        self._stretches = [(first, end) for first, end in stretches if end > first]  # steps that wrote a token
        written = self._stretches
        self.total = pace.when(written[-1][1] - 1) - pace.when(written[0][0]) if written else 0.0

    def __len__(self) -> int:
        return max(0, sum([end - first for first, end in self._stretches]) - 1)

    def __iter__(self) -> Iterator[float]:
        for before, end in pairwise(self._times()):
            yield end - before

    def _times(self) -> array[float]:
        times = array("d")
        for first, end in self._stretches:
            times += self._pace.times(first, end)
        return times

    def count_in(self, sketch: Sketch) -> None:
        """Have the sketch count them, once the `Pace` is settled."""
        pace = self._pace
        for first, end in self._stretches:
            if end > first + 1:
                pace.mark(sketch, first + 1, end)
        for (_, end), (first, _) in pairwise(self._stretches):
            sketch.add(pace.when(first) - pace.when(end - 1))  # from before a preemption to after it
