"""Memory of engines: what each will take by its model's files, and what it holds as it starts, serves and sleeps.

Sizes come from the files, from lessons of failed starts, and from measurements. Bytes held are told by NVML for each
process. In a container NVML tells no processes, or those of the host by the host's numbers, among which an engine is
never found. There the growth of a GPU's use while the engine started stands for it. Bytes are per GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec

from gateway.shared.files.units import GIB
from sidecar.core.engine_records import DiskHangs, EngineFacts, EngineFailed, Unusable
from sidecar.core.gpus import GPU, SHARE, taken
from sidecar.core.inventory import Size
from sidecar.core.lesson import AGAIN, MOST_BEYOND, FailedStart, Lesson, Measured, learn, lower_share, measurement
from sidecar.core.lifecycle import START, WAKE
from sidecar.core.model_state import ModelState
from sidecar.core.sleep import MeasuredSleep
from sidecar.residency.machine import Engine, Machine

Shown = TypeVar("Shown", Measured, Lesson, MeasuredSleep)
FILES_EVERY = 30.0  # seconds between two looks whether the files of a model that cannot be run are there now
LESS = 0.95  # of what a guessed claim was, at most, or it is not worth another start
MOST_TOLD = 3  # processes of others


# -- sizes ------------------------------------------------------------------------------------------------------------


def current(known: Mapping[str, Shown], name: str, settings: str) -> Shown | None:
    """Measurement or lesson of a model's engines with these settings; None: none yet."""
    found = known.get(name)
    return found if found is not None and found.settings == settings else None


async def size(machine: Machine, model: ModelState) -> None:
    """Find out what a model's engine will take, on GPUs of each size that it may run on."""
    sizes: dict[int, Size] = {}
    why = ""
    model.slept = current(machine.known.sleeps, model.name, machine.engines.settings(model.name))
    model.unified = machine.monitor.unified
    for total in machine.monitor.sizes(model.profile.gpus, model.profile.tensor_parallel):
        try:
            sizes[total] = await _sized(machine, model, total)
        except Unusable as error:
            why = str(error)
            # A reading of a disk that hangs costs a thread, and is not repeated.
            model.size_again_at = math.inf if isinstance(error, DiskHangs) else machine.clock() + FILES_EVERY
    if sizes:
        model.size_again_at = math.inf
        model.sizes, model.size = sizes, sizes[min(sizes)]
    elif why != model.unusable:
        machine.say(f"{model.name} cannot be run: {why}")
    model.sized, model.unusable = bool(sizes), "" if sizes else why
    machine.touch()


async def _sized(machine: Machine, model: ModelState, total: int) -> Size:
    name, known, settings = model.name, machine.known, machine.engines.settings(model.name)
    refused, why = model.refused
    if why and refused == settings:
        raise Unusable(why)
    measured, lesson = current(known.measured, name, settings), current(known.lessons, name, settings)
    present, unified = len(machine.monitor.gpus), machine.monitor.unified
    found = await machine.engines.sizing.size(name, total, present, measured, lesson, unified=unified)
    if found.pools > machine.host_bound:
        kept, bound = found.pools / GIB, machine.host_bound / GIB
        raise Unusable(
            f"its flags keep {kept:.1f} GiB of host memory (KV offloading, cpu-offload-gb), and engines may have "
            f"{bound:.1f} (host_memory_for_sleep)"
        )
    return found.with_sleep(model.slept)


async def smaller(machine: Machine, model: ModelState) -> Size | None:
    """The size of a model whose start is a guess, where its files have come with that and it claims less by them;
    None: not so."""
    try:
        found = await _sized(machine, model, machine.monitor.smallest(model.gpus))
    except Unusable:
        return None  # it may be so in the middle of a download; if not, its own failure tells more
    return found if not found.guessed and found.claim < LESS * model.size.claim else None


async def learns(machine: Machine, model: ModelState, error: EngineFailed, free: int) -> bool:
    """Learn what a failed start says of memory, of which so much was `free` before. Whether the next start differs."""
    if error.found is None or error.found.kind == AGAIN:
        return error.found is not None
    lessons, total = machine.known.lessons, machine.monitor.smallest(model.gpus)
    failed = FailedStart(size=model.size, found=error.found, total=total, free=free)
    lesson = learn(lessons.get(model.name), failed, machine.engines.settings(model.name))
    if lesson is None:
        return False
    lessons[model.name] = lesson
    try:
        found = await _sized(machine, model, total)
    except Unusable:
        return False
    if found.starts_as(model.size):
        return False
    machine.say(f"{model.name} failed for memory; the next start claims {found.arithmetic}")
    return True


