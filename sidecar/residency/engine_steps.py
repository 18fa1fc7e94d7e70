"""Steps of one engine: start, end, fail. Each sees the memory come and go before it is over (sleep_steps.py: sleep).

A step begins with its order given already (`pending` says what for). It ends with the fact that answers the order, on
every path: an engine that fails is ended, and its memory is waited for, before anything else may count on it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Literal

from gateway.shared.tasks import cancel
from sidecar.core.engine_records import EngineFacts, EngineFailed
from sidecar.core.gpus import GPU
from sidecar.core.lesson import taken_by_others
from sidecar.core.lifecycle import ERROR, STARTING, STOP, Event
from sidecar.core.model_state import ModelState
from sidecar.core.step_times import StartClock
from sidecar.residency import engine_memory as memory
from sidecar.residency.machine import Machine

SIZE_EVERY = 5.0  # seconds between two looks for the files of a model that come with its start
SAMPLE_EVERY = 1.0  # seconds between two looks at a starting engine's memory
KEPT = 200  # lines of an engine that has ended
HEARD = 300  # of its last lines that are looked at each time, for the stage of its start


class _Sized(Exception):
    """A start with a guessed claim is to be repeated with the true one; the message says so."""


async def has_room(machine: Machine, model: ModelState) -> bool:
    """Whether as much is free on a model's GPUs as its start or its waking takes. What made room may have kept more,
    and other processes may have taken it."""
    needs = model.size.claim - model.size.residue if model.level else model.size.start_needs
    return all(gpu.free >= needs for gpu in await machine.monitor.look() if gpu.index in model.gpus)


# -- start ------------------------------------------------------------------------------------------------------------


async def start(machine: Machine, model: ModelState) -> None:
    """Start a model's engine on the GPUs that are its own now, until it serves or has failed."""
    stopping = machine.stopping[model.name] = asyncio.Event()
    try:
        gpus = await machine.monitor.look()
        room = min((gpu.free for gpu in gpus if gpu.index in model.gpus), default=0)
        model.began = began = machine.clock()
        stages = model.starting = StartClock(began)
        machine.say(f"{model.name} starts on {_gpu_names(model.gpus)}")
        model.starts += 1
        model.host_pools = model.size.pools
        facts = await _started(machine, model, stages, stopping, {gpu.index: gpu.used for gpu in gpus})
    except _Sized as sized:
        model.taught = True
        await fail(machine, model, EngineFailed(str(sized)), taught=True, how="ends")
        return
    except EngineFailed as error:
        await _failed_to_start(machine, model, error, room, gpus)
        return
    finally:
        del machine.stopping[model.name]
        model.starting = None
    if facts is None or model.lifecycle.pending is STOP:
        await end(machine, model)
        return
    model.facts, now = facts, machine.clock()
    model.times.loaded(now - began, stages.ready(now), model.size)
    serves(machine, model, "ready")
    machine.say(f"{model.name} is ready after {machine.clock() - began:.1f} s on {_gpu_names(model.gpus)}")


async def _started(
    machine: Machine, model: ModelState, stages: StartClock, stopping: asyncio.Event, before: Mapping[int, int]
) -> EngineFacts | None:
    """The engine's facts once it serves; None: somebody wants it ended before that. `before`: bytes used by GPU."""
    try:
        engine = await machine.engines.start(model.name, model.gpus, model.size)
    finally:
        machine.transition(model, "launched")
    machine.running[model.name] = engine
    peak, sized_at = 0, machine.clock()
    ready = asyncio.ensure_future(engine.ready(lambda: peak))
    stop = asyncio.ensure_future(stopping.wait())
    try:
        while True:
            await asyncio.wait((ready, stop), timeout=SAMPLE_EVERY, return_when=asyncio.FIRST_COMPLETED)
            gpus = await machine.monitor.look()
            memory.grows(model, before, gpus)
            held = memory.held(machine, model, gpus)
            peak = max(peak, *held.values(), 0)
            stages.heard(engine.lines(HEARD), machine.clock())
            if model.size.guessed and (ready.done() or machine.clock() >= sized_at + SIZE_EVERY):
                sized_at = machine.clock()
                if (size := await memory.smaller(machine, model)) is not None:
                    raise _Sized(f"its model's files are here now, and it is started anew with {size.arithmetic}")
            if ready.done():
                break
            if stop.done():
                return None
        facts = ready.result()
        memory.is_ready(machine, model, gpus)
        settled = 0 if machine.monitor.error else max(held.values(), default=0)  # an old reading is none
        claim = memory.claim(machine, model, settled, before)
        memory.measure(machine, model, facts, claim, peak=peak, settled=settled)
        return facts
    finally:
        await cancel(ready, stop)


async def _failed_to_start(
    machine: Machine, model: ModelState, error: EngineFailed, room: int, before: Sequence[GPU]
) -> None:
    """Learn from a start that failed, and end what is left of it. `room`: bytes that were free on the fullest of its
    GPUs at the reading `before`."""
    found = error.found
    kind = found.kind if found else "other"
    full = error.out_of_memory and kind != "no_kv"
    told = taken_by_others(found, room) if found else 0
    if full and room - max(told, await _taken_since(machine, model, before)) < model.size.start_needs:
        model.taught, room = True, 0  # others were faster: of this model it tells nothing
    else:
        model.taught = await memory.learns(machine, model, error, room)
        if not model.taught:
            memory.refuse(machine, model, error)
    model.failed_starts[kind] += 1
    model.least_room = room if full else 0
    others = memory.foreign(machine, model) if full else ""
    words = "; ".join(filter(None, (str(error), memory.share_advice(machine, model, error), others)))
    await fail(machine, model, EngineFailed(words, found=found), taught=model.taught)


