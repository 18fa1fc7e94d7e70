"""Inter-token latencies of answers in memory, from the ends of engine steps, without a timer for each token.

A sequence that decodes writes a token in every step of its engine. So the latencies of an answer are those of a stretch
of steps, or of several where it was preempted between.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from operator import sub
from typing import TYPE_CHECKING

from loadtest.report.records import TokenGaps

if TYPE_CHECKING:
    from loadtest.simulate.memory_requests import Taker

KEPT = 1 << 15  # steps; of an answer that took more of them the earliest latencies are lost


class Pace:
    """The steps of one engine. `tell(taker, gaps)` hears of each stream just before its end: the seconds from each of
    its tokens to the one before."""

    def __init__(self, tell: Callable[[Taker, TokenGaps], None]) -> None:
        self._tell = tell
        self._ends = array("d")
        self._forgotten = 0  # steps before the first of `_ends`

    def ended(self, now: float) -> int:
        """Record the end of a step; return its number."""
        ends = self._ends
        if len(ends) >= 2 * KEPT:
            del ends[:KEPT]
            self._forgotten += KEPT
        ends.append(now)
        return self._forgotten + len(ends) - 1

    def finished(self, taker: Taker, tokens: Sequence[tuple[int, int]], output: int) -> None:
        """An answer of `output` tokens is complete. `tokens`: of each time its prompt was read, the token written at
        the end of it, counted from 1, and the step."""
        written = array("d")
        following = [*(token for token, _ in tokens[1:]), output + 1]
        for (token, step), after in zip(tokens, following, strict=True):
            first = step - self._forgotten
            written += self._ends[max(0, first) : max(0, first + after - token)]
        gaps = array("d", map(sub, written[1:], written))
        self._tell(taker, TokenGaps(gaps, written[-1] - written[0] if gaps else 0.0))
