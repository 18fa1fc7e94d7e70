"""Turnover of an engine's prefix cache: since when it has probably kept all that it read, by what was read since.

vLLM evicts the blocks that were not used for longest. What was last used at some moment is gone once more has been
allocated since than is not in use by running calls. Where an engine publishes events of its cache, they say better.
"""

from __future__ import annotations

from bisect import bisect_left

REMEMBERED = 4096  # grants


class Turnover:
    """Tokens that one engine has had to allocate so far, with the times."""

    __slots__ = ("_at", "_totals", "total")

    def __init__(self) -> None:
        self.total = 0
        self._at: list[float] = []
        self._totals: list[int] = []  # before what was allocated then

    def allocated(self, tokens: int, now: float) -> None:
        """A call was given to the engine that adds so many tokens to its cache."""
        self._at.append(now)
        self._totals.append(self.total)
        self.total += tokens
        if len(self._at) > REMEMBERED:
            del self._at[: REMEMBERED // 2], self._totals[: REMEMBERED // 2]

    def trusted_since(self, free: int, oldest: float) -> float:
        """What was used since then is still cached, where `free` tokens are not in use; `oldest` at the earliest."""
        index = bisect_left(self._totals, self.total - max(0, free))
        if not index:
            return oldest
        return max(oldest, self._at[index] if index < len(self._at) else self._at[-1])
