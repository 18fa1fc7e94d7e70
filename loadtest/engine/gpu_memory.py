"""Memory of simulated GPUs that a process holds: a folder that it shares with others.

`FOLDER/GPU-0.total` is the size of GPU 0 in bytes; `FOLDER/GPU-0.PID.START` what the process PID holds, START being the
22nd field of /proc/PID/stat, which tells it from a later process of that number. What has ended holds nothing, unless
`FOLDER/GPU-0.return` keeps it. Whoever lays the folder out describes it in full: the sidecar's simulated driver.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

GIB = 1 << 30
_HELD = re.compile(r"GPU-(?P<index>[0-9]+)\.(?P<pid>[0-9]+)\.(?P<start>[0-9]+)")


class OutOfMemory(Exception):
    """A GPU has too little left; the message is torch's."""


class GpuMemory:
    """Memory this process holds on some GPUs of a folder. `totals`: bytes of each. Raises ValueError where there is no
    such GPU."""

    def __init__(self, folder: Path, gpus: Sequence[int]) -> None:
        self.folder = folder
        self.totals: Mapping[int, int] = {index: _total(folder, index) for index in gpus}

    def free(self, index: int) -> int:
        """Bytes that a GPU has left beside what others hold; our own count as free."""
        late = (self.folder / f"GPU-{index}.return").exists()
        return self.totals[index] - sum(_others(self.folder, index, own=self._own(index), late=late))

    def hold(self, size: Callable[[int], int]) -> None:
        """From now on hold `size(total)` bytes of each GPU, whatever it was before. Raises OutOfMemory: as before."""
        wanted = {index: size(total) for index, total in self.totals.items()}
        with _locked(self.folder):
            for index, bytes_ in wanted.items():
                free = self.free(index)
                if bytes_ > free:
                    holds = _held(self.folder / self._own(index))
                    tried, left, total = ((size - holds) / GIB for size in (bytes_, free, self.totals[index] + holds))
                    raise OutOfMemory(
                        f"CUDA out of memory. Tried to allocate {tried:.2f} GiB. GPU {index} has a total capacity of "
                        f"{total:.2f} GiB of which {left:.2f} GiB is free. Including non-PyTorch memory, this process "
                        f"has {holds / GIB:.2f} GiB memory in use."
                    )
            for index, bytes_ in wanted.items():
                own = self.folder / self._own(index)
                written = own.with_name(f".{own.name}")  # nobody reads half of it
                written.write_text(str(bytes_))
                written.rename(own)

    def release(self) -> None:
        """Hold nothing any more."""
        for index in self.totals:
            (self.folder / self._own(index)).unlink(missing_ok=True)

    def _own(self, index: int) -> str:
        return f"GPU-{index}.{os.getpid()}.{_started(os.getpid())}"


def _total(folder: Path, index: int) -> int:
    try:
        return int((folder / f"GPU-{index}.total").read_text())
    except FileNotFoundError:
        raise ValueError(f"there is no GPU {index} in {folder}") from None


def _others(folder: Path, index: int, *, own: str, late: bool) -> Iterator[int]:
    for name in os.listdir(folder):
        match = _HELD.fullmatch(name)
        if match is None or int(match["index"]) != index or name == own:
            continue
        if late or _started(int(match["pid"])) == int(match["start"]):
            yield _held(folder / name)


def _held(file: Path) -> int:
    """Bytes that a process holds of one GPU, by its file; 0 without: it holds none, or has just released them."""
    try:
        return int(file.read_text())
    except FileNotFoundError:
        return 0


def _started(pid: int) -> int | None:
    """Start of a process, in clock ticks since boot; None for one that has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock: two claims that fit alone may not fit together. The lock ends with its holder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
