"""GPUs of this machine, by NVML: the one file that imports `pynvml` (`nvidia-ml-py`; importing it needs no GPU).

NVML's calls block for as long as the driver does and cannot be interrupted. Inside an event loop only `Sampler` calls
`snapshot`. A missing library, a driver loaded anew, a GPU that fell off the bus are put in words (`_HERE`, `_GPU`). A
session with NVML that has seen one of them is ended, so that the next snapshot begins a new one. A field that the GPU
does not report is None.

A GPU without memory of its own (GB10, Jetson) tells none: what counts is the machine's, as vLLM counts it there.

In a container NVML lists the GPUs given to it, and of their processes only those of its own pid namespace.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pynvml  # type: ignore[import-untyped]  # it has no stubs

from sidecar.core.gpus import GPU, GPUError, NoNVML, Selection, Unselectable, chosen

MEMINFO = Path("/proc/meminfo")
# What NVML's errors mean for all GPUs. None of these numbers ever changes: they are NVML's binary interface.
_HERE = {
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "there is no NVIDIA driver here (libnvidia-ml.so.1 is not found)",
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "the NVIDIA driver is installed but not loaded; see nvidia-smi and dmesg",
    pynvml.NVML_ERROR_NO_PERMISSION: "this user may not read the GPUs (/dev/nvidia*)",
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: "the NVIDIA driver is too old for this sidecar",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: (
        "the NVIDIA driver was updated, but the old one is still loaded or still in use here: restart the sidecar, "
        "and if that is not enough the machine"
    ),
}
_NONE = frozenset({pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED})
# What they mean for one.
_GPU = {
    pynvml.NVML_ERROR_GPU_IS_LOST: "it has fallen off the bus: reset it (nvidia-smi --gpu-reset) or the machine",
    pynvml.NVML_ERROR_RESET_REQUIRED: "it needs a reset: nvidia-smi --gpu-reset",
    pynvml.NVML_ERROR_INVALID_ARGUMENT: "the driver does not list it any more",
    pynvml.NVML_ERROR_GPU_NOT_FOUND: "the driver does not list it any more",
    pynvml.NVML_ERROR_NO_PERMISSION: "this user may not read it",
    pynvml.NVML_ERROR_INSUFFICIENT_POWER: "its power cables are not connected",
    pynvml.NVML_ERROR_NOT_SUPPORTED: "it does not tell its memory",
}
_MIG = "it is divided by MIG, and the sidecar uses whole GPUs: disable MIG (nvidia-smi -mig 0) to use it"
# The session is of a driver that is not there any more.
_STALE = frozenset({pynvml.NVML_ERROR_UNINITIALIZED, pynvml.NVML_ERROR_DRIVER_NOT_LOADED})
# A field the GPU, or its driver, does not have or does not tell to everyone.
_UNTOLD = frozenset(
    {
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_NO_PERMISSION,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_NO_DATA,
        pynvml.NVML_ERROR_NOT_READY,
        pynvml.NVML_ERROR_DEPRECATED,
    }
)


class NVML:
    """GPUs of this machine (`core.gpus.GPUs`). The first snapshot settles which GPUs are selected, and what `all`
    means.

    Each GPU is known by number and UUID. Numbers move when the driver is reloaded while a GPU is missing. A GPU found
    under another GPU's number is refused, because the engines and claims of that number belong to the other GPU.
    """

    def __init__(
        self,
        select: Selection = "all",
        *,
        environ: Mapping[str, str] = os.environ,
        nvml: Any = pynvml,
        meminfo: Path = MEMINFO,
    ) -> None:
        self.driver = ""
        self._select = select
        self._visible = environ.get("CUDA_VISIBLE_DEVICES")
        self._nvml = nvml
        self._meminfo = meminfo
        self._open = False
        self._indices: tuple[int, ...] | None = None
        self._known: dict[int, GPU] = {}

    def snapshot(self) -> tuple[GPU, ...]:
        """Each selected GPU as it is now. Raises NoNVML, another GPUError, or Unselectable."""
        again = self._open  # a session from before is perhaps one with a driver that was loaded anew since
        while True:
            try:
                gpus = self._read()
            except Unselectable:
                self.close()
                raise
            except self._nvml.NVMLError as error:
                self.close()
                if not again or error.value not in _STALE:
                    raise _whole(error) from error
                again = False
            else:
                if not all(gpu.readable for gpu in gpus):
                    self.close()  # a lost GPU stays lost to the session that has seen it, also after its reset
                return gpus

    def close(self) -> None:
        """End the session with NVML, if there is one: each nvmlInit has its nvmlShutdown."""
        if self._open:
            self._open = False
            try:
                self._nvml.nvmlShutdown()
            except self._nvml.NVMLError:
                return  # the driver has ended it already

    def _read(self) -> tuple[GPU, ...]:
        if not self._open:
            self._nvml.nvmlInit()
            self._open = True
            self.driver = str(self._nvml.nvmlSystemGetDriverVersion())
        if self._indices is None:
            uuids = [self._gpu(index).uuid for index in range(self._nvml.nvmlDeviceGetCount())]
            self._indices = chosen(self._select, uuids, self._visible)
        return tuple(self._gpu(index) for index in self._indices)

    def _gpu(self, index: int) -> GPU:
        """The GPU of this number, refused where it cannot be read. Raises NVMLError where the session is at an end."""
        known = self._known.get(index)
        try:
            gpu = self._device(index)
        except self._nvml.NVMLError as error:
            if error.value in _STALE:
                raise
            return (known or GPU(index=index)).unreadable(_GPU.get(error.value, f"NVML: {error}"))
        if known is not None and known.uuid != gpu.uuid:
            why = f"{known.uuid} had this number and {gpu.uuid} has it now: end its engines and restart the sidecar"
            return known.unreadable(why)
        self._known[index] = gpu
        return gpu

    def _device(self, index: int) -> GPU:
        nvml = self._nvml
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        memory, unified = self._memory(handle, index)
        mig = self._told(nvml.nvmlDeviceGetMigMode, handle)
        rates = self._told(nvml.nvmlDeviceGetUtilizationRates, handle)
        running = self._told(nvml.nvmlDeviceGetComputeRunningProcesses, handle)
        return GPU(
            index=index,
            uuid=str(nvml.nvmlDeviceGetUUID(handle)),
            name=str(nvml.nvmlDeviceGetName(handle)),
            total=int(memory.total),
            used=int(memory.used),
            free=int(memory.free),
            utilization=None if rates is None else int(rates.gpu),
            processes={int(process.pid): int(process.usedGpuMemory or 0) for process in running or ()},
            processes_hidden=running is None or any(process.usedGpuMemory is None for process in running),
            unified=unified,
            refused=_MIG if mig is not None and mig[0] == nvml.NVML_DEVICE_MIG_ENABLE else "",
        )

    def _memory(self, handle: Any, index: int) -> tuple[Any, bool]:
        """The memory of a GPU, and whether it is the host's: such a GPU (GB10, Jetson) never tells any of its own.
        Raises NVMLError."""
        try:
            return self._nvml.nvmlDeviceGetMemoryInfo(handle), False
        except self._nvml.NVMLError as error:
            known, host = self._known.get(index), machine_memory(self._meminfo)
            untold = error.value == self._nvml.NVML_ERROR_NOT_SUPPORTED and (known is None or known.unified)
            if host is None or not untold:
                raise
            return host, True

    def _told(self, function: Any, *arguments: object) -> Any:
        """Answer of NVML, None where it does not tell. Raises NVMLError for any other error."""
        try:
            return function(*arguments)
        except self._nvml.NVMLError as error:
            if error.value in _UNTOLD:
                return None
            raise


class MachineMemory(msgspec.Struct, frozen=True):
    """Bytes of the machine's memory: `free` is what programs can have without swapping."""

    total: int
    used: int
    free: int


def machine_memory(meminfo: Path) -> MachineMemory | None:
    """The machine's memory by Linux's `/proc/meminfo`; None: it does not tell."""
    try:
        told = dict(re.findall(r"^(MemTotal|MemAvailable):\s+(\d+) kB$", meminfo.read_text(), re.MULTILINE))
    except OSError:
        return None
    if len(told) < 2:
        return None
    total, free = 1024 * int(told["MemTotal"]), 1024 * int(told["MemAvailable"])
    return MachineMemory(total, total - free, free)


def _whole(error: Any) -> GPUError:
    kind = NoNVML if error.value in _NONE else GPUError
    return kind(_HERE.get(error.value, f"the GPUs cannot be read, NVML says: {error}"))