def refuse(machine: Machine, model: ModelState, error: EngineFailed) -> None:
    """Mark a model unusable whose arguments vLLM refused: until its settings change, or somebody asks for it."""
    if error.found is not None and error.found.refused_arguments:
        why = f"vLLM refuses its arguments: {error.found.line}. {error.found.advice}"
        model.refused = machine.engines.settings(model.name), why


def share_advice(machine: Machine, model: ModelState, error: EngineFailed) -> str:
    """Advice where a start with an operator's own share ran out of memory: nobody else changes that share."""
    share, lesson = model.profile.gpu_memory, machine.known.lessons.get(model.name)
    if error.found is None or error.found.kind != "oom" or not isinstance(share, float) or lesson is None:
        return ""
    lower = lower_share(share, lesson, machine.monitor.smallest(model.gpus))
    return f"its gpu_memory of {share:.0%} leaves too little beside it: try gpu_memory: {lower:.0%}"


def forget_lesson(machine: Machine, model: ModelState) -> None:
    """Forget what failed starts have taught, because another vLLM or other GPUs may have changed it."""
    machine.known.lessons.pop(model.name, None)
    model.refused = "", ""


def measure(machine: Machine, model: ModelState, facts: EngineFacts, claim: int, *, peak: int, settled: int) -> None:
    """Record the measured bytes of an engine that serves: its `claim`, its `peak` while it started, and `settled`
    since."""
    model.size = msgspec.structs.replace(model.size, claim=claim)
    kv, known = machine.engines.sizing.kv_bytes(model.name, facts), machine.known
    measured = None if kv is None else measurement(machine.engines.settings(model.name), peak, settled, kv)
    if measured is not None:
        known.measured[model.name] = measured
    if lesson := known.lessons.get(model.name):
        known.lessons[model.name] = lesson.after(measured, machine.monitor.smallest(model.gpus))


# -- bytes held -------------------------------------------------------------------------------------------------------


def seen(machine: Machine, model: ModelState, engine: Engine, gpus: Iterable[GPU]) -> dict[int, int]:
    """Bytes that an engine's processes hold by NVML, by GPU; 0 where NVML does not tell."""
    found = {gpu.index: engine.held(gpu.processes) for gpu in gpus if gpu.index in model.gpus}
    machine.told = machine.told or any(found.values())
    return found


def held(machine: Machine, model: ModelState, gpus: Sequence[GPU], *, alive: bool = False) -> dict[int, int]:
    """Bytes that a model's engine holds now, by GPU: by its processes, or, where these are not told (in a container),
    by what the GPU's use grew while it started. `alive`: it is known to be, so it holds something still."""
    found = seen(machine, model, machine.running[model.name], gpus)
    own = [gpu for gpu in gpus if gpu.index in found]
    if any(found.values()) or (machine.told and not any(gpu.processes_hidden for gpu in own)):
        return found
    most = model.size.residue if model.level else model.size.claim
    foreseen = {gpu.index: (min(model.grown.get(gpu.index, 0), most), gpu.used) for gpu in own}
    if alive:
        return {index: min(size, used) for index, (size, used) in foreseen.items()}
    return {index: size if size <= used else 0 for index, (size, used) in foreseen.items()}  # 0: it is back


def awaited(machine: Machine, model: ModelState, gpus: Sequence[GPU]) -> dict[int, int]:
    """Bytes by GPU by which its use is to fall once a model's engine has ended. None where its neighbours hold nearly
    all that is used: an engine that ended by itself has given its own back already. Less by what they take meanwhile,
    where NVML lists no process."""
    beside = [each for each in machine.models.values() if each is not model]
    theirs = [held(machine, each, gpus, alive=True) for each in beside if each.name in machine.running]
    left = {gpu.index: gpu.used - sum(each.get(gpu.index, 0) for each in theirs) for gpu in gpus}
    blind = [gpu.index for gpu in gpus if not any(gpu.processes.values())]
    coming = {index: sum(unseen(machine, each) for each in beside if index in each.gpus) for index in blind}
    own = held(machine, model, gpus)
    return {i: max(0, size - coming.get(i, 0)) if SHARE * size <= left[i] else 0 for i, size in own.items()}


def unseen(machine: Machine, model: ModelState) -> int:
    """Bytes that a model is taking and NVML does not show yet, on the GPU where that is most."""
    if model.lifecycle.pending not in (START, WAKE):
        return 0
    target = model.size.claim
    if model.name not in machine.running:
        return target
    return max((target - size for size in held(machine, model, machine.monitor.gpus).values()), default=0)


