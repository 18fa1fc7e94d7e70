"""Operations that carry out a plan: make room, then start or wake; put to sleep or end what idles. Liveness probes.

The orders are given already: the scheduler decides. An engine that gateways still use is never put to sleep or ended to
make room: the operation gives up, and everything stays as it was.

Engines that are ready are probed: whether they live, answer, and have something to do. The end of a process is noticed
at once, a hang at the next probe. /health says 200 while EngineCore hangs, so the probe asks EngineCore itself.
Findings during an operation on the engine are left to that operation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Literal

from gateway.shared.files.units import GIB
from gateway.shared.tasks import cancel
from sidecar.core.engine_records import EngineFailed
from sidecar.core.lifecycle import DRAIN, RUNNING, SLEEP, SLEEPING, STOP, STOPPED, WAKE
from sidecar.core.model_state import ModelState
from sidecar.core.plan import Plan
from sidecar.core.sleep import Level
from sidecar.residency import engine_steps as steps
from sidecar.residency import planner, sleep_steps
from sidecar.residency.machine import Engine, Machine

DRAIN_WITHIN = 15.0  # seconds for gateways and engine to have ended what runs, where it makes room
ORDERED_WITHIN = 60.0  # seconds, where somebody has ordered it
LOOK_EVERY = 0.05  # seconds between two looks at an engine that is being drained
PROBE_EVERY = 5.0  # seconds between two probes
Reason = Literal["room", "idle", "order", "off"]  # why a model is put to sleep or ended


async def carry_out(
    machine: Machine, model: ModelState, plan: Plan, victims: Mapping[str, ModelState], after: int, *, patient: bool
) -> None:
    """Make room as planned, then start or wake. All of them have their orders: see the scheduler. `after`: the number
    of the last report that was made before they had. `patient`: calls of victims are waited for; where they take too
    long, those go on for as long again as this one has waited."""
    try:
        if await _made_room(machine, model, plan, victims, after, patient=patient):
            await _begin(machine, model, plan)
    finally:
        for victim in victims.values():
            victim.host_booked = 0


async def _made_room(
    machine: Machine, model: ModelState, plan: Plan, victims: Mapping[str, ModelState], after: int, *, patient: bool
) -> bool:
    within = ORDERED_WITHIN if patient else DRAIN_WITHIN
    residues = {name: each.size.residue for name, each in victims.items()}
    evictions: list[tuple[ModelState, Level | None]] = [(victims[each.profile], each.level) for each in plan.sleep]
    evictions += [(victims[name], None) for name in plan.stop if name != model.name]
    for number, (victim, level) in enumerate(evictions):
        machine.say(f"{victim.name} {f'goes to sleep at level {level}' if level else 'ends'} for {model.name}")
        if victim.copy:
            victim.counts["gave_place"] += 1
        if not await evict(machine, victim, level, after, within, "room"):
            if patient:
                model.wanted_since = machine.clock()
            _give_up(machine, [model, *(each for each, _ in evictions[number:])])
            return False
    foreseen = {each.profile: residues[each.profile] for each in plan.sleep}
    larger = [victims[name] for name, residue in foreseen.items() if victims[name].size.residue > residue]
    for victim in sorted(larger, key=lambda each: -each.size.residue):
        if victim.lifecycle.state is SLEEPING and not planner.has_room(machine, model, plan):
            kept = f"{victim.size.residue / GIB:.1f} GiB asleep"
            machine.say(f"{victim.name} keeps {kept}, which leaves too little for {model.name}: it ends")
            if not await steps.end(machine, victim):
                _give_up(machine, [model])
                return False
    if model.off:
        _give_up(machine, [model])
        return False
    return True


async def _begin(machine: Machine, model: ModelState, plan: Plan) -> None:
    """Start or wake a model: there is room."""
    if model.copy_only:
        model.counts["copy"] += 1
    if model.lifecycle.pending is STOP:  # it sleeps where it cannot wake
        if not await steps.end(machine, model):
            return
        model.place(plan)
        machine.transition(model, "start")
    if not await steps.has_room(machine, model):
        machine.say(f"{model.name} is planned anew: less is free there than its victims were to give back")
        _give_up(machine, [model])
        return
    if model.off:  # since a moment ago: nothing has begun that would have to be ended
        _give_up(machine, [model])
        return
    await (sleep_steps.wake if model.lifecycle.pending is WAKE else steps.start)(machine, model)


def _give_up(machine: Machine, models: Sequence[ModelState]) -> None:
    """Withdraw the orders that no step was taken for: those models stay as they are, sleeping ones too."""
    for model in models:
        if model.lifecycle.pending not in (None, SLEEP):
            if model.name not in machine.running:
                model.gpus = ()
            machine.transition(model, "cancel")


async def evict(
    machine: Machine, model: ModelState, level: Level | None, after: int, within: float, reason: Reason
) -> bool:
    """Put a model to sleep at `level`, or end it if None. False: it is still used, or its memory has not come back."""
    try:
        if model.lifecycle.pending is DRAIN and not await _drained(machine, model, after, within):
            return False
    except EngineFailed as error:
        return await steps.fail(machine, model, error)
    began, pins = machine.clock(), model.pins(level)
    made_room = await (steps.end(machine, model) if level is None else sleep_steps.sleep(machine, model, level))
    if made_room and model.lifecycle.state is (STOPPED if level is None else SLEEPING):
        step: Literal["stop", "sleep"] = "stop" if level is None else "sleep"
        if not pins:
            model.times.took(step, machine.clock() - began)
        model.evictions[step, reason] += 1
    return made_room


async def retire(
    machine: Machine, model: ModelState, level: Level | None, after: int, *, ordered: bool, why: str
) -> None:
    """Put an engine to sleep at `level`, or stop it if `level` is None, because it is idle or because that was
    `ordered`. An ordered stop is obeyed in any case. `after`: as in `carry_out`. `why`: the reason for a stop in place
    of sleep."""
    if why:
        machine.say(f"{model.name} is stopped instead of put to sleep: {why}")
    reason: Reason = "off" if model.off else "order" if ordered else "idle"
    try:
        if await evict(machine, model, level, after, ORDERED_WITHIN if ordered else DRAIN_WITHIN, reason):
            return
        if ordered and level is None and model.lifecycle.pending is DRAIN:
            await steps.end(machine, model)
        else:
            _give_up(machine, [model])
    finally:
        model.host_booked = 0


async def _drained(machine: Machine, model: ModelState, after: int, within: float) -> bool:
    """Wait until no gateway sends a model calls any more and it has none; False: not in time, or it has just got one.
    Raises EngineFailed where it hangs, since then its calls never end."""
    engine, patient = machine.running[model.name], within == ORDERED_WITHIN
    end, look_at = machine.clock() + within, machine.clock() + PROBE_EVERY
    while True:
        if machine.clock() >= look_at:  # nobody else looks after an engine while an operation has it
            await engine.alive()
            look_at = machine.clock() + PROBE_EVERY
        drained = machine.demand.drained(model.name, after)
        if drained:
            model.busy = await engine.busy()
            if not model.busy:
                return True
        if machine.clock() >= end or (drained is False and not patient):
            return False
        await asyncio.sleep(LOOK_EVERY)


# -- liveness probes --------------------------------------------------------------------------------------------------


def look_after(machine: Machine, model: ModelState) -> None:
    """Probe the engine of a model from now on, if it has one and is not probed yet."""
    engine = machine.running.get(model.name)
    if engine is not None and engine not in machine.watched:
        machine.watched[engine] = asyncio.Event()
        machine.tasks.spawn(_look(machine, model, engine))


def look_now(machine: Machine, model: ModelState) -> None:
    """Probe a model's engine now, before it is time: the last finding may not hold any more."""
    engine = machine.running.get(model.name)
    if engine in machine.watched:
        machine.watched[engine].set()


