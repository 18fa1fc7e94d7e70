"""Sampling of GPUs beside an event loop: in a thread, within a time limit, one call at a time.

A driver that hangs (a GPU with a hardware fault does that) hangs its caller, and nothing can interrupt the call. Here
it costs one thread, which keeps neither the loop nor the process's exit waiting.
"""

from __future__ import annotations

import asyncio
import concurrent.futures

from gateway.shared.threads import begin_in_thread
from sidecar.core.gpus import GPU, GPUError, GPUs, Unselectable

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
            waited = now() - self._began
            raise GPUError(f"the GPU driver hangs: no answer for {waited:.1f} s; see dmesg, a reset may help") from None
