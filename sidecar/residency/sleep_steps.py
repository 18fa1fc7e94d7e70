"""Steps of one engine that sleeps and wakes, and what they teach: its residue, its host memory, a level that harms it.

An engine counts as asleep only where memory has come back, by its processes or by what the GPU's use fell. However much
it keeps then is its residue, and no reason to end it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

import msgspec

from gateway.shared.files.units import GIB
from sidecar.core.engine_records import EngineFailed
from sidecar.core.gpus import GPU, SHARE
from sidecar.core.model_state import ModelState
from sidecar.core.sleep import LEAST_RESIDUE, Level, MeasuredSleep, residue_exceeded
from sidecar.residency import engine_memory as memory
from sidecar.residency import engine_steps as steps
from sidecar.residency.machine import Engine, Machine

LEAST_FREED = 0.25  # of what an engine held: who gives back less does not sleep, whatever it says
LATE = 30.0  # seconds beyond what was expected after which a step hangs, and its engine is ended
UNSURE = 3.0  # times what was foretold is expected of a step that was never measured, or that reads a disk
VARIES = 0.5  # seconds more than measured that waking may take: 0.4 and 0.6 s were measured of one engine
BELIEVED = 0.5  # of the host memory that was booked: growth below it shows that pinned memory is not told here


async def sleep(machine: Machine, model: ModelState, level: Level) -> bool:
    """Put a model to sleep, and see its memory come back. One that gives none back, or took more host memory than there
    is, is ended; False: its memory has not come back by that either."""
    engine = machine.running[model.name]
    before = await machine.monitor.look()
    held = memory.held(machine, model, before, alive=True)
    host = engine.host_held()
    machine.transition(model, "sleep")
    began = machine.clock()
    try:
        pins = model.pins(level)
        sure = model.times.seen.sleep and not pins
        expected = model.times.sleep_seconds(model.size, level, first=pins) * (1.0 if sure else UNSURE)
        await _in_time(engine.sleep(level), f"falling asleep at level {level}", expected + LATE)
        kept = await _given_back(machine, model, before, held, level)
    except EngineFailed as error:
        return await steps.fail(machine, model, error)
    residue = max([*kept.values(), min(LEAST_RESIDUE, model.size.residue)])
    taken = _host_taken(model, engine.host_held() - host) if level == 1 else 0
    # What it kept at its first sleep, and what it took of host memory, where that was measured.
    changes = {"residue": residue} if residue and not model.first_residue else {}
    changes |= {"host": taken} if taken not in (0, model.size.host) else {}
    if changes:
        _learn(machine, model, **changes)
    if level == 1 and not machine.host_fits(model, taken):
        left = machine.host_left(model) / GIB
        machine.say(f"{model.name} took {taken / GIB:.1f} GiB of host memory asleep, {left:.1f} were left: it ends")
        return await steps.end(machine, model)
    if level == 1:
        model.host_booked, model.host_taken = 0, max(taken, model.host_taken)
    model.fell_asleep(level, residue)
    machine.transition(model, "slept")
    machine.keep()
    machine.say(f"{model.name} sleeps at level {level} after {machine.clock() - began:.2f} s")
    if residue_exceeded(model.first_residue, residue):
        grown = f"it kept {model.first_residue / GIB:.1f} GiB at first and {residue / GIB:.1f} now"
        machine.say(f"{model.name} is stopped instead of its next sleep: {grown}")
    return True


async def wake(machine: Machine, model: ModelState) -> None:
    """Wake a model where it sleeps. One that answers otherwise after level 2 is not put there again."""
    engine, level = machine.running[model.name], model.level
    model.began = began = machine.clock()
    try:
        if level:
            await _wake(machine, model, engine, level)
    except EngineFailed as error:
        if error.wrong and level == 2:
            _learn(machine, model, wrong=True)
            machine.say(f"{model.name} does not sleep at level 2 any more, while its settings stay as they are")
        await steps.fail(machine, model, error)
        return
    if level:
        model.times.took("wake1" if level == 1 else "wake2", machine.clock() - began)
    model.level = 0
    steps.serves(machine, model, "woken")
    machine.say(f"{model.name} is awake after {machine.clock() - began:.2f} s")


async def _wake(machine: Machine, model: ModelState, engine: Engine, level: Level) -> None:
    """Wake an engine, alone on its GPUs for as long as is expected: whoever is late is not waited for. Raises
    EngineFailed."""
    expected = model.wake_seconds[level - 1] * (1.0 if getattr(model.times.seen, f"wake{level}") else UNSURE)
    # Level 2 reads files, which were in the page cache when it was measured, and may be on the disk alone now.
    longest = max(expected, UNSURE * model.times.reads(model.size)) if level == 2 else expected
    before = await machine.monitor.look()
    late = asyncio.get_running_loop().call_later(expected + VARIES, _is_late, machine, model, expected)
    try:
        await _in_time(engine.wake(level, model.facts), f"waking from level {level}", longest + LATE)
    finally:
        late.cancel()
    if machine.clock() < late.when():  # else others have used its GPUs meanwhile
        memory.woken(model, before, await machine.monitor.look())


def _is_late(machine: Machine, model: ModelState, expected: float) -> None:
    machine.say(f"{model.name} is late to wake, which takes {expected:.1f} s: others may use its GPUs meanwhile")
    machine.tasks.share(model.name)


async def _in_time(step: Coroutine[Any, Any, None], what: str, within: float) -> None:
    """Carry out a step of an engine. Raises EngineFailed, also where it takes longer than `within` seconds."""
    try:
        async with asyncio.timeout(within):
            await step
    except TimeoutError:
        raise EngineFailed(f"it hangs: {what} has taken {within:.0f} s") from None


async def _given_back(
    machine: Machine, model: ModelState, before: Sequence[GPU], held: Mapping[int, int], level: Level
) -> dict[int, int]:
    """Bytes that an engine keeps on each GPU, once it has given back what is foreseen or had the time to. Raises
    EngineFailed where that is next to nothing."""
    residue = model.size.residue

    def returned(gpus: Sequence[GPU]) -> bool:
        kept = memory.residue(machine, model, before, held, gpus)
        return all(size - kept[gpu] >= SHARE * (size - residue) for gpu, size in held.items())

    await machine.monitor.until(returned)
    kept = memory.residue(machine, model, before, held, machine.monitor.gpus)
    for gpu, size in held.items():
        if size - kept[gpu] < LEAST_FREED * size:
            freed = f"{(size - kept[gpu]) / GIB:.1f} of {size / GIB:.1f} GiB of GPU {gpu}"
            raise EngineFailed(f"it sleeps at level {level}, and its memory has not come back: {freed}")
    return kept


def _host_taken(model: ModelState, grown: int) -> int:
    """Bytes of host memory that an engine has at level 1: what its processes grew by, where that shows pinned memory;
    what was booked otherwise. It keeps them, so later sleeps take nothing."""
    before, booked = model.host_taken, model.size.host
    if before or not booked:
        return before
    return grown if grown >= BELIEVED * booked else booked


def _learn(machine: Machine, model: ModelState, **changes: int) -> None:
    was = model.slept or MeasuredSleep(settings=machine.engines.settings(model.name))
    model.slept = machine.known.sleeps[model.name] = msgspec.structs.replace(was, **changes)
