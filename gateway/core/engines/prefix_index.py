"""Index from blocks of prompts to the engines that read them last, for fleets too large to compare all engines.

The estimate of each engine's cache (`prefix_cache.py`) says what is cached there; this index only says where to look.
So a wrong entry costs one look. Of one prompt the last block is forgotten first: a known block's prefix is known too.
"""

from __future__ import annotations

from itertools import islice

BLOCKS_AT_MOST = 1_000_000  # an entry is about 100 bytes
READERS = 2  # engines of one block: where the latest is full, the one before may have room


class PrefixIndex:
    """Ids of the engines that read each block, the latest first; the blocks used longest ago come first."""

    def __init__(self, most: int = BLOCKS_AT_MOST) -> None:
        self._most = most
        self._readers: dict[int, tuple[str, ...]] = {}

    def __len__(self) -> int:
        return len(self._readers)

    def note(self, prefix: tuple[int, ...], id: str) -> None:
        """Note that the engine has read this prompt."""
        readers = self._readers
        before: tuple[str, ...] = ()
        now: tuple[str, ...] = (id,)  # shared by blocks with the same readers
        for block in reversed(prefix):
            known = readers.pop(block, ())
            if known != before:
                before = known
                now = (id, *[each for each in known if each != id][: READERS - 1])
            readers[block] = now
        if len(readers) > self._most:  # many at once: a dict finds its first entry by passing over all before it
            for block in list(islice(readers, len(readers) - self._most + self._most // 256)):
                del readers[block]

    def readers(self, prefix: tuple[int, ...]) -> tuple[str, ...]:
        """Engines that have read the longest known part of `prefix`."""
        known, low, high = self._readers, 0, len(prefix)
        while low < high:
            middle = (low + high) // 2
            if prefix[middle] in known:
                low = middle + 1
            else:
                high = middle
        return known[prefix[low - 1]] if low else ()
