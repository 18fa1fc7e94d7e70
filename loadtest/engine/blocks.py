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

from loadtest.engine.cache_log import CacheLog
from loadtest.engine.sequence import Sequence


class Blocks:
    """`usable` blocks, of which `available` can be had now: the free ones and the cached ones nobody refers to.

    A prompt has tens to hundreds of blocks, nearly all of them its own: they are moved in bulk, and only those that
    are shared one by one.
    """

    def __init__(self, num_gpu_blocks: int, *, caching: bool = True) -> None:
        if num_gpu_blocks < 2:
            raise ValueError(f"num_gpu_blocks must be at least 2, found {num_gpu_blocks}")
        self.usable = num_gpu_blocks - 1
        self.caching = caching
        self.free = self.usable
        self.busy: set[int] = set()  # cached, and referred to
        self.extra: dict[int, int] = {}  # of the busy: references beyond the first
        self.idle: OrderedDict[int, None] = OrderedDict()  # cached, nobody refers to it; oldest release first
        self.log: CacheLog | None = None  # is told what becomes cached and what is no longer, where somebody listens

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

    def references(self, block: int) -> int:
        """How many sequences hold the cached block; 0 also for one that is not cached."""
        return 1 + self.extra.get(block, 0) if block in self.busy else 0

    def hits(self, hashes: Hashes[int], most: int) -> tuple[int, int]:
        """Leading blocks of `hashes`, at most `most`, that are cached; and how many of these are idle."""
        found = unreferred = 0
        busy, idle = self.busy, self.idle
        for block in hashes[:most]:
            if block in idle:
                unreferred += 1
            elif block not in busy:
                break
            found += 1
        return found, unreferred

    def share(self, sequence: Sequence, count: int) -> None:
        """Give the sequence, which holds nothing, a reference to its first `count` blocks: `hits` has found them."""
        held = list(sequence.hashes[:count])
        for block in held:
            if block in self.idle:
                del self.idle[block]
                self.busy.add(block)
            else:
                self.extra[block] = self.extra.get(block, 0) + 1
        sequence.held = held
        sequence.published = count

    def take(self, count: int) -> None:
        """Hand out `count` plain blocks, evicting what it needs. The caller has asked `available` first."""
        self.free -= count
        if self.free < 0:
            evict = self.idle.popitem
            if self.log is not None:
                self.log.removed([evict(False)[0] for _ in range(-self.free)])
            else:
                for _ in range(-self.free):
                    evict(False)
            self.free = 0

    def publish(self, sequence: Sequence, computed: int) -> None:
        """Make the first `computed` full blocks of the sequence findable, as far as their hashes are known."""
        done = sequence.published
        if not self.caching or done >= computed:
            return
        new = sequence.hashes[done:computed]
        sequence.published = done + len(new)
        if not (self.busy.isdisjoint(new) and self.idle.keys().isdisjoint(new)):
            new = [block for block in new if block not in self.busy and block not in self.idle]
        self.busy.update(new)
        sequence.held += new
        if self.log is not None and new:
            first = sequence.hashes.index(new[0], done)
            self.log.stored(sequence.hashes[first - 1] if first else None, new)

    def give_back(self, sequence: Sequence, count: int) -> None:
        """Take back all `count` blocks of the sequence; cached ones nobody else refers to become idle, tail first."""
        held = sequence.held
        self.free += count - len(held)
        if not self.extra.keys().isdisjoint(held):
            held = [block for block in held if not self._still_held(block)]
        self.busy.difference_update(held)
        self.idle.update(dict.fromkeys(reversed(held)))
        sequence.held = []
        sequence.published = 0

    def reset(self) -> bool:
        """Forget every cached prefix. False, and nothing done, while any block is in use: as vLLM."""
        if self.used:
            return False
        self.free = self.usable
        self.idle.clear()
        if self.log is not None:
            self.log.cleared()
        return True

    def _still_held(self, block: int) -> bool:
        """Give up one reference of a shared block; False if it was the only one."""
        more = self.extra.get(block)
        if more is None:
            return False
        if more == 1:
            del self.extra[block]
        else:
            self.extra[block] = more - 1
        return True
