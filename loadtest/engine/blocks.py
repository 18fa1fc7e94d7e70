"""The paged KV cache: how many blocks are free, and which prefixes can be found again.

A block is either plain (only counted) or cached (known by the chained hash of its tokens, with a reference count). A
cached block nobody refers to stays, oldest release first, until room is needed: least recently used is evicted first,
and of one sequence the tail before the head. As in vLLM one block is set aside (the null block) and never handed out.

Simplified: when two sequences compute the same block at the same time, vLLM keeps both in the cache; here the second
stays plain and is free again at its release.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Hashes

from loadtest.engine.sequence import Sequence


class Blocks:
    """`usable` blocks, of which `available` can be had now: the free ones and the cached ones nobody refers to."""

    def __init__(self, num_gpu_blocks: int, *, caching: bool = True) -> None:
        if num_gpu_blocks < 2:
            raise ValueError(f"num_gpu_blocks must be at least 2, found {num_gpu_blocks}")
        self.usable = num_gpu_blocks - 1
        self.caching = caching
        self.free = self.usable
        self.refs: dict[int, int] = {}  # every cached block; 0: in `idle`
        self.idle: OrderedDict[int, None] = OrderedDict()  # oldest release first

    def __repr__(self) -> str:
        return f"<Blocks {self.used} used, {self.free} free, {len(self.idle)} idle of {self.usable}>"

    @property
    def available(self) -> int:
        return self.free + len(self.idle)

    @property
    def used(self) -> int:
        return self.usable - self.free - len(self.idle)

    @property
    def usage(self) -> float:
        """The share in use, 0..1, as vLLM reports it: cached blocks that nobody refers to count as free."""
        return self.used / self.usable

    def hits(self, hashes: Hashes[int], most: int) -> tuple[int, int]:
        """Leading blocks of `hashes`, at most `most`, that are cached; and how many of these are idle."""
        found = idle = 0
        refs = self.refs
        for block in hashes[:most]:
            count = refs.get(block)
            if count is None:
                break
            found += 1
            idle += count == 0
        return found, idle

    def share(self, sequence: Sequence, count: int) -> None:
        """Give the sequence, which holds nothing, a reference to its first `count` blocks: `hits` has found them."""
        refs = self.refs
        for block in sequence.hashes[:count]:
            if refs[block] == 0:
                del self.idle[block]
            refs[block] += 1
        sequence.held = list(sequence.hashes[:count])
        sequence.published = count

    def take(self, count: int) -> None:
        """Hand out `count` plain blocks, evicting what it needs. The caller has asked `available` first."""
        self.free -= count
        while self.free < 0:
            block, _ = self.idle.popitem(last=False)
            del self.refs[block]
            self.free += 1

    def publish(self, sequence: Sequence, computed: int) -> None:
        """Make the first `computed` full blocks of the sequence findable, as far as their hashes are known."""
        if not self.caching:
            return
        refs, hashes, held = self.refs, sequence.hashes, sequence.held
        upto = min(computed, len(hashes))
        for index in range(sequence.published, upto):
            block = hashes[index]
            if block not in refs:
                refs[block] = 1
                held.append(block)
        sequence.published = max(upto, sequence.published)

    def give_back(self, sequence: Sequence, count: int) -> None:
        """Take back all `count` blocks of the sequence; cached ones nobody else refers to become idle, tail first."""
        refs = self.refs
        self.free += count - len(sequence.held)
        for block in reversed(sequence.held):
            left = refs[block] - 1
            refs[block] = left
            if left == 0:
                self.idle[block] = None
        sequence.held = []
        sequence.published = 0

    def reset(self) -> bool:
        """Forget every cached prefix. False, and nothing done, while any block is in use: as vLLM."""
        if self.used:
            return False
        self.free = self.usable
        self.refs.clear()
        self.idle.clear()
        return True
