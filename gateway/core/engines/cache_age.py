"""Prefix-cache age of an engine, from its own events: the last use by which blocks are evicted.

vLLM reports the blocks that it stores and evicts, by hashes of their tokens. The gateway has no tokenizer, so it cannot
find its own blocks of text among them. It need not: the cache evicts in order of last use (LRU). So one evicted block
proves that everything last used before that block was stored is gone too. The latest such time is the *cut*. A prefix
used after the cut is cached, however long ago that is; one used before it is not. The cut moves as fast as the cache
turns over, and every user of the engine moves it.

What was evicted before the connection, and in a gap of the sequence, is not known: there the estimate is alone
(`prefix_cache.py`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from gateway.shared.vllm.kv_events import BlockRemoved, BlockStored, EventsError, Hash, events_from

LATEST = 16  # evictions that must agree: a connector may drop blocks out of turn, a shared block may have two copies
BLOCKS_TRACKED = 131_072  # per engine, about 100 bytes each; beyond it a sample of them, which tells the same
# Blocks of sliding windows and states of recurrent layers are given up while their request still runs.
KINDS = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
GPU = frozenset({None, "GPU", "gpu"})  # a block that left it for another medium has to be fetched at a cost


class CacheAge:
    """Prefix cache of one engine, by its events. `cut`: blocks that were last used before this time are evicted.

    Feed it from one connection: `link` when the connection comes and goes, `take` with every message, in order.
    """

    def __init__(self) -> None:
        self.cut = -math.inf
        self.live = False  # connected, and a message since
        self.problem = ""  # why the last message could not be read
        self._linked = False
        self.expected = -1  # the sequence number that comes next; -1: any
        self.stored: dict[int, float] = {}  # blocks that are cached -> when they were stored
        self._young: list[float] = []  # a heap: the latest such times, of evicted blocks, that are after the cut
        self._mask = 0  # only blocks with these bits 0 are tracked
        self._block_size = 0

    # -- questions ----------------------------------------------------------------------------------------------

    @property
    def cached(self) -> int:
        """Blocks that are cached, of those stored since the last gap; an estimate where they are many."""
        return len(self.stored) * (self._mask + 1)

    # -- events -------------------------------------------------------------------------------------------------

    def link(self, up: bool) -> None:
        """The connection has come or gone. Until the next message comes, it is not known what was missed."""
        self._linked = up
        self.live = False

    def take(self, frames: Sequence[bytes], now: float) -> None:
        """Take one message as received: topic, sequence number, batch. An unreadable message counts as lost."""
        self.live = self._linked
        try:
            _, number, payload = frames
            if len(number) != 8:
                raise EventsError(f"a sequence number of {len(number)} bytes, expected 8")
            sequence = int.from_bytes(number)
            if sequence != self.expected:
                self._lose()
                if sequence < self.expected:  # a new process, so an empty cache
                    self._clear(now)
            self.expected = sequence + 1
            events = events_from(payload)
        except ValueError as error:
            self.problem = str(error)
            self._lose()
            return
        self.problem = ""
        for event in events:
            if isinstance(event, BlockRemoved):
                self._removed(event)
            elif isinstance(event, BlockStored):
                self._store(event, now)
            else:
                self._clear(now)

    def _store(self, event: BlockStored, now: float) -> None:
        if event.kv_cache_spec_kind not in KINDS or event.medium not in GPU:
            return
        if event.block_size > self._block_size:
            self.stored.clear()
            self._block_size = event.block_size
        elif event.block_size < self._block_size:
            return  # a part of a block, which is given up as soon as the block is full
        stored, mask, group = self.stored, self._mask, event.group_idx
        for block in event.block_hashes:
            key = _key(block, group)
            if not key & mask:
                stored.setdefault(key, now)  # of two copies the older one goes first
        if len(stored) > BLOCKS_TRACKED:
            self._mask = mask = 2 * mask + 1
            self.stored = {key: at for key, at in stored.items() if not key & mask}

    def _removed(self, event: BlockRemoved) -> None:
        if event.medium not in GPU:
            return
        stored, group = self.stored, event.group_idx
        for block in event.block_hashes:
            at = stored.pop(_key(block, group), self.cut)
            if at > self.cut:
                heapq.heappush(self._young, at)
                if len(self._young) >= LATEST:
                    self.cut = heapq.heappop(self._young)

    def _clear(self, now: float) -> None:
        self.cut = now
        self.stored.clear()
        self._young.clear()

    def _lose(self) -> None:
        """Forget the cached blocks, because an event was missed. Blocks known to be evicted stay evicted."""
        self.stored.clear()
        self._block_size = 0


def _key(block: Hash, group: int | None) -> int:
    if isinstance(block, bytes):
        block = int.from_bytes(block[-8:])
    return hash((block, group)) if group else block
