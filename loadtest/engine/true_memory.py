"""Memory that an engine really takes, where that is not what was claimed for it, and its words for what it lacks.

A sidecar estimates; this is the truth that its estimate may miss. Bytes are on each GPU. On simulated GPUs a file of
their folder, MODEL.memory, has it in JSON; without that the engine takes what was claimed.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from loadtest.engine.memory_stages import GIB, RESIDUE
from loadtest.engine.vllm_lines import line

CONTEXT = GIB // 2  # what CUDA's context takes before vLLM looks at what is free
SEQUENCES = 1024  # vLLM's own `--max-num-seqs` on a large GPU

_Bytes = Annotated[int, msgspec.Meta(ge=0, le=2**50)]


class Shortage(msgspec.Struct, frozen=True):
    """A start's want of memory, or what it refuses: its kind (as `sidecar diagnose` calls it) and vLLM's line."""

    kind: str
    line: str


class TrueMemory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`rest`: what its share has to hold beside the KV cache; `context`: KV cache of one whole context, of so many
    `tokens`.

    `beyond`: taken beside its share, less than 0: so much of it is left. `blocks`: sequences for which a hybrid model's
    states have room, None: it is none. `hidden`: of a GPU's bytes those that CUDA does not report. `residue`: kept
    asleep, and with each sleep `grows` more. `longest`: the longest context in tokens that vLLM derives, None: any.
    `wording`: which version's words it writes.
    """

    rest: _Bytes
    context: _Bytes
    tokens: Annotated[int, msgspec.Meta(ge=1, le=2**50)] = 8192
    beyond: Annotated[int, msgspec.Meta(ge=-(2**50), le=2**50)] = 0
    blocks: Annotated[int, msgspec.Meta(ge=0)] | None = None
    hidden: _Bytes = 0
    residue: _Bytes = RESIDUE
    grows: _Bytes = 0
    longest: Annotated[int, msgspec.Meta(ge=1)] | None = None
    wording: Annotated[int, msgspec.Meta(ge=0)] = 0

    def refuses(self, context_length: int | None) -> Shortage | None:
        """Refusal of a `--max-model-len`; None: it is none, or short enough."""
        if self.longest is None or context_length is None or context_length <= self.longest:
            return None
        return Shortage("bad_config", line("bad_config", 1, asked=context_length, longest=self.longest))

    def at_first(self, share: float, free: int, total: int, gpu: int = 0) -> Shortage | None:
        """Reason not to begin with this share (0..1) of a GPU of `total` bytes by NVML, `free` of them."""
        cuda = total - self.hidden
        told, desired = min(free, cuda) - CONTEXT, int(share * cuda)
        if told >= desired:
            return None
        numbers = {"gpu": gpu, "free": told / GIB, "total": cuda / GIB, "desired": desired / GIB}
        return self._says("free_memory_too_low", **numbers, utilization=share)

    def for_cache(
        self, share: float, sequences: int | None, total: int, context_length: int | None = None
    ) -> Shortage | None:
        """Shortage of its KV cache with this share, None: there is none; `sequences`: at most at once, None: vLLM's
        own number; `context_length`: tokens of a context, None: the whole."""
        left = int(share * (total - self.hidden)) - self.rest
        if left <= 0:
            return self._says("no_kv")
        length = context_length or min(self.tokens, self.longest or self.tokens)
        needed = self.context * length // self.tokens
        if left < needed:
            numbers = {"needed": needed / GIB, "available": left / GIB, "length": length}
            return self._says("kv_too_small", **numbers, fits=length * left // needed)
        asked = sequences or SEQUENCES
        if self.blocks is not None and asked > self.blocks:
            return self._says("mamba_blocks", sequences=asked, blocks=self.blocks)
        return None

    def full(self, size: int, free: int, total: int, gpu: int = 0) -> Shortage:
        """Reason not to have `size` bytes where `free` are free."""
        numbers = {"tried": (size - free) / GIB + 0.5, "free": 0.5, "total": (total - self.hidden) / GIB}
        return self._says("oom", **numbers, gpu=gpu, own=free / GIB)

    def takes(self, share: int) -> int:
        """Bytes it holds once it runs, of a share of so many."""
        return max(self.rest, share + self.beyond)

    def asleep(self, sleeps: int) -> int:
        """Bytes it keeps after so many sleeps."""
        return self.residue + self.grows * max(0, sleeps - 1)

    def _says(self, kind: str, **numbers: float) -> Shortage:
        return Shortage(kind, line(kind, self.wording, **numbers))
