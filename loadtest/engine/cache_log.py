"""KV cache events of the prefix cache, as vLLM publishes them: `--kv-events-config`, publisher `zmq`.

Blocks are stored, evicted and dropped. A batch is msgpack, `[time, events, data-parallel rank]`. Events are maps with
their `type`, as since vLLM 0.24. Hashes are unsigned and have 64 bits. The simulated
cache knows no tokens, so token ids are invented, as many as a block has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from loadtest.engine.sequence import BLOCK

WORD = (1 << 64) - 1
_encode = msgspec.msgpack.Encoder().encode


class CacheLog:
    """Collects events until `batch` takes them, as vLLM's scheduler does after each step."""

    def __init__(self) -> None:
        self._events: list[Any] = []

    def stored(self, parent: int | None, hashes: Sequence[int]) -> None:
        """Full blocks that can be found from now on, each the next one's parent."""
        numbers = [block & WORD for block in hashes]
        self._tell(
            "BlockStored",
            block_hashes=numbers,
            parent_block_hash=None if parent is None else parent & WORD,
            token_ids=[number & 0x7FFF for number in numbers for _ in range(BLOCK)],
            block_size=BLOCK,
            lora_id=None,
            medium="GPU",
        )

    def removed(self, hashes: Sequence[int]) -> None:
        """Blocks that were evicted: one event each, as vLLM's."""
        for block in hashes:
            self._tell("BlockRemoved", block_hashes=[block & WORD], medium="GPU")

    def cleared(self) -> None:
        """Every block at once, by sleep or by a reset."""
        self._tell("AllBlocksCleared")

    def _tell(self, kind: str, **fields: object) -> None:
        self._events.append({"type": kind, **fields})

    def batch(self, now: float) -> bytes | None:
        """Encode the events since the last call; None if there were none. `now`: seconds, for the batch's time."""
        if not self._events:
            return None
        events, self._events = self._events, []
        return _encode([now, events, 0])
