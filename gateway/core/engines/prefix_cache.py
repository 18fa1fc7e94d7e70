"""Estimate of an engine's prefix cache: which blocks of prompts it has cached, least recently used first.

vLLM keeps the blocks of ended calls until it needs their room. Then it evicts the block unused for longest, of one
prompt the last one first (vLLM, "Automatic Prefix Caching"). The estimate does the same with the blocks that our own
calls have used, within the engine's KV capacity. Two things correct it. An answer says how many tokens of its prompt
were cached: where that is much less than was expected, others use the cache too, and the estimate gets smaller. Cache
events say since when everything used is cached (`cache_age.py`).
"""

from __future__ import annotations

import math
from array import array
from itertools import islice
from operator import itemgetter

from gateway.core.checkpoint import GROUP, SavedPrefixes
from gateway.core.engines.cache_age import CacheAge

BLOCKS_AT_MOST = 200_000  # an entry is about 100 bytes
BLOCK_TOKENS = 128.0  # of a block, until prompts tell
BLOCK_WEIGHT = 0.05  # of one prompt in the mean of tokens a block
TELLS = 512  # expected tokens; fewer teach nothing
LEAST_SHARE = 1 / 64


class PrefixCache:
    """Blocks of prompts in one engine's cache, by their hashes. Every change keeps them within the engine's capacity.

    `blocks`: last use of each block, the least recent first.
    `share`: part of the engine's capacity that holds our prompts. `age`: what the engine's own events say, if it
    publishes them.
    """

    def __init__(self) -> None:
        self.blocks: dict[int, float] = {}
        self.block_tokens = BLOCK_TOKENS
        self.share = 1.0
        self.age: CacheAge | None = None

    def leading(self, prefix: tuple[int, ...]) -> int:
        """Number of leading blocks of `prefix` that the engine has probably cached."""
        since = -math.inf if self.age is None else self.age.cut
        blocks, count = self.blocks, 0
        for block in prefix:
            used = blocks.get(block)
            if used is None or used < since:
                break
            count += 1
        return count

    def use(self, prefix: tuple[int, ...], tokens: int, capacity: int, now: float) -> None:
        """Note that the engine reads or has read a prompt of `tokens`; `capacity` is its KV tokens."""
        if not prefix:
            return
        blocks = self.blocks
        for block in reversed(prefix):
            blocks.pop(block, None)
            blocks[block] = now
        self.block_tokens += BLOCK_WEIGHT * (tokens / (len(prefix) + 1) - self.block_tokens)
        room = self.share * capacity / (self.block_tokens if self.block_tokens > 1.0 else 1.0)
        if len(blocks) > room or len(blocks) > BLOCKS_AT_MOST:
            most = min(BLOCKS_AT_MOST, int(room))
            # A dict finds its first entry by passing over all that went before it: one by one, each would cost 30 us.
            evicted = list(islice(blocks, len(blocks) - most + most // 256))
            for block in evicted:
                del blocks[block]

    def told(self, expected: int, cached: int) -> None:
        """Learn from an answer: of its prompt `cached` tokens were cached, where `expected` were. Where the estimate
        has become so small that little is expected, more than that tells that it may grow."""
        if max(expected, cached) < TELLS:
            return
        factor = 0.9 if cached < expected // 2 else 1.02
        self.share = min(1.0, max(LEAST_SHARE, self.share * factor))

    def clear(self) -> None:
        self.blocks.clear()

    def checkpoint(self, most: int, now: float) -> SavedPrefixes:
        """The `most` blocks used last, the newest first. They are in order of last use, so one age stands for GROUP
        blocks: that of the one among them used longest ago."""
        index = self.blocks
        blocks = array("q", islice(reversed(index), most))
        ages = [now - at for at in islice(reversed(index.values()), GROUP - 1, len(blocks), GROUP)]
        if len(blocks) % GROUP:
            ages.append(now - index[blocks[-1]])
        return SavedPrefixes(blocks.tobytes(), ages)

    def restore(self, saved: SavedPrefixes, then: float) -> None:
        """Add what was saved at `then`, of a block that both know the later use. The next prompt brings the index
        within the capacity."""
        blocks, ages = array("q", saved.blocks), saved.ages
        found = {blocks[number]: then - ages[number // GROUP] for number in reversed(range(len(blocks)))}
        for block, at in self.blocks.items():
            if at > found.get(block, -math.inf):
                found[block] = at
        self.blocks = dict(sorted(found.items(), key=itemgetter(1)))