def grows(model: ModelState, before: Mapping[int, int], gpus: Iterable[GPU]) -> None:
    """Note the growth on the GPUs of a model that starts since `before`, the bytes used by GPU when it began."""
    model.grown = {
        gpu.index: max(0, gpu.used - before.get(gpu.index, gpu.used)) for gpu in gpus if gpu.index in model.gpus
    }


def is_ready(machine: Machine, model: ModelState, gpus: Sequence[GPU]) -> None:
    """Note whether NVML lists the processes of an engine that is ready, and so holds memory."""
    if model.gpus:
        machine.blind = not any(seen(machine, model, machine.running[model.name], gpus).values())


def adopted(machine: Machine, model: ModelState) -> None:
    """Note the memory of an engine that ran before this sidecar. The growth of its GPUs' use is unknown, so its claim
    (asleep: its residue) stands in, at most the bytes used."""
    most, gpus = model.size.residue if model.level else model.size.claim, machine.monitor.gpus
    model.grown = {gpu.index: min(most, gpu.used) for gpu in gpus if gpu.index in model.gpus}
    is_ready(machine, model, gpus)


def claim(machine: Machine, model: ModelState, settled: int, before: Mapping[int, int]) -> int:
    """Return the claim in bytes of an engine that serves and holds `settled`. The claim includes bytes beyond the
    booked ones, because the engine gives them back when it ends. By the GPU's totals a neighbour's growth looks like
    the engine's own, so at most a fourth beyond the booked bytes is believed. If the GPUs cannot be read now, the claim
    is all of that, as far as it was free before the start: with less booked, the engine would not be evicted for a
    model that needs the whole GPU. `before`: bytes used by GPU when the engine began to start."""
    booked = model.size.claim
    most = booked + booked // MOST_BEYOND
    if machine.monitor.error:
        free = [total - before.get(gpu, 0) for gpu, total in machine.monitor.totals if gpu in model.gpus]
        return max(booked, min([most, *free])) if free else booked
    grown = max(model.grown.values(), default=0) if machine.blind else 0
    return max(booked, settled, min(grown, most))


def woken(model: ModelState, before: Iterable[GPU], gpus: Iterable[GPU]) -> None:
    """Note the growth of an engine that woke: it was asleep at the reading `before`. An engine adopted asleep has no
    noted growth above its residue."""
    used, grown = {gpu.index: gpu.used for gpu in before}, model.grown
    for gpu in gpus:
        if gpu.index in grown:
            asleep = min(grown[gpu.index], model.size.residue)
            awake = min(asleep + gpu.used - used.get(gpu.index, gpu.used), model.size.claim)
            grown[gpu.index] = max(grown[gpu.index], awake)


def residue(
    machine: Machine, model: ModelState, before: Iterable[GPU], held: Mapping[int, int], gpus: Sequence[GPU]
) -> dict[int, int]:
    """Bytes that an engine has not given back, by GPU, of those that it `held` at the reading `before`. By totals a
    neighbour that ended meanwhile looks like its memory. All of them where a GPU cannot be read."""
    now = {gpu.index: gpu for gpu in gpus if gpu.readable}
    found = seen(machine, model, machine.running[model.name], gpus)
    if not any(found.values()):
        then = {gpu.index: gpu for gpu in before}
        kept = {i: size - then[i].used + now[i].used - taken(then[i], now[i]) for i, size in held.items() if i in now}
        found = {i: min(held[i], max(0, size)) for i, size in kept.items()}
    return {index: found[index] if index in now else size for index, size in held.items()}


async def given_back(machine: Machine, engine: Engine, share: float, claim: int) -> bool:
    """Whether an engine holds no more than this share of its claim on any GPU, or does soon. Where NVML tells none of
    its processes, whatever is used there may be its own."""

    def most(gpu: GPU) -> int:
        return engine.held(gpu.processes) or gpu.used

    return not engine.gpus or await machine.monitor.until(
        lambda gpus: all(most(gpu) <= share * claim for gpu in gpus if gpu.index in engine.gpus)
    )


def foreign(machine: Machine, model: ModelState) -> str:
    """The processes that hold most of a model's GPUs and are no engine's of this sidecar, in words; empty: none told.
    Where NVML is blind, our engines would be among them."""
    others = [
        (size, f"process {pid} holds {size / GIB:.1f} GiB of GPU {gpu.index}")
        for gpu in (() if machine.blind else machine.monitor.gpus)
        for pid, size in gpu.processes.items()
        if gpu.index in model.gpus and size and not any(e.held({pid: size}) for e in machine.running.values())
    ]
    return ", ".join(words for _, words in sorted(others, reverse=True)[:MOST_TOLD])
