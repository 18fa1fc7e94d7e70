"""GPUs that are a folder: for tests and the demo, shared by processes, and there for as long as the folder is.

The folder is hardware and driver in one. Every file holds one line of ASCII:

    GPU-0.total          the bytes of GPU 0: there is a GPU for each such file, numbered from 0
    GPU-0.4711.98765     the bytes that process 4711 holds on GPU 0; 98765 is when it was started, the 22nd field of
                         /proc/4711/stat (clock ticks since boot), so that a later process 4711 is not taken for it

and these are faults, put there and removed by whoever wants them:

    error                the driver fails, with this text; a FIFO instead of a file: it hangs until one writes to it
    GPU-0.lost           GPU 0 has fallen off the bus

A process claims and resizes by writing its file (under another name first that begins with a dot, then renamed, so
that nobody reads half of it) and releases by removing it. Whoever ends, by SIGKILL too, has released: the file of a
process that has ended does not count, and is removed by the next snapshot. `claim` does all this; a program that may
not import it needs no more than the two lines above.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from gateway.shared.files.units import GIB
from gateway.shared.process_start import born
from sidecar.core.gpus import GPU, GPUError, Selection, chosen

_CLAIM = re.compile(r"GPU-(?P<index>[0-9]+)\.(?P<pid>[0-9]+)\.(?P<start>[0-9]+)")
ENTRY_BYTES = 4096  # of a file in the folder that are read
_LOST = "it has fallen off the bus (simulated)"


class OutOfMemory(Exception):
    """A GPU has less free than was asked for; the message is torch's."""


class HeldMemory(msgspec.Struct, frozen=True):
    """Bytes that one process, alive or not, has said it holds on one GPU."""

    name: str
    index: int
    pid: int
    size: int
    alive: bool


def total_of(folder: Path, index: int) -> int:
    """Bytes of a GPU. Raises GPUError if there is no such GPU."""
    total = _bytes(folder, f"GPU-{index}.total")
    if total is None:
        raise GPUError(f"there is no GPU {index} in {folder}")
    return total


def free(folder: Path, index: int) -> int:
    """Bytes that other processes leave of a GPU. Raises GPUError if there is no such GPU."""
    own = _own(index)
    others = (each for each in _claims(folder) if each.index == index and each.name != own)
    return total_of(folder, index) - sum(each.size for each in others if each.alive)


def claim(folder: Path, sizes: Mapping[int, int]) -> None:
    """From now on this process holds so many bytes of each of these GPUs, whatever it held before; 0 releases.

    Raises OutOfMemory if that is more than the other processes leave of one, and GPUError if there is no such GPU:
    then it holds what it held.
    """
    with _locked(folder):
        for index, size in sizes.items():
            left = free(folder, index)
            if size > left:
                held = _bytes(folder, _own(index)) or 0
                raise OutOfMemory(
                    f"CUDA out of memory. Tried to allocate {(size - held) / GIB:.2f} GiB. GPU {index} has a total "
                    f"capacity of {total_of(folder, index) / GIB:.2f} GiB of which {(left - held) / GIB:.2f} GiB is "
                    f"free. Including non-PyTorch memory, this process has {held / GIB:.2f} GiB memory in use."
                )
        for index, size in sizes.items():
            own = folder / _own(index)
            if size:
                written = own.with_name(f".{own.name}")
                written.write_text(str(size))
                written.rename(own)
            else:
                own.unlink(missing_ok=True)


class SimulatedGPUs:
    """The GPUs of a folder (`core.gpus.GPUs`)."""

    def __init__(self, folder: Path, select: Selection = "all") -> None:
        self.driver = "simulated"
        self._folder = folder
        self._select = select

    def snapshot(self) -> tuple[GPU, ...]:
        """Each selected GPU as it is now. Raises GPUError (the fault, or a folder that is none) and Unselectable."""
        fault = _text(self._folder, "error")
        if fault is not None:
            raise GPUError(f"the GPUs cannot be read, the simulated driver says: {fault or 'unknown error'}")
        totals = list(_totals(self._folder))
        if not totals:
            raise GPUError(f"there is no simulated GPU in {self._folder}")
        indices = chosen(self._select, [_uuid(index) for index in range(len(totals))], None)
        held = []
        for each in _claims(self._folder):
            if each.alive:
                held.append(each)
            else:
                (self._folder / each.name).unlink(missing_ok=True)
        return tuple(self._gpu(index, totals[index], held) for index in indices)

    def close(self) -> None:
        """Nothing is open."""

    def _gpu(self, index: int, total: int, held: Sequence[HeldMemory]) -> GPU:
        processes = {each.pid: each.size for each in held if each.index == index}
        used = min(total, sum(processes.values()))
        gpu = GPU(
            index=index,
            uuid=_uuid(index),
            name="simulated GPU",
            total=total,
            used=used,
            free=total - used,
            processes=processes,
        )
        return gpu.unreadable(_LOST) if (self._folder / f"GPU-{index}.lost").exists() else gpu


def _uuid(index: int) -> str:
    return f"GPU-{index:08x}-5eed-5eed-5eed-{index:012x}"


def _totals(folder: Path) -> Iterator[int]:
    index = 0
    while (total := _bytes(folder, f"GPU-{index}.total")) is not None:
        yield total
        index += 1


def _claims(folder: Path) -> Iterator[HeldMemory]:
    for name in sorted(os.listdir(folder)):
        match = _CLAIM.fullmatch(name)
        size = _bytes(folder, name) if match else None
        if match and size is not None:
            pid = int(match["pid"])
            yield HeldMemory(name, int(match["index"]), pid, size, born(pid) == int(match["start"]))


def _own(index: int) -> str:
    """Name of this process's file."""
    return f"GPU-{index}.{os.getpid()}.{born(os.getpid())}"


def _text(folder: Path, name: str) -> str | None:
    try:
        with (folder / name).open("rb") as file:  # which a pipe holds up, as a driver that hangs does
            return file.read(ENTRY_BYTES).decode("ascii", "replace").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise GPUError(f"{folder / name}: {error.strerror}") from error


def _bytes(folder: Path, name: str) -> int | None:
    """The whole number in a file, None without the file. Raises GPUError for one that says something else."""
    text = _text(folder, name)
    if text is None:
        return None
    if not text.isdecimal():
        raise GPUError(f"{folder / name} holds {text[:40]!r}, where a number of bytes belongs")
    return int(text)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the folder for one claim at a time, because two claims that fit alone may not fit together. The kernel
    releases the lock when its holder ends."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