async def _look(machine: Machine, model: ModelState, engine: Engine) -> None:
    ended = asyncio.ensure_future(engine.ended())
    try:
        while machine.running.get(model.name) is engine:
            await _time(ended, machine.watched[engine])
            if model.name in machine.tasks:
                if ended.done():
                    await machine.tasks.wait(model.name)
                continue
            try:
                await _probe(machine, model, engine, ended)
            except EngineFailed as error:
                if machine.running.get(model.name) is engine and model.name not in machine.tasks:
                    machine.tasks.begin([model.name], model.gpus, steps.fail(machine, model, error))
                    await machine.tasks.wait(model.name)
    finally:
        del machine.watched[engine]
        await cancel(ended)


async def _time(ended: asyncio.Future[str], now: asyncio.Event) -> None:
    """Wait until it is time to probe."""
    asked = asyncio.ensure_future(now.wait())
    try:
        await asyncio.wait((ended, asked), timeout=PROBE_EVERY, return_when=asyncio.FIRST_COMPLETED)
    finally:
        asked.cancel()
        now.clear()


async def _probe(machine: Machine, model: ModelState, engine: Engine, ended: asyncio.Future[str]) -> None:
    """Ask an engine. Raises EngineFailed."""
    if ended.done():
        raise EngineFailed(f"its process ended: {ended.result()}")
    await engine.alive()
    model.busy = await engine.busy() if model.lifecycle.state is RUNNING else 0
    if model.busy:
        model.used(machine.clock())
