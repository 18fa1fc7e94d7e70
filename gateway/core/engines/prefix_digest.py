"""Digest of an engine's prefix index for a checkpoint: the blocks of prompts that were read last, and roughly when.

The index is in order of last use. So one age stands for GROUP blocks: that of the one among them used longest ago.
"""

from __future__ import annotations

import math
from array import array
from itertools import islice
from operator import itemgetter

from gateway.core.checkpoint import GROUP, SavedPrefixes


def digest(index: dict[int, float], most: int, now: float) -> SavedPrefixes:
    """The `most` blocks used last, the newest first. `index`: block hash -> last use, the newest last."""
    blocks = array("q", islice(reversed(index), most))
    ages = [now - at for at in islice(reversed(index.values()), GROUP - 1, len(blocks), GROUP)]
    if len(blocks) % GROUP:
        ages.append(now - index[blocks[-1]])
    return SavedPrefixes(blocks.tobytes(), ages)


def with_digest(index: dict[int, float], saved: SavedPrefixes, then: float) -> dict[int, float]:
    """The index with what was saved at `then`; of a block that both know the later use."""
    blocks, ages = array("q", saved.blocks), saved.ages
    found = {blocks[number]: then - ages[number // GROUP] for number in reversed(range(len(blocks)))}
    for block, at in index.items():
        if at > found.get(block, -math.inf):
            found[block] = at
    return dict(sorted(found.items(), key=itemgetter(1)))
