"""GPU memory of an engine from its start to its end, and the durations of start, sleep and wake.

Pure numbers, for a process in real time and for a simulation in virtual time alike. Bytes are on each of the engine's
GPUs, times are seconds at speed 1. A start is reading the weights from disk and 10 s more: vLLM needs that for a model
of 8B with its compiled graphs in a cache (without one: a minute more). The others are in the ranges of vLLM's own blog
on sleep mode: awake again 0.3 to 0.8 s after level 1 for small models, 3 to 6 s for large ones, and 0.9 to 2.6 s after
level 2, whose weights come from the page cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

GIB = 1 << 30
RESIDUE = GIB  # CUDA context, libraries and graphs: there from the first moment to the last, asleep too
SHARDS = 4  # files that the weights are in

DISK = 2e9  # bytes of weights a second
PAGE_CACHE = 8e9
TO_HOST = 10e9  # into pinned memory that has to be had first
FROM_HOST = 12e9
IMPORTS, CONTEXT, COMPILE, PROFILE, CAPTURE = 2.5, 1.0, 3.0, 1.0, 2.5  # seconds: what a start does besides reading

Level = Literal[1, 2]


class StartupStage(msgspec.Struct, frozen=True):
    """A part of a start: it takes `seconds` and then says `line`.

    From its beginning on the engine holds so much of its weights, and its KV cache or not; `loaded` None: nothing.
    """

    seconds: float
    line: str
    loaded: float | None = 1.0
    cache: bool = False


def residue(claim: int) -> int:
    """Bytes that an engine keeps asleep which takes `claim` bytes awake."""
    return min(claim, RESIDUE)


def held(weights: int, claim: int, *, loaded: float, cache: bool) -> int:
    """Bytes held with a share `loaded` of the weights in GPU memory, and with the KV cache or without it.

    With both it is the claim, whatever the weights: the cache takes the rest.
    """
    kept = residue(claim)
    read = min(weights, claim - kept)
    return kept + int(read * loaded) + (claim - kept - read) * cache


def start(weights: int, claim: int) -> Iterator[StartupStage]:
    """The stages of a start, in vLLM's words."""
    reading = weights / DISK
    cache = claim - held(weights, claim, loaded=1.0, cache=False)
    yield StartupStage(IMPORTS, "Initializing a V1 LLM engine (v0.32.0)", loaded=None)
    yield StartupStage(CONTEXT, "Starting to load model...", loaded=0.0)
    for shard in range(1, SHARDS + 1):
        percent = 100 * shard // SHARDS
        line = f"Loading safetensors checkpoint shards: {percent:3d}% Completed | {shard}/{SHARDS}"
        yield StartupStage(reading / SHARDS, line, loaded=shard / SHARDS)
    yield StartupStage(0.0, f"Model loading took {weights / GIB:.2f} GiB memory and {reading:.2f} seconds")
    yield StartupStage(COMPILE, f"torch.compile took {COMPILE:.2f} s in total")
    yield StartupStage(PROFILE, f"Available KV cache memory: {cache / GIB:.2f} GiB", cache=True)
    for percent in (50, 100):
        yield StartupStage(
            CAPTURE / 2, f"Capturing CUDA graphs (mixed prefill-decode, PIECEWISE): {percent:3d}%", cache=True
        )
    yield StartupStage(0.0, "Application startup complete.", cache=True)


def sleep_seconds(weights: int, level: Level) -> float:
    """Level 1 copies the weights to the host, level 2 drops them."""
    return 0.2 + weights / TO_HOST if level == 1 else 0.3


def wake_weights_seconds(weights: int, level: Level) -> float:
    """To have the memory of the weights back, and at level 1 the weights."""
    return 0.2 + weights / FROM_HOST if level == 1 else 0.3


def reload_seconds(weights: int) -> float:
    """To read the weights again, after level 2."""
    return 0.3 + weights / PAGE_CACHE


def wake_cache_seconds() -> float:
    """To have the memory of the KV cache back."""
    return 0.1


def wake_seconds(weights: int, level: Level) -> float:
    """All that waking from this level takes."""
    again = reload_seconds(weights) if level == 2 else 0.0
    return wake_weights_seconds(weights, level) + again + wake_cache_seconds()
