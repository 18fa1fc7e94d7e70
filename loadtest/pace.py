"""When the tokens of an answer in memory were written: its inter-token latencies, without a timer for each token.

Whatever decodes writes a token in every step of its engine, so the ends of an engine's steps are the times of all its
tokens, and an answer's are a run of them, or several where it was preempted between.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from operator import sub
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loadtest.memory_requests import Taker

KEPT = 1 << 15  # steps; an answer that took more of them has its earliest latencies told as one


class Pace:
    """The steps of one engine. `tell(taker, gaps)` hears of each stream just before its end: the seconds from each of
    its tokens to the one before."""

    def __init__(self, tell: Callable[[Taker, tuple[float, ...]], None]) -> None:
        self._tell = tell
        self._ends = array("d")
        self._forgotten = 0  # steps before the first of `_ends`

    def ended(self, now: float) -> int:
        """Another step ended; its number."""
        ends = self._ends
        if len(ends) >= 2 * KEPT:
            del ends[:KEPT]
            self._forgotten += KEPT
        ends.append(now)
        return self._forgotten + len(ends) - 1

    def finished(self, taker: Taker, tokens: Sequence[tuple[int, int]], output: int) -> None:
        """An answer of `output` tokens is complete. `tokens`: of each time its prompt was read, the token written at
        the end of it, counted from 1, and the step."""
        ends, before = self._ends, self._forgotten
        token, step = tokens[0]
        if len(tokens) == 1:
            start = max(0, step - before)
            times = ends[start : step - before + output - token + 1]
        else:
            times = array("d")
            for (token, step), (following, _) in zip(tokens, [*tokens[1:], (output + 1, 0)], strict=True):
                times += ends[max(0, step - before) : max(0, step - before + following - token)]
        self._tell(taker, tuple(map(sub, times[1:], times)))
