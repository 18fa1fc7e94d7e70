"""Memory of GPUs as CUDA reports it, by the driver's own library (libcuda) and without torch.

vLLM takes its share of what CUDA calls the total of a GPU, which is less than what NVML does. Sizes are bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import uuid
from collections.abc import Iterator

import msgspec

LIBRARY = "libcuda.so.1"
NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE


class CudaError(Exception):
    """CUDA cannot be asked; the message says why."""


class CudaDevice(msgspec.Struct, frozen=True):
    """GPU as CUDA has it. `uuid`: as NVML has it."""

    index: int
    uuid: str
    total: int


class Cuda:
    """The driver's library. Raises CudaError where there is none, or none that can be used."""

    def __init__(self, library: str = LIBRARY) -> None:
        try:
            self._library = ctypes.CDLL(library)
        except OSError as error:
            raise CudaError(f"{library} cannot be loaded: {error}") from None
        self._call("cuInit", 0)

    @property
    def version(self) -> str:
        """The newest CUDA that the driver can run."""
        number = ctypes.c_int()
        self._call("cuDriverGetVersion", ctypes.byref(number))
        return f"{number.value // 1000}.{number.value % 1000 // 10}"

    def devices(self) -> tuple[CudaDevice, ...]:
        """The GPUs that CUDA sees, in its order. Raises CudaError."""
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        return tuple(self._device(index) for index in range(count.value))

    def _device(self, index: int) -> CudaDevice:
        handle, name, total = ctypes.c_int(), (ctypes.c_ubyte * 16)(), ctypes.c_size_t()
        self._call("cuDeviceGet", ctypes.byref(handle), index)
        self._call("cuDeviceGetUuid", name, handle)
        self._call("cuDeviceTotalMem_v2", ctypes.byref(total), handle)
        return CudaDevice(index, f"GPU-{uuid.UUID(bytes=bytes(name))}", total.value)

    @contextlib.contextmanager
    def context(self, device: CudaDevice) -> Iterator[int]:
        """A context on the GPU, as every process that uses it has; gives what is free beside it. Raises CudaError."""
        handle, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(handle), device.index)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
        try:
            free, total = ctypes.c_size_t(), ctypes.c_size_t()
            self._call("cuCtxSetCurrent", context)
            self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
            yield free.value
        finally:
            self._call("cuDevicePrimaryCtxRelease_v2", handle)

    def _call(self, name: str, *arguments: object) -> None:
        try:
            status = getattr(self._library, name)(*arguments)
        except AttributeError:
            raise CudaError(f"the driver's library has no {name}: it is too old") from None
        if status:
            why = "it sees no GPU (CUDA_VISIBLE_DEVICES?)" if status == NO_DEVICE else f"error {status}"
            raise CudaError(f"{name}: {why}")
