"""Facts of this machine's GPUs that the sidecar relies on, as a Markdown table: `make gpu-facts`.

While a GPU's facts are taken, this process has a CUDA context there, so that NVML has a process of ours to list: in a
container it lists none, or the host's numbers. Sizes are bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence

import msgspec

from gateway.shared.files.units import GIB
from loadtest.lab.gpu.cuda import Cuda, CudaDevice, CudaError
from sidecar.core.gpus import GPU, GPUError, GPUs, NoNVML
from sidecar.sizing.claim import cuda_total

FIRST_NAMESPACE = "pid:[4026531836]"  # of process numbers: a constant of Linux (PROC_PID_INIT_INO)
UNTOLD = "not told"


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


def rows(machine: MachineFacts) -> Iterator[tuple[str, ...]]:
    """The table's rows: a fact's name, then its value for each GPU."""
    every = machine.gpus
    yield ("fact", *(f"GPU {each.before.index}" for each in every))
    yield ("name", *(each.before.name or UNTOLD for each in every))
    yield ("driver, CUDA of the driver", *(f"{machine.driver}, {machine.cuda or each.why}" for each in every))
    yield ("total by NVML", *(_size(each.before.total) for each in every))
    yield ("total by CUDA", *(_size(each.cuda.total) if each.cuda else each.why for each in every))
    yield ("NVML's less CUDA's", *(_less(each) for each in every))
    yield ("the same as the sidecar takes it to be", *(_foretold(each.before.total) for each in every))
    yield ("used before, by NVML", *(_size(each.before.used) for each in every))
    yield ("a CUDA context takes, by NVML", *(_context(each) for each in every))
    yield ("free beside it, by CUDA", *(_size(each.free) if each.free is not None else each.why for each in every))
    yield ("MIG, or why it is refused", *(each.before.refused or "may be used" for each in every))
    yield ("process numbers", *(_numbers(machine) for _ in every))
    yield ("processes that NVML lists", *(_listed(each.during) for each in every))
    yield ("this process among them", *(_own(machine, each) for each in every))
    yield ("memory of each told", *(_told(each.during) for each in every))


def table(machine: MachineFacts) -> str:
    """The facts in Markdown."""
    head, *rest = rows(machine)
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


def _less(facts: Facts) -> str:
    return _size(facts.before.total - facts.cuda.total) if facts.cuda else UNTOLD


def _foretold(total: int) -> str:
    return _size(total - cuda_total(total))


def _context(facts: Facts) -> str:
    return UNTOLD if facts.free is None else _size(facts.during.used - facts.before.used)


def _numbers(machine: MachineFacts) -> str:
    return f"of a namespace of its own; this is {machine.pid}" if machine.container else f"the machine's; {machine.pid}"


def _listed(gpu: GPU) -> str:
    numbers: Sequence[str] = [str(pid) for pid in sorted(gpu.processes)]
    return ", ".join(numbers[:10]) + (f" and {len(numbers) - 10} more" if numbers[10:] else "") or "none"


def _own(machine: MachineFacts, facts: Facts) -> str:
    if facts.free is None:
        return UNTOLD
    return "yes" if machine.pid in facts.during.processes else "no: memory is told by totals"


def _told(gpu: GPU) -> str:
    return "no" if gpu.processes_hidden else "yes" if gpu.processes else UNTOLD


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")