async def _taken_since(machine: Machine, model: ModelState, before: Sequence[GPU]) -> int:
    """Bytes that others have taken since the reading `before`, on the one of a model's GPUs where that is most. The
    engine is ended first, and the GPUs' totals tell: in a container its own processes look like others'. What NVML
    still tells of them is none of others'. 0: nobody knows."""
    engine, monitor = machine.running.get(model.name), machine.monitor
    await _processes_ended(machine, model)
    if monitor.error:
        return 0
    used = {gpu.index: gpu.used for gpu in before}
    late = {} if engine is None else memory.seen(machine, model, engine, monitor.gpus)
    now = {gpu.index: gpu.used - late.get(gpu.index, 0) for gpu in monitor.gpus if gpu.index in model.gpus}
    return max((size - used.get(index, size) for index, size in now.items()), default=0)


def stop_starting(machine: Machine, model: ModelState) -> None:
    """End a model's engine that starts, if it does."""
    if model.lifecycle.state is STARTING and model.lifecycle.pending is not STOP:
        machine.transition(model, "stop")
    if model.name in machine.stopping:
        machine.stopping[model.name].set()


def serves(machine: Machine, model: ModelState, event: Literal["ready", "woken"]) -> None:
    """Mark an engine as serving, after it became ready or woke."""
    now = machine.clock()
    if model.wanted_since is not None:
        model.used(now)  # by the calls that wait for it, though none of them is there yet
    model.wanted_since, model.infeasible, model.least_room, model.busy = None, None, 0, 0
    model.ordered = False
    model.idle_since = now
    machine.transition(model, event)
    if model.off and model.serves():  # switched off meanwhile: no gateway may send it anything
        machine.transition(model, "drain")
    machine.keep()


# -- end --------------------------------------------------------------------------------------------------------------


async def end(machine: Machine, model: ModelState) -> bool:
    """End a model's engine; False: its memory has not come back."""
    if model.lifecycle.pending is not STOP:
        machine.transition(model, "stop")
    back = await _ended(machine, model)
    machine.transition(model, "stopped")
    machine.keep()
    machine.say(f"{model.name} is stopped")
    return back


async def end_anyway(machine: Machine, model: ModelState) -> None:
    """End a model's engine, whatever was pending: nobody waits for its memory any more."""
    engine = machine.running.pop(model.name, None)
    if engine is None:
        return
    try:
        await engine.stop()
    except EngineFailed as error:
        machine.say(f"{model.name}: {error}")
    if model.lifecycle.pending is not STOP:
        machine.transition(model, "stop")
    model.gone()
    machine.transition(model, "stopped")


async def fail(
    machine: Machine, model: ModelState, error: EngineFailed, *, taught: bool = False, how: str = "failed"
) -> bool:
    """Report a failed engine to gateways at once, then end its processes. Return False if its memory has not come
    back. `taught`: the next start differs. `how`: the kind of end, in a word."""
    event: Event = "out_of_memory" if error.out_of_memory and model.lifecycle.pending else "failed"
    machine.transition(model, "taught" if taught else event, str(error))
    machine.say(f"{model.name} {how}: {error}")
    back = await _ended(machine, model)
    machine.keep()
    if model.lifecycle.pending is STOP:  # somebody wanted it ended
        machine.transition(model, "stopped")
    return back


async def _ended(machine: Machine, model: ModelState) -> bool:
    """End the processes of a model's engine; from then on it has no GPUs. False: its memory has not come back."""
    back = await _processes_ended(machine, model)
    await memory.size(machine, model)  # by what was measured
    model.gone()
    return back


async def _processes_ended(machine: Machine, model: ModelState) -> bool:
    engine = machine.running.get(model.name)
    if engine is None:
        return True
    before = await machine.monitor.look()
    held = memory.awaited(machine, model, before)
    try:
        await engine.stop()
    except EngineFailed as error:
        machine.say(f"{model.name}: {error}")  # what it holds will not come back, which is quarantine
    model.last_lines = engine.lines(KEPT)
    del machine.running[model.name]
    return await machine.monitor.back(before, held)


def settle(machine: Machine, model: ModelState) -> None:
    """Stop a failed engine whose processes are gone, so that the sidecar does not restart it by itself."""
    if model.lifecycle.state is ERROR:
        machine.transition(model, "stop")
        machine.transition(model, "stopped")


async def leave(machine: Machine) -> None:
    """Let all engines go on without this sidecar."""
    for engine in list(machine.running.values()):
        with contextlib.suppress(EngineFailed):
            await engine.leave()
    machine.running.clear()


def _gpu_names(gpus: tuple[int, ...]) -> str:
    return f"GPU {', '.join(map(str, gpus))}" if gpus else "CPU"
