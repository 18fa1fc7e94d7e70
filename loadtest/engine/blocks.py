"""Paged KV cache: free blocks, and prefixes that can be found again.

A block is either plain (only counted) or cached (known by the chained hash of its tokens, and held by some sequences).
A cached block nobody holds stays, oldest release first, until room is needed: least recently used is evicted first,
and of one sequence the tail before the head. As in vLLM one block is set aside (the null block) and never handed out.

A prompt has tens to hundreds of blocks, nearly all of them its own. So cached blocks are kept in *runs*, consecutive
blocks of one text that have the same holders: what is found, held, given back or evicted is a run, whatever its length,
and it is cut in two where another text begins with a part of it. Only its first block can be looked up; since hashes
are chained, the others can be reached through no other.

Simplified: when two sequences compute the same block at the same time, vLLM keeps both in the cache; here the second
stays plain and is free again at its release.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Hashes

import msgspec

from loadtest.engine.cache_log import CacheLog
from loadtest.engine.sequence import Sequence


class BlockChain(msgspec.Struct, eq=False):
    """Cached blocks, each the one before's continuation, and who holds all of them; nobody: they may be evicted."""

    hashes: list[int]
    holders: set[Sequence]


class Blocks:
    """`usable` blocks, of which `available` can be had now: the `free` ones and the `idle` ones, which are cached and
    held by nobody."""

    def __init__(self, num_gpu_blocks: int, *, caching: bool = True) -> None:
        if num_gpu_blocks < 2:
            raise ValueError(f"num_gpu_blocks must be at least 2, found {num_gpu_blocks}")
        self.usable = num_gpu_blocks - 1
        self.caching = caching
        self.free = self.usable
        self.idle = 0
        self._runs: dict[int, BlockChain] = {}  # by the first block
        self._idle: OrderedDict[BlockChain, None] = OrderedDict()  # oldest release first
        self.log: CacheLog | None = None  # is told what becomes cached and what is no longer, where somebody listens

    def __repr__(self) -> str:
        return f"<Blocks {self.used} used, {self.free} free, {self.idle} idle of {self.usable}>"

    @property
    def available(self) -> int:
        return self.free + self.idle

    @property
    def used(self) -> int:
        return self.usable - self.free - self.idle

    @property
    def usage(self) -> float:
        """The share in use, 0..1, as vLLM reports it: cached blocks that nobody refers to count as free."""
        return self.used / self.usable

    @property
    def cached(self) -> set[int]:
        """Every block that can be found."""
        return {block for run in self._runs.values() for block in run.hashes}

    def references(self, block: int) -> int:
        """Sequences that hold the cached block; 0 also for one that is not cached. Looks at all there are."""
        return sum(len(run.holders) for run in self._runs.values() if block in run.hashes)

    def hits(self, hashes: Hashes[int], most: int) -> tuple[int, int]:
        """Leading blocks of `hashes`, at most `most`, that are cached; and how many of these are idle."""
        found = idle = 0
        most = min(most, len(hashes))
        runs = self._runs
        while found < most:
            run = runs.get(hashes[found])
            if run is None:
                break
            same = _same(run.hashes, hashes, found, most)
            found += same
            if not run.holders:
                idle += same
        return found, idle

    def share(self, sequence: Sequence, count: int) -> None:
        """Have the sequence, which holds nothing, hold its first `count` blocks: `hits` has found them."""
        hashes, held, at = sequence.hashes, sequence.held, 0
        while at < count:
            run = self._runs[hashes[at]]
            same = _same(run.hashes, hashes, at, count)
            if same < len(run.hashes):
                run = self._cut(run, same)
            if not run.holders:
                self._idle.pop(run, None)  # a piece just cut off is not there
                self.idle -= same
            run.holders.add(sequence)
            held.append(run)
            at += same
        sequence.published = count

    def _cut(self, run: BlockChain, length: int) -> BlockChain:
        """Make a run of its own of the first blocks; the rest keeps its place among the idle."""
        head = BlockChain(run.hashes[:length], set(run.holders))
        run.hashes = run.hashes[length:]
        self._runs[head.hashes[0]] = head
        self._runs[run.hashes[0]] = run
        for holder in head.holders:
            holder.held.insert(holder.held.index(run), head)
        return head

    def take(self, count: int) -> None:
        """Hand out `count` plain blocks, evicting what it needs. The caller has asked `available` first."""
        self.free -= count
        if self.free < 0:
            self._evict(-self.free)
            self.free = 0

    def _evict(self, count: int) -> None:
        self.idle -= count
        while count:
            run = next(iter(self._idle))
            hashes = run.hashes
            if len(hashes) > count:
                gone = hashes[-count:]
                del hashes[-count:]
            else:
                gone = hashes
                del self._idle[run]
                if self._runs.get(hashes[0]) is run:
                    del self._runs[hashes[0]]
            count -= len(gone)
            if self.log is not None:
                self.log.removed(gone[::-1])

    def publish(self, sequence: Sequence, computed: int) -> None:
        """Make the first `computed` full blocks of the sequence findable, as far as their hashes are known."""
        done, held = sequence.published, sequence.held
        if not self.caching or done >= computed:
            return
        hashes = sequence.hashes
        end = min(computed, len(hashes))
        if done >= end:
            return
        sequence.published = end
        whole = sum([len(run.hashes) for run in held]) == done  # else some of its blocks are plain, others' cached
        if not whole or hashes[done] in self._runs:
            done = max(done, self.hits(hashes, end)[0])
            if done == end:
                return
            whole = False
        new = list(hashes[done:end])
        if whole and held and len(held[-1].holders) == 1:
            held[-1].hashes += new
        else:
            run = self._runs[new[0]] = BlockChain(new, {sequence})
            held.append(run)
        if self.log is not None:
            self.log.stored(hashes[done - 1] if done else None, new)

    def give_back(self, sequence: Sequence, count: int) -> None:
        """Take back all `count` blocks of the sequence; cached ones nobody else holds become idle, tail first."""
        self.free += count
        for run in reversed(sequence.held):
            self.free -= len(run.hashes)
            run.holders.remove(sequence)
            if not run.holders:
                self._idle[run] = None
                self.idle += len(run.hashes)
        sequence.held = []
        sequence.published = 0

    def reset(self) -> bool:
        """Forget every cached prefix. False, and nothing done, while any block is in use: as vLLM."""
        if self.used:
            return False
        self.free = self.usable
        self.idle = 0
        self._idle.clear()
        self._runs.clear()
        if self.log is not None:
            self.log.cleared()
        return True


def _same(run: list[int], hashes: Hashes[int], at: int, most: int) -> int:
    """Count the blocks of the run that `hashes` has from `at` on, before `most`."""
    end = at + len(run)
    if end <= most and hashes[at:end] == run:
        return end - at
    same = 0
    for one, other in zip(run, hashes[at : min(end, most)], strict=False):
        if one != other:
            break
        same += 1
    return same
