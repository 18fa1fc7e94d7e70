"""GPUs as the sidecar sees them: the reading of one, the selection of those it may use, and the return of memory.

A GPU's number is NVML's, which is nvidia-smi's: the order of the PCI bus. CUDA numbers the fastest first unless told
otherwise. So an engine's environment has `CUDA_DEVICE_ORDER=PCI_BUS_ID` beside `CUDA_VISIBLE_DEVICES`, with these
numbers; not every vLLM takes UUIDs there. Memory is in bytes, and signed: the difference of two readings may be
negative.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, TypeAlias

import msgspec

SHARE = 0.75  # of what was claimed; the driver keeps a little, and readings of a busy GPU are not exact

Selection: TypeAlias = Literal["all"] | Sequence[int]


class GPUError(Exception):
    """The GPUs as a whole cannot be read. The message says why, and what to do where there is something."""


class NoNVML(GPUError):
    """No NVIDIA driver is installed or loaded, so no engine can run on a GPU of this machine."""


class Unselectable(Exception):
    """The GPUs asked for are not there, or not this process's to use. The message names them."""


class GPU(msgspec.Struct, frozen=True, kw_only=True):
    """Reading of a GPU at one moment.

    The sidecar lists a `refused` GPU and starts nothing on it. If the GPU is not `readable`, none of its memory counts
    as free, and every field that was never read is empty or 0.
    """

    index: int
    uuid: str = ""
    name: str = ""
    total: int = 0  # bytes
    used: int = 0  # bytes, what the driver keeps for itself included: total - free
    free: int = 0  # bytes
    utilization: int | None = None  # percent of the last sampling period; None: not told
    processes: dict[int, int] = {}  # bytes by pid, 0 where only the pid is told
    processes_hidden: bool = False  # whether `processes` says less than there is: no permission, or no such function
    unified: bool = False  # its memory is the host's: every process of the machine counts
    refused: str = ""  # why it may not be used
    readable: bool = True

    def unreadable(self, why: str) -> GPU:
        """Return this GPU as it counts once it can no longer be read: all its memory is used. `why`: the reason."""
        known = GPU(index=self.index, uuid=self.uuid, name=self.name, total=self.total, unified=self.unified)
        return msgspec.structs.replace(known, used=self.total, processes_hidden=True, refused=why, readable=False)


class GPUs(Protocol):
    """The GPUs of this machine that the sidecar may use: real ones, or a folder that simulates them.

    One caller at a time. `snapshot` blocks for as long as the driver does. `sidecar.gpus.monitor` sees to both.
    """

    @property
    def driver(self) -> str:
        """The driver's version, empty before the first snapshot."""

    def snapshot(self) -> tuple[GPU, ...]:
        """Each selected GPU as it is now, by ascending index. Raises GPUError where there is no telling, and
        Unselectable (at the first call) for a selection that cannot be met. The next call tries everything anew."""

    def close(self) -> None:
        """Give the driver back. A later snapshot opens it again."""


def chosen(select: Selection, uuids: Sequence[str], visible: str | None) -> tuple[int, ...]:
    """The indices of the selected GPUs, ascending.

    `uuids` are those of the machine's GPUs by index, empty where one is not known. `visible` is CUDA_VISIBLE_DEVICES,
    read as CUDA reads it (empty: none; what follows a name of no GPU does not count) except that its numbers are
    NVML's, too: it limits "all", and numbers beyond it are refused. Raises Unselectable.
    """
    seen = tuple(range(len(uuids))) if visible is None else _visible(visible, uuids)
    if select == "all":
        return tuple(sorted(seen))
    for index in select:
        if index >= len(uuids):
            raise Unselectable(f"there is no GPU {index}: this machine has {_listed(uuids)}")
        if index not in seen:
            raise Unselectable(
                f"GPU {index} is not in CUDA_VISIBLE_DEVICES={visible}, which this sidecar was started with"
            )
    return tuple(sorted(select))


def _visible(text: str, uuids: Sequence[str]) -> tuple[int, ...]:
    found = []
    for name in filter(None, (part.strip() for part in text.split(","))):
        if name.startswith("MIG-"):
            raise Unselectable(f"CUDA_VISIBLE_DEVICES={text} names a MIG slice; the sidecar uses whole GPUs")
        index = _named(name, uuids)
        if index is None:
            break
        found.append(index)
    return tuple(dict.fromkeys(found))


def _named(name: str, uuids: Sequence[str]) -> int | None:
    if name.isdecimal():
        return int(name) if int(name) < len(uuids) else None
    matches = [index for index, uuid in enumerate(uuids) if name.startswith("GPU-") and uuid.startswith(name)]
    return matches[0] if len(matches) == 1 else None


def _listed(uuids: Sequence[str]) -> str:
    return ", ".join(f"{index} ({uuid or 'not readable'})" for index, uuid in enumerate(uuids)) or "none"


def returned(before: int, after: int, claim: int, share: float = SHARE) -> bool:
    """Whether the memory of an engine that has gone is back.

    `before` and `after` are a GPU's used bytes while the engine was there and now, `claim` the bytes it really held.
    The difference is signed: a neighbour that grew meanwhile makes it negative: not back, and no huge number.
    """
    return claim == 0 or before - after >= share * claim


def taken(before: GPU, now: GPU) -> int:
    """Bytes that processes have come to hold since the reading `before`, by NVML's word; 0 where it tells none. By
    totals a neighbour that grows meanwhile looks like memory that has not come back."""
    return sum(max(0, held - before.processes.get(pid, 0)) for pid, held in now.processes.items())
