"""Monitor of the machine's GPUs: samples beside an event loop, the last reading of each, and quarantine.

A driver that hangs (a GPU with a hardware fault does that) hangs its caller, and nothing can interrupt the call. Here
it costs one thread, which keeps neither the loop nor the process's exit waiting.

A GPU is in quarantine while memory that an engine gave up there has not come back, for QUARANTINE seconds at most: what
has not come back by then counts as another's, and the rest is used. What neighbours have taken meanwhile, by NVML's own
word, is none of it. Where the GPUs cannot be read, the last reading stays, and none of its memory counts as free.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence

import msgspec

from gateway.shared.files.units import GIB
from gateway.shared.threads import begin_in_thread
from sidecar.core.gpus import GPU, GPUError, GPUs, Unselectable, returned, taken

NOT_BACK = "the memory of an engine that was there has not come back"

BACK_WITHIN = 5.0  # seconds; drivers give memory back late
POLL = 0.25  # seconds
QUARANTINE = 300.0  # seconds; drivers give memory back within some, if ever

Sample = Callable[[], Awaitable[tuple[GPU, ...]]]
LIMIT = 5.0  # seconds a snapshot may take; NVML needs milliseconds, tens where it begins a session


class Sampler:
    """Snapshots of `gpus` for one event loop, until the process ends, which gives the driver back."""

    def __init__(self, gpus: GPUs, *, limit: float = LIMIT) -> None:
        self._gpus = gpus
        self._limit = limit
        self._call: concurrent.futures.Future[tuple[GPU, ...]] | None = None
        self._began = 0.0

    async def sample(self) -> tuple[GPU, ...]:
        """Each GPU as it is now; who asks while a call is under way gets its answer.

        Raises GPUError within `limit` seconds of the call's beginning, so at once for as long as a call hangs; the
        answer of one that took longer is not used, since its figures may be that old. Raises what `snapshot` raises.
        """
        now = asyncio.get_running_loop().time
        if self._call is None or self._call.done():
            self._began = now()
            self._call = begin_in_thread(self._gpus.snapshot, (GPUError, Unselectable))
        try:
            async with asyncio.timeout_at(self._began + self._limit):
                return await asyncio.wrap_future(self._call)
        except TimeoutError:
            why = f"the GPU driver hangs: no answer for {self._limit:g} s; see dmesg, a reset may help"
            raise GPUError(why) from None  # in the same words each time, so that it is told once


class GpuMonitor:
    """`sample` reads the GPUs; None: there are none. `gpus`, `error`: as last seen, and why they cannot be read now."""

    def __init__(self, sample: Sample | None, say: Callable[[str], None]) -> None:
        self.gpus: tuple[GPU, ...] = ()
        self.error = ""
        self._read: tuple[GPU, ...] = ()
        self._sample = sample
        self._say = say
        # By GPU: the reading while the memory was still held, its bytes, and the time until which it is waited for.
        self._quarantined: dict[int, tuple[GPU, int, float]] = {}

    async def look(self) -> tuple[GPU, ...]:
        """Read the GPUs. Says when they cannot be read and when they can be again; raises nothing."""
        if self._sample is None:
            return ()
        try:
            self._read = await self._sample()
            error = ""
        except (GPUError, Unselectable) as failure:
            error = str(failure)
        if error != self.error:
            self._say(error or "the GPUs can be read again")
            self.error = error
        now = asyncio.get_running_loop().time()
        for gpu in self._read:
            before, size, until = self._quarantined.get(gpu.index, (gpu, 1, math.inf))
            back = _is_back(before, gpu, size)
            if not error and gpu.readable and (back or now >= until):
                del self._quarantined[gpu.index]
                why = "its memory is back" if back else f"{gpu.free / GIB:.1f} GiB of it are free"
                self._say(f"GPU {gpu.index} is out of quarantine: {why}")
        return self._refuse()

    def _refuse(self) -> tuple[GPU, ...]:
        """Note on each GPU why nothing is started there, where the GPUs cannot be read or it is in quarantine."""
        away = self._quarantined
        self.gpus = tuple(
            msgspec.structs.replace(gpu, refused=gpu.refused or self.error or (NOT_BACK if gpu.index in away else ""))
            for gpu in self._read
        )
        return self.gpus

    @property
    def totals(self) -> tuple[tuple[int, int], ...]:
        """The number and the bytes of every GPU whose size is known."""
        return tuple((gpu.index, gpu.total) for gpu in self.gpus if gpu.total)

    @property
    def unified(self) -> bool:
        """Whether the GPUs' memory is the host's."""
        return any(gpu.unified for gpu in self.gpus)

    def smallest(self, gpus: Collection[int]) -> int:
        """Bytes of the smallest of these GPUs, 0 for none."""
        return min((total for index, total in self.totals if index in gpus), default=0)

    def sizes(self, gpus: Collection[int] | None, several: int) -> list[int]:
        """Bytes of the GPUs that an engine on so many of them is to be sized for, of those with these numbers or of
        all; ascending, (0,) where none is known."""
        totals = sorted(total for index, total in self.totals if gpus is None or index in gpus)
        largest = totals[: max(0, len(totals) - several + 1)]  # with so many that are no smaller
        return sorted({*(largest or totals or (total for _, total in self.totals))}) or [0]

    async def until(self, enough: Callable[[Sequence[GPU]], bool]) -> bool:
        """Wait until a reading is as `enough` wants it; False: none was within BACK_WITHIN seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BACK_WITHIN):
                while True:
                    if enough(await self.look()) and not self.error:
                        return True
                    await asyncio.sleep(POLL)
        return False

    async def back(self, before: Iterable[GPU], held: Mapping[int, int]) -> bool:
        """Wait until what an engine really held, bytes by GPU, is free again; `before`: the GPUs while it still held
        it. What it was allowed would never come back in full.

        Where it is not in time, those GPUs are in quarantine until it is.
        """
        if self._sample is None or not any(held.values()):
            return True
        then = {gpu.index: gpu for gpu in before}

        def free(gpus: Sequence[GPU]) -> bool:
            now = {gpu.index: gpu for gpu in gpus}
            return all(index in now and _is_back(then[index], now[index], size) for index, size in held.items())

        if await self.until(free):
            return True
        for index, size in held.items():
            if size:
                until = asyncio.get_running_loop().time() + QUARANTINE
                self._quarantined[index] = (then[index], size, until)
        self._refuse()  # nothing is started there while the next reading is waited for
        await self.look()
        quarantined = [index for index in held if index in self._quarantined]
        for index in quarantined:
            self._say(f"GPU {index} is in quarantine: {NOT_BACK} ({held[index] / GIB:.1f} GiB)")
        return not quarantined


def _is_back(before: GPU, now: GPU, size: int) -> bool:
    """Whether `size` bytes that an engine held at the reading `before` are free again."""
    return returned(before.used, now.used - taken(before, now), size)
