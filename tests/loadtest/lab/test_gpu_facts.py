"""Facts of GPUs: the table by a scripted NVML and a scripted libcuda, which is compiled here; and without a GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from loadtest.lab.gpu.cuda import Cuda, CudaError
from loadtest.lab.gpu.facts import gathered, report
from sidecar.gpus.nvml import NVML
from tests.sidecar.scripted_nvml import GIB, Driver

ROOT = Path(__file__).parents[3]
A, B = "GPU-00000000-0000-0000-0000-0000000000a0", "GPU-00000000-0000-0000-0000-0000000000b0"
# Two GPUs of 79.19 GiB; CUDA has B first, as the faster one. A's context takes 0.5 GiB, B's fails where it is to.
LIBCUDA = """
#include <stdlib.h>
#include <string.h>
static int held = -1;
int cuInit(unsigned flags) { return getenv("NO_GPU") ? 100 : flags ? 1 : 0; }
int cuDriverGetVersion(int *version) { *version = 13010; return 0; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGet(int *handle, int index) { *handle = index; return 0; }
int cuDeviceGetUuid(unsigned char *uuid, int handle) {
    memset(uuid, 0, 16); uuid[15] = handle ? 0xa0 : 0xb0; return 0; }
int cuDeviceTotalMem_v2(size_t *total, int handle) { *total = 85029158912UL; return handle > 1; }
int cuDevicePrimaryCtxRetain(void **context, int handle) {
    if (!handle) return 2;
    held = handle; *context = &held; return 0; }
int cuCtxSetCurrent(void *context) { return context != &held; }
int cuMemGetInfo_v2(size_t *free_, size_t *total) {
    *free_ = 64424509440UL; *total = 85029158912UL; return held < 0; }
int cuDevicePrimaryCtxRelease_v2(int handle) { int was = held; held = -1; return was != handle; }
"""


@pytest.fixture(scope="module")
def libcuda(tmp_path_factory: pytest.TempPathFactory) -> str:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (cc) to make a scripted libcuda with")
    folder = tmp_path_factory.mktemp("cuda")
    (folder / "cuda.c").write_text(LIBCUDA)
    library = folder / "libcuda.so.1"
    argv = [compiler, "-shared", "-fPIC", "-o", str(library), str(folder / "cuda.c")]
    subprocess.run(argv, check=True, timeout=60.0)  # fixed words
    return str(library)


class Growing(Driver):
    """In use is half a GiB more at the second look: the context."""

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:  # noqa: N802 - this name is NVML's
        self.looks = getattr(self, "looks", 0) + 1
        used = 20 * GIB + (GIB // 2 if self.looks > 2 * len(self.uuids) else 0)
        return SimpleNamespace(total=int(79.65 * GIB), used=used, free=int(79.65 * GIB) - used)


def rows(text: str) -> dict[str, list[str]]:
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    assert lines[1] == ["---"] * len(lines[0])
    return {name: values for name, *values in lines}


def test_the_table_has_what_nvml_and_cuda_tell_of_each_gpu(libcuda: str) -> None:
    driver = Growing([A, B])
    driver.processes = {A: [(os.getpid(), GIB // 2), (4711, GIB)], B: []}
    driver.mig.add(B)
    found = rows(report(NVML(environ={}, nvml=driver), lambda: Cuda(libcuda)))
    assert found["fact"] == ["GPU 0", "GPU 1"]
    assert found["driver, CUDA of the driver"] == ["580.159.03, 13.1"] * 2
    assert found["total by NVML"] == ["79.65 GiB"] * 2
    assert found["total by CUDA"] == ["79.19 GiB"] * 2
    assert found["NVML's less CUDA's"] == ["0.46 GiB"] * 2
    assert found["the same as the sidecar takes it to be"] == ["0.75 GiB"] * 2
    assert found["a CUDA context takes, by NVML"] == ["0.50 GiB", "not told"]
    assert found["free beside it, by CUDA"] == ["60.00 GiB", "cuDevicePrimaryCtxRetain: error 2"]
    assert found["MIG, or why it is refused"][0] == "may be used"
    assert found["MIG, or why it is refused"][1].startswith("it is divided by MIG")
    assert found["processes that NVML lists"] == [", ".join(map(str, sorted((4711, os.getpid())))), "none"]
    assert found["this process among them"] == ["yes", "not told"]
    assert found["memory of each told"] == ["yes", "not told"]
    assert driver.open == 0, "the session with NVML is ended"


def test_a_context_is_released_whatever_happens_beside_it(libcuda: str) -> None:
    cuda = Cuda(libcuda)
    device = cuda.devices()[1]
    with pytest.raises(KeyError), cuda.context(device):
        raise KeyError
    with cuda.context(device) as free:
        assert free == 60 * GIB


def test_in_a_container_the_hosts_processes_are_not_this_one(libcuda: str) -> None:
    driver = Growing([A])
    driver.processes = {A: [(4_000_000 + each, None) for each in range(12)]}
    found = rows(report(NVML(environ={}, nvml=driver), lambda: Cuda(libcuda)))
    assert found["this process among them"] == ["no: memory is told by totals"]
    assert found["processes that NVML lists"][0].endswith("4000009 and 2 more")
    assert found["memory of each told"] == ["no"]


def test_without_cuda_what_nvml_tells_is_there(libcuda: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = rows(report(NVML(environ={}, nvml=Driver([A])), lambda: Cuda("/nonexistent/libcuda.so.1")))
    assert found["total by NVML"] == ["140.00 GiB"]
    assert "cannot be loaded" in found["total by CUDA"][0]
    monkeypatch.setenv("NO_GPU", "1")
    with pytest.raises(CudaError, match="it sees no GPU"):
        Cuda(libcuda)


def test_a_library_that_is_no_libcuda_says_so() -> None:
    with pytest.raises(CudaError, match="has no cuInit"):
        Cuda("libc.so.6")


def test_a_gpu_that_cuda_does_not_see_is_in_the_table(libcuda: str) -> None:
    (found,) = gathered(NVML(environ={}, nvml=Driver(["GPU-other"])), lambda: Cuda(libcuda)).gpus
    assert (found.cuda, found.why) == (None, "CUDA does not see this GPU")


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "No GPU here: there is no NVIDIA driver here"),
        (pynvml.NVML_ERROR_NO_PERMISSION, "The GPUs of this machine cannot be read: this user may not"),
    ],
)
def test_where_there_is_no_gpu_it_says_so_plainly(error: int, says: str) -> None:
    driver = Driver([])
    driver.errors["nvmlInit"] = error
    found = report(NVML(environ={}, nvml=driver))
    assert found.startswith(says)
    assert "Nothing was measured" in found


@pytest.mark.slow
def test_the_command_ends_well_on_any_machine() -> None:
    argv = [sys.executable, "-m", "loadtest.lab.gpu"]
    asked = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, timeout=60.0, check=True)  # fixed
    assert asked.stdout.startswith(("No GPU here", "| fact | GPU 0"))
