"""Measurements of engines that run, and lessons of starts that failed for memory: what the estimate did not know.

A lesson is what vLLM's own lines say. Both are kept from one run of the sidecar to the next while the profile's
settings are what they were. A measurement replaces what a lesson says of needs. Sizes are bytes on each GPU.
"""

from __future__ import annotations

import math
from typing import Annotated

import msgspec

from gateway.shared.files.units import GIB, MIB
from sidecar.core.diagnosis import Diagnosis
from sidecar.core.inventory import Size

STEP, STEP_SHARE = 512 * MIB, 20  # by which a start that ran out of memory takes more than its share; its 20th part
MOST_BEYOND = 4  # a share's fourth part: who takes more beside it was not the one that filled the GPU
MOST_CONTEXT = GIB  # of a CUDA context; what else is less free than NVML has said, others have taken
AGAIN = "memory_changed"  # what says that nothing is wrong but the moment

_Memory = Annotated[int, msgspec.Meta(ge=0, le=2**50)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Measured memory of one engine, in bytes on the GPU that took most: its `peak` while starting, `settled` once
    ready, and `kv`, the part of them that is KV cache. `settings`: any text that changes when the profile's settings
    do. It replaces the estimate while they stay as they were. It can be of the wrong thing (an engine that was asleep,
    or gone), so sizing/memory.py bounds how far below the weights it may lead.

    Raises ValueError unless peak >= settled >= kv.
    """

    settings: _Name
    peak: _Memory
    settled: _Memory
    kv: _Memory

    def __post_init__(self) -> None:
        if not self.peak >= self.settled >= self.kv:
            raise ValueError(f"a peak of {self.peak} bytes, {self.settled} settled, {self.kv} of KV cache")

    @property
    def without_kv(self) -> int:
        """Weights, activations and overhead."""
        return self.peak - self.kv


def measurement(settings: str, peak: int, settled: int, kv: int) -> Measured | None:
    """Observations of one engine, in bytes per GPU, as a Measured; None where they cannot be of an engine that ran.

    They are samples of NVML, taken every second at best: the peak may have been missed. What contradicts the rest is
    not believed.
    """
    if not 0 < kv < settled:
        return None
    return Measured(settings=settings, peak=max(peak, settled), settled=settled, kv=kv)


class Lesson(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that failed starts of one profile have taught. `settings`: any text that changes when the profile's
    settings do.

    `rest`: bytes that the share has to hold beside the KV cache, at least; `exact`: vLLM reported `rest`, instead of
    only exceeding it. `context`: KV cache of a context of `tokens`, 0: of the model's own or the profile's. `beyond`:
    bytes that have to be free beside the share. `over`: bytes that were free there, no more could be, and they were too
    few. `most`: the largest share that was free. `sequences`: number of sequences for whose states a hybrid model has
    room. `longest`: tokens of the longest context that vLLM derives for the model. `cuda`: bytes that CUDA reports of a
    GPU of which NVML says `total`. 0, None: not learned.
    """

    settings: _Name
    rest: _Memory = 0
    exact: bool = False
    context: _Memory = 0
    tokens: _Memory = 0
    beyond: _Memory = 0
    over: _Memory = 0
    most: _Memory | None = None
    sequences: Annotated[int, msgspec.Meta(ge=1, le=2**20)] | None = None
    longest: Annotated[int, msgspec.Meta(ge=0, le=2**40)] = 0
    total: _Memory = 0
    cuda: _Memory = 0

    def after(self, measured: Measured | None, total: int) -> Lesson:
        """The rest of it once the engine runs on GPUs of `total` bytes. A measurement replaces needs beside the KV
        cache, unless it was of less than these. What was too little on smaller GPUs still is."""
        kept = msgspec.structs.replace(self, most=None, over=self.over if total > self.total > 0 else 0)
        if measured is None or measured.without_kv < self.rest:
            return kept
        return msgspec.structs.replace(kept, rest=0, exact=False)


class FailedStart(msgspec.Struct, frozen=True, kw_only=True):
    """A start of this `size` that failed as `found`, on GPUs that have `total` bytes by NVML, `free` of them before."""

    size: Size
    found: Diagnosis
    total: int
    free: int


def learn(known: Lesson | None, failed: FailedStart, settings: str) -> Lesson | None:
    """`known` with what this start has taught; None: nothing.

    `kv_too_small` tells how much of the share was left for the KV cache, and how much a context needs; vLLM before 0.9
    tells both in tokens alone, which are as large as estimated then. `no_kv`: that
    nothing was left. `mamba_blocks`: for how many sequences there are states. `free_memory_too_low`: what was free once
    the engine had its CUDA context, and that what was left beside the share is too little. `oom`: that the engine takes
    more than its share; and where no more than was left beside it can be left, that this is too little. `bad_config`:
    that a context which the sidecar chose is longer than vLLM derives.
    """
    lesson = known if known is not None and known.settings == settings else Lesson(settings=settings)
    size, found, told = failed.size, failed.found, failed.found.numbers
    share = size.start_needs - size.beyond
    # At least so much was free beside the share: CUDA's total is smaller. 0: it had none.
    left = failed.free - math.ceil(size.share * failed.total) if size.share else 0

    def told_bytes(name: str, otherwise: int = 0) -> int:
        return int(told[name] * GIB) if 0 <= told.get(name, -1.0) < 2**20 else otherwise

    changes: dict[str, int] = {}
    if "total_gib" in told:
        changes |= {"total": failed.total, "cuda": min(failed.total, told_bytes("total_gib"))}
    if found.kind == "kv_too_small":
        tokens = told.get("max_model_len", size.context_length or 0)
        held = told.get("available_tokens", 0) * size.context // tokens if tokens else 0
        left = told_bytes("available_gib", int(held))
        changes["rest"] = max(lesson.rest, share - left)
        changes["exact"] = "available_gib" in told
        changes |= {"context": told_bytes("needed_gib", size.context), "tokens": int(tokens)}
    elif found.kind == "no_kv" or (found.kind == "mamba_blocks" and told["blocks"] < 1):
        changes |= {"rest": max(lesson.rest, share), "exact": False}
    elif found.kind == "mamba_blocks":
        changes["sequences"] = min(lesson.sequences or 2**20, int(told["blocks"]))
    elif found.kind == "free_memory_too_low" and "free_gib" in told:
        free = told_bytes("free_gib")
        own = max(0, failed.free - free)
        changes |= {"most": free, "beyond": max(lesson.beyond, min(own, MOST_CONTEXT))}
        if own <= MOST_CONTEXT + failed.total - changes.get("cuda", failed.total) and 0 < left <= share // MOST_BEYOND:
            changes["over"] = max(lesson.over, left)
    elif found.kind == "oom":
        lacks = told_bytes("tried_gib") - told_bytes("free_gib")
        more = max(STEP, share // STEP_SHARE, lacks, 2 * size.beyond)
        changes["beyond"] = max(lesson.beyond, min(more, share // MOST_BEYOND))
        most = size.beyond < lesson.beyond or changes["beyond"] == lesson.beyond  # no more could be left
        if most and 0 < left <= share // MOST_BEYOND:
            changes |= {"over": max(lesson.over, left), "beyond": max(lesson.beyond, left)}
    elif found.kind == "bad_config" and 0 < told.get("derived_len", 0) < (size.context_length or 0):
        changes["longest"] = int(told["derived_len"])
    return msgspec.structs.replace(lesson, **changes) if changes else None


def taken_by_others(found: Diagnosis, free: int) -> int:
    """Bytes that others have taken of a GPU of which `free` were free before a start, by what the engine said as it
    failed; 0: it told nothing of others.

    torch tells what the process itself holds. At vLLM's first look that is a CUDA context, so at most MOST_CONTEXT.
    NVML and CUDA count up to as much differently.
    """
    own = MOST_CONTEXT if found.kind == "free_memory_too_low" else found.numbers.get("own_gib", math.inf) * GIB
    taken = free - found.numbers.get("free_gib", math.inf) * GIB - own
    return int(taken) if taken > MOST_CONTEXT else 0


def lower_share(share: float, lesson: Lesson, total: int) -> float:
    """Share (0..1, in hundredths) to try of a GPU of `total` bytes, after a start with `share` ran out of memory: lower
    by what such starts have taken beside theirs."""
    return max(1, math.floor(100 * (share - lesson.beyond / total))) / 100
