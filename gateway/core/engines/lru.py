"""LRU estimate of an engine's prefix cache: which conversations it has probably evicted.

vLLM evicts the blocks that were not used for longest. What is cached and not in use is what ended calls have left, of
each conversation its last. As much of that as fits beside what running calls use is still there, the latest first. What
they use is in each sample of the engine. Where an engine publishes events of its cache, they say better.
"""

from __future__ import annotations

from collections import OrderedDict
from math import inf, nextafter


class LruEstimate:
    """Tokens that calls have left in one engine's cache, by conversation, least recently used first. `cut`: what was
    last used until then is evicted."""

    __slots__ = ("_left", "cut", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        self._left: OrderedDict[object, tuple[int, float]] = OrderedDict()
        self.cut = -inf

    def use(self, conversation: object) -> int:
        """A call goes on with it: its tokens are in use. Returns how many it had left."""
        tokens, _ = self._left.pop(conversation, (0, 0.0))
        self.tokens -= tokens
        return tokens

    def leave(self, conversation: object, tokens: int, now: float) -> None:
        """A call of it has ended: its tokens stay, and may be evicted."""
        self.use(conversation)
        self._left[conversation] = tokens, now
        self.tokens += tokens

    def fit(self, room: int) -> None:
        """Only so many tokens are not in use: the others are evicted. They stay so when there is more room later."""
        while self.tokens > room:
            _, (tokens, self.cut) = self._left.popitem(last=False)
            self.tokens -= tokens

    def trusted_since(self, oldest: float) -> float:
        """Time since which what was used is still cached; `oldest` at the earliest."""
        return max(oldest, nextafter(self.cut, inf))
