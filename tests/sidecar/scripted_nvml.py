"""Scripted NVML: it answers as libnvidia-ml does, with pynvml's own error classes and constants."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pynvml

GIB = 1 << 30


class Driver:
    """What the sidecar calls of pynvml. `errors`: which call fails (its name, or name and index), and with what."""

    def __init__(self, uuids: list[str]) -> None:
        self.uuids = uuids
        self.open = 0
        self.inits = 0
        self.shutdowns = 0
        self.errors: dict[Any, int] = {}
        self.mig: set[str] = set()
        self.processes: dict[str, list[tuple[int, int | None]]] = {}
        for name in dir(type(self)):
            if name.startswith("nvmlDevice") and name != "nvmlDeviceGetHandleByIndex":
                setattr(self, name, self._may_fail(name, getattr(self, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(pynvml, name)

    def _may_fail(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self._fail(name)
            if arguments:
                self._fail((name, self.uuids.index(arguments[0])))
            return function(*arguments)

        return call

    def _fail(self, call: Any) -> None:
        if call in self.errors:
            raise pynvml.NVMLError(self.errors[call])
        if not self.open:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)

    def nvmlInit(self) -> None:  # noqa: N802 - these names are NVML's
        if "nvmlInit" in self.errors:
            raise pynvml.NVMLError(self.errors["nvmlInit"])
        self.open += 1
        self.inits += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.shutdowns += 1
        self._fail("nvmlShutdown")
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        self._fail("nvmlSystemGetDriverVersion")
        return "580.159.03"

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.uuids)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        self._fail("nvmlDeviceGetHandleByIndex")
        if index >= len(self.uuids):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        self._fail(("nvmlDeviceGetHandleByIndex", index))
        return self.uuids[index]

    def nvmlDeviceGetUUID(self, handle: str) -> str:  # noqa: N802
        return handle

    def nvmlDeviceGetName(self, handle: str) -> str:  # noqa: N802
        return "NVIDIA H200"

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:  # noqa: N802
        return SimpleNamespace(total=140 * GIB, used=40 * GIB, free=100 * GIB)

    def nvmlDeviceGetMigMode(self, handle: str) -> list[int]:  # noqa: N802
        return [int(handle in self.mig), 0]

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:  # noqa: N802
        return SimpleNamespace(gpu=37, memory=5)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:  # noqa: N802
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.processes.get(handle, [])]
