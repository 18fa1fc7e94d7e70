"""Measured GPU memory of an engine, kept from one run of the sidecar to the next.

A measurement replaces the estimate while the profile's settings stay as they were. It can be of the wrong thing (an
engine that was asleep, or gone), so memory.py bounds how far below the weights it may lead.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

_Memory = Annotated[int, msgspec.Meta(ge=0, le=2**50)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Measured memory of one engine, in bytes on the GPU that took most: its `peak` while starting, `settled` once
    ready, and `kv`, the part of them that is KV cache. `settings`: any text that changes when the profile's settings
    do.

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
