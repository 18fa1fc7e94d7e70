"""Facts of this machine's GPUs that the sidecar relies on, as a Markdown table: `make gpu-facts`.

While a GPU's facts are taken, this process has a CUDA context there, so that NVML has a process of ours to list: in a
container it lists none, or the host's numbers. Sizes are bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import msgspec

from gateway.shared.files.units import GIB
from loadtest.lab.gpu.cuda import Cuda, CudaDevice, CudaError
from sidecar.core.gpus import GPU, GPUError, GPUs, NoNVML
from sidecar.sizing.claim import cuda_total

FIRST_NAMESPACE = "pid:[4026531836]"  # of process numbers: a constant of Linux (PROC_PID_INIT_INO)
UNTOLD = "not told"
AMONG = ("no: memory is told by totals", "yes")
NUMBERS = ("the machine's;", "of a namespace of its own; this is")  # by whether it is a container


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about one GPU, as NVML reports it `before` a context of this process and `during` the context. `cuda`: as
    CUDA reports it, with `free` beside the context; None: not reported, `why` says why."""

    before: GPU
    during: GPU
    cuda: CudaDevice | None = None
    free: int | None = None
    why: str = ""


class MachineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that are the same for all GPUs. `container`: process numbers are of a namespace of its own."""

    driver: str
    cuda: str
    container: bool
    pid: int
    gpus: tuple[Facts, ...]


def gathered(gpus: GPUs, library: Callable[[], Cuda] = Cuda) -> MachineFacts:
    """Facts of all GPUs. Raises NoNVML where there is none, and another GPUError where they cannot be read."""
    before = gpus.snapshot()
    version, why, devices = "", "", {}
    try:
        cuda = library()
        version, devices = cuda.version, {device.uuid: device for device in cuda.devices()}
    except CudaError as error:
        why = str(error)
    facts = []
    for gpu in before:
        device = devices.get(gpu.uuid)
        if device is None:
            facts.append(Facts(before=gpu, during=gpu, why=why or "CUDA does not see this GPU"))
            continue
        try:
            with cuda.context(device) as free:
                during = next((each for each in gpus.snapshot() if each.index == gpu.index), gpu)
                facts.append(Facts(before=gpu, during=during, cuda=device, free=free))
        except CudaError as error:
            facts.append(Facts(before=gpu, during=gpu, cuda=device, why=str(error)))
    container = os.readlink("/proc/self/ns/pid") != FIRST_NAMESPACE
    return MachineFacts(driver=gpus.driver, cuda=version, container=container, pid=os.getpid(), gpus=tuple(facts))


# A fact's name, and its value for a GPU of the machine.
ROWS: dict[str, Callable[[MachineFacts, Facts], str]] = {
    "fact": lambda _, gpu: f"GPU {gpu.before.index}",
    "name": lambda _, gpu: gpu.before.name or UNTOLD,
    "driver, CUDA of the driver": lambda machine, gpu: f"{machine.driver}, {machine.cuda or gpu.why}",
    "total by NVML": lambda _, gpu: _size(gpu.before.total),
    "total by CUDA": lambda _, gpu: _size(gpu.cuda.total) if gpu.cuda else gpu.why,
    "NVML's less CUDA's": lambda _, gpu: _size(gpu.before.total - gpu.cuda.total) if gpu.cuda else UNTOLD,
    "the same as the sidecar takes it to be": lambda _, gpu: _size(gpu.before.total - cuda_total(gpu.before.total)),
    "used before, by NVML": lambda _, gpu: _size(gpu.before.used),
    "a CUDA context takes, by NVML": (
        lambda _, gpu: UNTOLD if gpu.free is None else _size(gpu.during.used - gpu.before.used)
    ),
    "free beside it, by CUDA": lambda _, gpu: gpu.why if gpu.free is None else _size(gpu.free),
    "MIG, or why it is refused": lambda _, gpu: gpu.before.refused or "may be used",
    "process numbers": lambda machine, _: f"{NUMBERS[machine.container]} {machine.pid}",
    "processes that NVML lists": lambda _, gpu: _listed(gpu.during),
    "this process among them": lambda machine, gpu: (
        UNTOLD if gpu.free is None else AMONG[machine.pid in gpu.during.processes]
    ),
    "memory of each told": (
        lambda _, gpu: "no" if gpu.during.processes_hidden else "yes" if gpu.during.processes else UNTOLD
    ),
}


def table(machine: MachineFacts) -> str:
    """The facts in Markdown."""
    head, *rest = [(name, *(value(machine, gpu) for gpu in machine.gpus)) for name, value in ROWS.items()]
    lines = [head, ("---",) * len(head), *rest]
    return "\n".join(f"| {' | '.join(_cell(value) for value in line)} |" for line in lines)


def report(gpus: GPUs, library: Callable[[], Cuda] = Cuda) -> str:
    """The table, or a line that says why there is none."""
    try:
        return table(gathered(gpus, library))
    except NoNVML as error:
        return f"No GPU here: {error}. Nothing was measured; run this on a machine with an NVIDIA GPU."
    except GPUError as error:
        return f"The GPUs of this machine cannot be read: {error}. Nothing was measured."
    finally:
        gpus.close()


# -- values -----------------------------------------------------------------------------------------------------------


def _size(size: int) -> str:
    return f"{size / GIB:.2f} GiB"


def _listed(gpu: GPU) -> str:
    numbers: Sequence[str] = [str(pid) for pid in sorted(gpu.processes)]
    return ", ".join(numbers[:10]) + (f" and {len(numbers) - 10} more" if numbers[10:] else "") or "none"


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")
