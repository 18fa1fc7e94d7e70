"""Machine that is only numbers: GPUs, host memory, who holds them, and what goes wrong there.

vLLM does not forgive two engines of one GPU that start, sleep or wake at once: `Machine.overlaps` has these.
`Machine.crowded` has the starts begun where too little was free for what was claimed, `Machine.cut_off` the engines
that were ended with calls in them.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import count
from typing import Literal

import msgspec

from loadtest.engine.memory_stages import GIB
from loadtest.engine.true_memory import Shortage
from sidecar.core.diagnosis import diagnosis
from sidecar.core.engine_records import EngineFailed
from sidecar.core.gpus import GPU, GPUError

HOST_PIDS = 1_000_000  # what a process's number is more on the host than in its container
UNSEEN_FOR = 2.0  # seconds for which nobody may know of memory that others have taken

Listing = Literal["own", "host", "none"]  # pids that NVML tells: as ours, as the host's (in a container), none


class MachineFaults(msgspec.Struct):
    """Faults of a machine, to be changed at any time. `fail_start`, `fail_wake`, `fail_sleep`: so many of the
    next fail; `hang_wake`, `hang_sleep`: so many never end; `keep_asleep`: so many fall asleep and give nothing back;
    `oom`: so many starts run out of memory; `changed`: so many find memory that another gave back meanwhile;
    `hang_start`: so many starts on several GPUs hang, and write a line a minute; `silent_start`: so many download for
    `silent` seconds without a line first; `kept`: seconds for which ended engines' memory stays taken; `driver`: why
    the GPUs cannot be read; `slow`: seconds that reading them takes. `fail_line`: what a start that fails says;
    `refusal`: what every start says as it ends at once, empty: none does."""

    fail_start: int = 0
    fail_wake: int = 0
    fail_sleep: int = 0
    hang_wake: int = 0
    hang_sleep: int = 0
    keep_asleep: int = 0
    oom: int = 0
    changed: int = 0
    hang_start: int = 0
    silent_start: int = 0
    silent: float = 0.0
    kept: float = 0.0
    driver: str = ""
    slow: float = 0.0
    fail_line: str = "ValueError: it was made to fail"
    refusal: str = ""

    def strikes(self, kind: str) -> bool:
        """Whether one of this kind is due, which is used up then."""
        left: int = getattr(self, kind)
        setattr(self, kind, max(0, left - 1))
        return left > 0


class Machine:
    """GPUs of these many bytes; `held` by whom, a number that stands for a process. `host`: pinned memory of the
    machine by the same numbers. `listing`: the pids that NVML tells. `unified`: the memory is the host's too.
    `most_used`: bytes of each GPU."""

    def __init__(self, *totals: int, listing: Listing = "own", unified: bool = False) -> None:
        self.totals = totals
        self.unified = unified
        self.listing = listing
        self.held: dict[int, dict[int, int]] = {}
        self.host: Counter[int] = Counter()
        self.faults = MachineFaults()
        self.doing: dict[int, str] = {}  # GPU -> what is done there
        self.overlaps: list[str] = []
        self.crowded: list[str] = []
        self.cut_off: list[str] = []
        self.most_used = [0 for _ in totals]
        self.pids = count(1000)
        self._others_took_at = -math.inf

    async def sample(self) -> tuple[GPU, ...]:
        """Return the GPUs, as Sampler.sample does. Raises GPUError."""
        await asyncio.sleep(self.faults.slow)
        if self.faults.driver:
            raise GPUError(self.faults.driver)
        return tuple(self._gpu(index) for index in range(len(self.totals)))

    def _gpu(self, index: int) -> GPU:
        processes = {pid: held[index] for pid, held in self.held.items() if index in held}
        used = sum(processes.values())
        if self.listing != "own":
            told = {pid + HOST_PIDS: size for pid, size in processes.items()}
            processes = told if self.listing == "host" else {}
        return GPU(
            index=index,
            total=self.totals[index],
            used=used,
            free=self.totals[index] - used,
            processes=processes,
            processes_hidden=self.listing == "none",
            unified=self.unified,
        )

    @contextlib.contextmanager
    def alone(self, gpus: Collection[int], what: str) -> Iterator[None]:
        """Something that has to have these GPUs to itself."""
        self.overlaps += [f"{what} while {self.doing[gpu]} on GPU {gpu}" for gpu in gpus if gpu in self.doing]
        self.doing |= dict.fromkeys(gpus, what)
        try:
            yield
        finally:
            for gpu in gpus:
                self.doing.pop(gpu, None)

    def take(self, pid: int, gpus: Collection[int], size: int) -> None:
        """Hold so much on each of these from now on. Raises EngineFailed where there is too little."""
        free = self.free(pid, gpus)
        if size > free:
            raise failed(Shortage("oom", f"CUDA out of memory: {size} asked for, {free} free"))
        self.held[pid] = dict.fromkeys(gpus, size)
        for gpu in gpus:
            self.most_used[gpu] = max(self.most_used[gpu], self._gpu(gpu).used)

    def others_take(self, pid: int, gpu: int, size: int) -> None:
        """A process that is no engine's holds so much of a GPU from now on, as far as there is; 0: nothing."""
        taken = min(size, self.free(pid, (gpu,)))
        self.held |= {pid: {gpu: taken}}
        if not taken:
            del self.held[pid]
        self._others_took_at = asyncio.get_running_loop().time()
        self.most_used[gpu] = max(self.most_used[gpu], self._gpu(gpu).used)

    def free(self, pid: int, gpus: Collection[int]) -> int:
        """Bytes free on each of these, with what it holds there itself."""
        before = self.held.get(pid, {})
        return min((self._gpu(gpu).free + before.get(gpu, 0) for gpu in gpus), default=0)

    def begins(self, what: str, gpus: Collection[int], needs: int) -> None:
        """A start for which so much of each of these has to be free."""
        now, free = asyncio.get_running_loop().time(), self.free(0, gpus)
        if gpus and free < needs and now > self._others_took_at + UNSEEN_FOR:
            told = f"{free / GIB:.2f} GiB are free on GPU {gpus}"
            self.crowded.append(f"{now:.1f} s: {what} starts with {needs / GIB:.2f} GiB where {told}")

    def release(self, pid: int) -> None:
        """Wait for its end, or for the end of the time for which its memory stays taken."""
        self.host.pop(pid, None)
        if self.faults.kept:
            asyncio.get_running_loop().call_later(self.faults.kept, self.held.pop, pid, None)
        else:
            self.held.pop(pid, None)


def failed(why: Shortage, before: Sequence[str] = ()) -> EngineFailed:
    """The failure of an engine that lacked memory, by its own words; `before`: the lines it wrote until then."""
    found = diagnosis([*before, why.line])
    return EngineFailed(why.line, found=found)
