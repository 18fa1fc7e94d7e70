"""GPUs that are a folder: for tests and the demo, shared by processes, and there for as long as the folder is.

The folder is hardware and driver in one. Every file holds one line of ASCII:

    GPU-0.total          the bytes of GPU 0: there is a GPU for each such file, numbered from 0
    GPU-0.4711.98765     the bytes that process 4711 holds on GPU 0; 98765 is when it was started, the 22nd field of
                         /proc/4711/stat (clock ticks since boot), so that a later process 4711 is not taken for it

and these are faults, put there and removed by whoever wants them:

    error                the driver fails, with this text; a FIFO instead of a file: it hangs until one writes to it
    GPU-0.error          GPU 0 fails, with this text
    GPU-0.lost           GPU 0 has fallen off the bus
    GPU-0.mig            GPU 0 is divided by MIG
    GPU-0.return         memory of GPU 0 is free again only this many seconds after it was given up; inf: never

A process claims and resizes by writing its file (under another name first that begins with a dot, then renamed, so
that nobody reads half of it) and releases by removing it. Whoever ends, by SIGKILL too, has released: the file of a
process that has ended does not count, and is removed by the next snapshot once its memory is free again. `claim` does
all this; a program that may not import it needs no more than the two lines above.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from gateway.shared.files.units import GIB
from sidecar.core.gpus import GPU, GPUError, Selection, chosen

_CLAIM = re.compile(r"GPU-(?P<index>[0-9]+)\.(?P<pid>[0-9]+)\.(?P<start>[0-9]+)")
ENTRY_BYTES = 4096  # of a file in the folder that are read
_LOST = "it has fallen off the bus (simulated)"
_MIG = "it is divided by MIG, and the sidecar uses whole GPUs (simulated)"


class OutOfMemory(Exception):
    """A GPU has less free than was asked for; the message is torch's."""


class HeldMemory(msgspec.Struct, frozen=True):
    """Bytes that one process, alive or not, has said it holds on one GPU."""

    name: str
    index: int
    pid: int
    size: int
    alive: bool


class Late(msgspec.Struct, frozen=True):
    """Memory that was given up at `since`, as far as the driver noticed, and is perhaps not free yet."""

    name: str
    index: int
    size: int
    since: float


def lay_out(folder: Path, sizes: Sequence[int]) -> None:
    """Make `folder` one of GPUs of these many bytes. Claims and faults that are in it already stay."""
    folder.mkdir(parents=True, exist_ok=True)
    for index, size in enumerate(sizes):
        (folder / f"GPU-{index}.total").write_text(str(size))


def total_of(folder: Path, index: int) -> int:
    """Bytes of a GPU. Raises GPUError if there is no such GPU."""
    total = _bytes(folder, f"GPU-{index}.total")
    if total is None:
        raise GPUError(f"there is no GPU {index} in {folder}")
    return total


def free(folder: Path, index: int) -> int:
    """Bytes that other processes leave of a GPU; those that ended count while a `return` fault keeps their memory.
    Raises GPUError if there is no such GPU."""
    own, late = _own(index), (folder / f"GPU-{index}.return").exists()
    others = (each for each in _claims(folder) if each.index == index and each.name != own)
    return total_of(folder, index) - sum(each.size for each in others if each.alive or late)


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
    """The GPUs of a folder (`core.gpus.GPUs`). `clock` gives monotonic seconds, for memory that returns late.

    Lateness counts from the snapshot that first saw the memory given up. A new object on the same folder knows of it
    only where its process has ended, and then counts anew.
    """

    def __init__(self, folder: Path, select: Selection = "all", *, clock: Callable[[], float] = time.monotonic) -> None:
        self.driver = "simulated"
        self._folder = folder
        self._select = select
        self._clock = clock
        self._held: dict[str, HeldMemory] = {}
        self._late: list[Late] = []

    def snapshot(self) -> tuple[GPU, ...]:
        """Each selected GPU as it is now. Raises GPUError (the fault, or a folder that is none) and Unselectable."""
        fault = _text(self._folder, "error")
        if fault is not None:
            raise GPUError(f"the GPUs cannot be read, the simulated driver says: {fault or 'unknown error'}")
        totals = list(_totals(self._folder))
        if not totals:
            raise GPUError(f"there is no simulated GPU in {self._folder}")
        indices = chosen(self._select, [_uuid(index) for index in range(len(totals))], None)
        self._notice()
        return tuple(self._gpu(index, totals[index]) for index in indices)

    def close(self) -> None:
        """Nothing is open."""

    def _notice(self) -> None:
        """Compare what is held with what was, and put on the late list what was given up."""
        now = self._clock()
        claims = {each.name: each for each in _claims(self._folder)}
        for name, was in (claims | self._held).items():
            claim = claims.get(name)
            given_up = was.size - (claim.size if claim is not None and claim.alive else 0)
            if given_up > 0:
                self._late.append(Late(name, was.index, given_up, now))
        self._late = [
            late for late in self._late if now - late.since < _seconds(self._folder, f"GPU-{late.index}.return")
        ]
        kept = {late.name for late in self._late}
        self._held = {name: msgspec.structs.replace(each, size=each.size * each.alive) for name, each in claims.items()}
        for name, claim in claims.items():
            if not claim.alive and name not in kept:
                (self._folder / name).unlink(missing_ok=True)
                del self._held[name]

    def _gpu(self, index: int, total: int) -> GPU:
        processes = {each.pid: each.size for each in self._held.values() if each.index == index and each.alive}
        late = sum(each.size for each in self._late if each.index == index)
        used = min(total, sum(processes.values()) + late)
        refused = _MIG if (self._folder / f"GPU-{index}.mig").exists() else ""
        gpu = GPU(
            index=index,
            uuid=_uuid(index),
            name="simulated GPU",
            total=total,
            used=used,
            free=total - used,
            processes=processes,
            refused=refused,
        )
        if (self._folder / f"GPU-{index}.lost").exists():
            return gpu.unreadable(_LOST)
        fault = _text(self._folder, f"GPU-{index}.error")
        return gpu if fault is None else gpu.unreadable(f"NVML: {fault or 'unknown error'} (simulated)")


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
            yield HeldMemory(name, int(match["index"]), pid, size, _started(pid) == int(match["start"]))


def _own(index: int) -> str:
    """Name of this process's file."""
    return f"GPU-{index}.{os.getpid()}.{_started(os.getpid())}"


def _started(pid: int) -> int | None:
    """Start time of a process, in clock ticks since boot; None for one that has ended, also if it is not reaped, or
    that /proc hides from us."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


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


def _seconds(folder: Path, name: str) -> float:
    """The seconds in a file, 0 without the file; inf is a number of them. Raises GPUError for anything else."""
    text = _text(folder, name) or "0"
    try:
        return float(text)
    except ValueError:
        raise GPUError(f"{folder / name} holds {text[:40]!r}, where seconds or inf belong") from None


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
