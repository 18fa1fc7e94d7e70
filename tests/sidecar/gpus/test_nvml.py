"""NVML: the meaning of its errors. The last tests ask the real pynvml, on whatever machine this is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pynvml
import pytest

from sidecar.core.gpus import GPUError, NoNVML, Selection, Unselectable
from sidecar.gpus.nvml import NVML
from tests.sidecar.scripted_nvml import GIB, Driver


def machine(*uuids: str, select: Selection = "all", visible: str | None = None) -> tuple[Driver, NVML]:
    driver = Driver(list(uuids))
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    return driver, NVML(select, environ=environ, nvml=driver)


def test_what_is_read() -> None:
    driver, gpus = machine("GPU-a", "GPU-b")
    driver.processes["GPU-b"] = [(4711, 30 * GIB), (4712, 8 * GIB)]
    assert gpus.driver == ""
    a, b = gpus.snapshot()
    assert gpus.driver == "580.159.03"
    assert (a.index, a.uuid, a.name, a.total, a.used, a.free) == (
        *(0, "GPU-a", "NVIDIA H200"),
        *(140 * GIB, 40 * GIB, 100 * GIB),
    )
    assert (a.utilization, a.processes, a.processes_hidden, a.refused) == (37, {}, False, "")
    assert (b.index, b.processes) == (1, {4711: 30 * GIB, 4712: 8 * GIB})
    gpus.snapshot()
    assert (driver.inits, driver.open) == (1, 1), "one session for many snapshots"
    gpus.close()
    gpus.close()
    assert (driver.shutdowns, driver.open) == (1, 0)
    assert len(gpus.snapshot()) == 2, "and closed is not for ever"


def test_a_selection_within_what_cuda_may_see() -> None:
    assert [gpu.index for gpu in machine("GPU-a", "GPU-b", "GPU-c", visible="2,0")[1].snapshot()] == [0, 2]
    assert [gpu.index for gpu in machine("GPU-a", "GPU-b", "GPU-c", select=[1])[1].snapshot()] == [1]
    driver, gpus = machine("GPU-a", "GPU-b", select=[1], visible="0")
    with pytest.raises(Unselectable, match="GPU 1 is not in CUDA_VISIBLE_DEVICES=0"):
        gpus.snapshot()
    assert driver.open == 0


@pytest.mark.parametrize(
    ("call", "field", "untold"),
    [
        ("nvmlDeviceGetUtilizationRates", "utilization", None),
        ("nvmlDeviceGetComputeRunningProcesses", "processes", {}),
        ("nvmlDeviceGetMigMode", "refused", ""),
    ],
)
@pytest.mark.parametrize(
    "error",
    [pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_NO_PERMISSION, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND],
)
def test_what_a_gpu_does_not_tell(call: str, field: str, untold: Any, error: int) -> None:
    driver, gpus = machine("GPU-a")
    driver.processes["GPU-a"] = [(4711, GIB)]
    driver.errors[call] = error
    (gpu,) = gpus.snapshot()
    assert getattr(gpu, field) == untold
    assert (gpu.free, gpu.refused) == (100 * GIB, "")
    assert gpu.processes_hidden is (field == "processes")


def test_a_process_whose_memory_is_not_told_is_listed() -> None:
    driver, gpus = machine("GPU-a")
    driver.processes["GPU-a"] = [(4711, None), (4712, GIB)]
    (gpu,) = gpus.snapshot()
    assert (gpu.processes, gpu.processes_hidden) == ({4711: 0, 4712: GIB}, True)


def test_one_divided_by_mig_is_listed_and_refused() -> None:
    driver, gpus = machine("GPU-a", "GPU-b")
    driver.mig.add("GPU-a")
    a, b = gpus.snapshot()
    assert a.refused.startswith("it is divided by MIG")
    assert (a.readable, a.used) == (True, 40 * GIB)
    assert b.refused == ""
    assert driver.open == 1


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        ("nvmlDeviceGetHandleByIndex", pynvml.NVML_ERROR_GPU_IS_LOST, "it has fallen off the bus"),
        ("nvmlDeviceGetMemoryInfo", pynvml.NVML_ERROR_GPU_IS_LOST, "it has fallen off the bus"),
        ("nvmlDeviceGetUtilizationRates", pynvml.NVML_ERROR_GPU_IS_LOST, "it has fallen off the bus"),
        ("nvmlDeviceGetHandleByIndex", pynvml.NVML_ERROR_RESET_REQUIRED, "it needs a reset"),
        ("nvmlDeviceGetHandleByIndex", pynvml.NVML_ERROR_INSUFFICIENT_POWER, "power cables"),
        ("nvmlDeviceGetHandleByIndex", pynvml.NVML_ERROR_NO_PERMISSION, "this user may not read it"),
        ("nvmlDeviceGetMemoryInfo", pynvml.NVML_ERROR_NOT_SUPPORTED, "it does not tell its memory"),
        ("nvmlDeviceGetMemoryInfo", pynvml.NVML_ERROR_UNKNOWN, "NVML: Unknown Error"),
    ],
)
def test_one_that_cannot_be_read_is_refused_and_the_others_are_not(call: str, error: int, message: str) -> None:
    driver, gpus = machine("GPU-a", "GPU-b")
    gpus.snapshot()
    driver.errors[call, 0] = error
    a, b = gpus.snapshot()
    assert message in a.refused
    assert (a.uuid, a.total, a.used, a.free, a.readable) == ("GPU-a", 140 * GIB, 140 * GIB, 0, False)
    assert (b.refused, b.free) == ("", 100 * GIB)
    assert driver.open == 0, "to the session that lost it it stays lost, so that one is ended"
    driver.errors.clear()
    a, b = gpus.snapshot()
    assert (a.refused, a.free, driver.inits) == ("", 100 * GIB, 2)


def test_one_that_was_never_readable_is_listed_too() -> None:
    driver, gpus = machine("GPU-a", "GPU-b")
    driver.errors["nvmlDeviceGetHandleByIndex", 1] = pynvml.NVML_ERROR_GPU_IS_LOST
    _, b = gpus.snapshot()
    assert (b.index, b.uuid, b.total, b.free, b.readable) == (1, "", 0, 0, False)


MEMINFO = "MemTotal:       127600000 kB\nMemFree:          900000 kB\nMemAvailable:   110000000 kB\n"


def test_one_without_memory_of_its_own_has_the_machines(tmp_path: Path) -> None:
    driver, file = Driver(["GPU-a"]), tmp_path / "meminfo"
    driver.errors["nvmlDeviceGetMemoryInfo"] = pynvml.NVML_ERROR_NOT_SUPPORTED
    gpus = NVML(nvml=driver, environ={}, meminfo=file)
    (before,) = gpus.snapshot()
    assert (before.unified, "it does not tell its memory" in before.refused) == (False, True)
    file.write_text("MemTotal: 1 kB\n")
    assert not gpus.snapshot()[0].readable, "half of it tells nothing"
    file.write_text(MEMINFO)
    (found,) = gpus.snapshot()
    assert (found.unified, found.refused, found.readable) == (True, "", True)
    assert (found.total, found.free, found.used) == tuple(1024 * kib for kib in (127_600_000, 110_000_000, 17_600_000))
    driver.errors["nvmlDeviceGetMemoryInfo"] = pynvml.NVML_ERROR_GPU_IS_LOST
    (lost,) = gpus.snapshot()
    assert (lost.unified, lost.readable, lost.free) == (True, False, 0)


def test_numbers_that_moved_are_refused() -> None:
    driver, gpus = machine("GPU-a", "GPU-b", "GPU-c")
    gpus.snapshot()
    gpus.close()
    driver.uuids.remove("GPU-b")  # the driver is loaded anew, without the one that is broken
    a, b, c = gpus.snapshot()
    assert a.refused == ""
    assert "GPU-b had this number and GPU-c has it now" in b.refused
    assert (b.uuid, b.free) == ("GPU-b", 0)
    assert c.refused == "the driver does not list it any more"


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, NoNVML, "there is no NVIDIA driver here"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, NoNVML, "installed but not loaded"),
        (pynvml.NVML_ERROR_NO_PERMISSION, GPUError, "this user may not read the GPUs"),
        (pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, GPUError, "too old"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, GPUError, "was updated"),
        (pynvml.NVML_ERROR_UNKNOWN, GPUError, "NVML says: Unknown Error"),
    ],
)
@pytest.mark.parametrize("call", ["nvmlInit", "nvmlSystemGetDriverVersion"])
def test_errors_of_the_whole(call: str, error: int, kind: type[GPUError], message: str) -> None:
    driver, gpus = machine("GPU-a")
    driver.errors[call] = error
    with pytest.raises(GPUError, match=message) as caught:
        gpus.snapshot()
    assert type(caught.value) is kind
    assert driver.open == 0, "what was opened is closed"
    driver.errors.clear()
    assert len(gpus.snapshot()) == 1, "and the next snapshot tries anew"


def test_a_driver_loaded_anew_between_two_snapshots_costs_none() -> None:
    driver, gpus = machine("GPU-a")
    gpus.snapshot()
    driver.open = 0  # what the session was with is gone: every call of it answers UNINITIALIZED
    (gpu,) = gpus.snapshot()
    assert (gpu.free, driver.inits, driver.open) == (100 * GIB, 2, 1)


def test_a_driver_unloaded_is_said() -> None:
    driver, gpus = machine("GPU-a")
    gpus.snapshot()
    driver.errors["nvmlInit"] = pynvml.NVML_ERROR_DRIVER_NOT_LOADED
    driver.open = 0
    with pytest.raises(NoNVML, match="not loaded"):
        gpus.snapshot()


def test_the_real_library() -> None:
    """Without a driver: said in words, as often as one asks. With one: its GPUs, whatever they are."""
    gpus = NVML(environ={})
    try:
        found = gpus.snapshot()
    except NoNVML as error:
        assert "NVIDIA driver" in str(error)  # noqa: PT017 - which of the two is right depends on the machine
        with pytest.raises(NoNVML):
            gpus.snapshot()
        return
    finally:
        gpus.close()
    print(gpus.driver, *found, sep="\n")
    assert gpus.driver
    assert [gpu.index for gpu in found] == list(range(len(found)))
    for gpu in found:
        assert gpu.refused or (gpu.uuid.startswith("GPU-") and gpu.name and 0 < gpu.free <= gpu.total)
        assert gpu.used + gpu.free == gpu.total
