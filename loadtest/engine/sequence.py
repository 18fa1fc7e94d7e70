"""Sequence of tokens on its way through the engine, handed from part to part.

It carries counts and block hashes, never tokens. The scheduler owns every field below `owner`; nobody else writes them.
"""

from __future__ import annotations

from collections.abc import Sequence as Hashes
from enum import Enum
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from loadtest.engine.blocks import BlockChain

BLOCK = 16  # tokens in one KV block, vLLM's default on GPUs


class SequenceState(Enum):
    """State of a sequence. FINISHED and ABORTED are final and hold no blocks."""

    HELD = "held"  # sent to a sleeping engine: not even counted as waiting
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    ABORTED = "aborted"

    __hash__ = object.__hash__


class Sequence(msgspec.Struct, eq=False):
    """`prompt` tokens to read, then `output` tokens to write (0: a pooling request, done once its prompt is read).

    `hashes` are the chained hashes of its full blocks, prompt first, as far as they are known; where they go on into
    the output, a later prompt that repeats this answer finds it cached. `reason` is how it will end: "stop" or
    "length". `priority`: lower runs sooner, under the priority policy only. `owner` is the driver's own.

    While it decodes, one token per step, its numbers are not touched: `generated` and `computed` were true at step
    `since`, and what they are now follows from the number of steps since then.
    """

    prompt: int
    output: int
    hashes: Hashes[int] = ()
    reason: str = "length"
    priority: int = 0
    owner: Any = None

    state: SequenceState = SequenceState.WAITING
    key: tuple[float, float, int] = (0.0, 0.0, 0)  # its place among the waiting
    generated: int = 0  # output tokens written, as of step `since`
    computed: int = 0  # tokens whose KV is in the cache, as of step `since`
    since: int = 0
    ends_at: int = -1  # the step that writes its last token; -1 unless it decodes
    bucket: int = -1  # the step, modulo BLOCK, at which it needs another block; -1 unless it decodes
    owns: int = 0  # blocks held, shared ones included, while it does not decode
    held: list[BlockChain] = []  # the cached blocks it holds, in order
    published: int = 0  # leading blocks already offered to the cache
    cached: int = -1  # prompt tokens found in the cache when it first ran; -1: it has not
    preemptions: int = 0
    keeps: bool = False  # its blocks stay in use after its last token, until `Scheduler.release`
    loaded: int = 0  # prompt tokens whose KV came from another engine
    arrived_at: float = 0.0  # seconds, the driver's clock
    first_token_at: float = -1.0

    def __repr__(self) -> str:
        return f"<Sequence {self.prompt}+{self.output} {self.state.value}, {self.generated} written at {self.since}>"


def blocks_for(tokens: int) -> int:
    """Blocks that hold `tokens` tokens, the last one perhaps not full."""
    return -(-tokens // BLOCK)
