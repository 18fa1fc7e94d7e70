"""Takeover of the engines that an earlier sidecar has left running; one that cannot be taken over is ended."""

from __future__ import annotations

import contextlib

from sidecar.core.engine_records import EngineFailed, EngineRecord
from sidecar.core.lifecycle import RUNNING, SLEEPING, Lifecycle
from sidecar.core.model_state import ModelState
from sidecar.residency.effects import Engine
from sidecar.residency.engine_steps import EngineSteps
from sidecar.residency.shared import SharedState
from sidecar.residency.sleep_steps import LEAST_FREED


async def take_over(name: str, record: EngineRecord, shared: SharedState, steps: EngineSteps) -> None:
    """Take over an engine by its record. The engine is ended instead if the file no longer has its model, if its
    profile has changed, if it was in the middle of waking (its weights may then be missing), or if it has fallen asleep
    since its record and still holds its memory."""
    model, engines, host, say, now = shared.models.get(name), shared.engines, shared.host, shared.say, shared.clock()
    try:
        engine = await engines.adopt(name, record)
    except EngineFailed as error:
        say(f"{name} is not taken over: {error}")
        return
    why = "the file no longer has it"
    if model is not None:
        why = await _adopted(model, engine, record, steps, changed=record.settings != engines.settings(name))
    if model is None or why:
        say(f"{name}, which runs already, is ended: {why}")
        with contextlib.suppress(EngineFailed):
            await engine.stop()
        return
    model.lifecycle = Lifecycle(now, SLEEPING if model.level else RUNNING)
    model.gpus, model.size, model.first_residue = engine.gpus, record.size, record.first_residue
    model.host_pinned = model.level == 1 or record.host > 0
    host.keep(name, record.size.pools)
    host.adopt(name, max(record.host, record.size.host if model.level == 1 else 0))
    model.sized, model.unusable = True, ""
    model.used(now)
    steps.running[name] = engine
    steps.adopted(model)
    steps.facts[name] = record.told
    say(f"{name} runs already and is taken over{f', asleep at level {model.level}' if model.level else ''}")


async def _adopted(
    model: ModelState, engine: Engine, record: EngineRecord, steps: EngineSteps, *, changed: bool
) -> str:
    """The reason why it cannot be adopted; empty: it can, and sleeps at the model's level."""
    if changed:
        return "its profile has changed"
    try:
        level = await engine.awake()
        await engine.alive()
    except EngineFailed as error:
        return str(error)
    if record.level == 2 and not level:
        return "it was in the middle of waking, and its weights may not be there"
    if level and not record.level and not await steps.memory.given_back(engine, 1 - LEAST_FREED, record.size.claim):
        return "it was in the middle of falling asleep, and its memory has not come back"
    model.level = level
    return ""
