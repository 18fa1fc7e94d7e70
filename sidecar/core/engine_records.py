"""Facts and records of engines, and the two ways in which they fail.

Sizing, processes and the manager exchange these, and the state file keeps the records. Bytes are per GPU.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from sidecar.core.addresses import EngineAddress
from sidecar.core.diagnosis import Diagnosis
from sidecar.core.inventory import Size
from sidecar.core.vllm import Completion


class EngineFailed(Exception):
    """An engine did not do what it had to; the message says what and why. `found`: what its output says went wrong, of
    one that was to start or wake. `wrong`: awake again, it answered otherwise than before."""

    def __init__(self, why: str, *, found: Diagnosis | None = None, wrong: bool = False) -> None:
        super().__init__(why)
        self.found = found
        self.wrong = wrong

    @property
    def out_of_memory(self) -> bool:
        """Whether the GPU had too little memory for its start or its waking."""
        return self.found is not None and self.found.out_of_memory


class Unusable(Exception):
    """A model that cannot be run as its profile is; the message says why, and what to change."""


class DiskHangs(Unusable):
    """A model whose files were not read in time."""


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that an engine tells of itself once it is ready; None: not told."""

    kv_tokens: int | None = None
    kv_bytes: int | None = None  # on each GPU
    context_length: int | None = None
    max_concurrency: int | None = None
    priorities: bool = False  # it was started with vLLM's priority scheduling
    canary: Completion | None = None


class ProcessRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Record of an engine's process, by which another sidecar finds it again; for the state file.

    `engine`: the value of its marker, SIDECAR/anything, never used twice. `started`: clock ticks since boot. `boot`:
    the boot id, since number and ticks may both come again after a reboot. `log`: its output's file.
    """

    engine: str
    pid: int
    started: int
    boot: str
    log: str
    address: EngineAddress = msgspec.field(name="place")  # as state files have it


class EngineRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Record of an engine, by which another sidecar adopts it. `level`: that it sleeps at; 0: it is awake. `settings`:
    a digest of its profile as it was started. `host`: bytes of host memory that it has taken for sleep at level 1.
    `first_residue`: what it kept at its first sleep, 0: it has not slept."""

    process: ProcessRecord
    gpus: tuple[int, ...]
    size: Size
    settings: str
    told: EngineFacts = EngineFacts()
    level: Literal[0, 1, 2] = 0
    host: int = 0
    first_residue: int = 0
