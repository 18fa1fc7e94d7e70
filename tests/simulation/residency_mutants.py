"""Bugs planted in the sidecar, which the laws over random machines must find. See mutants.py."""

from __future__ import annotations

from sidecar.core.model_state import ModelState
from sidecar.residency import engine_memory, engine_steps, operations, sleep_steps
from sidecar.residency.machine import GpuTasks
from tests.simulation.mutants import Mutant

# An operation that gives up leaves its orders behind.
LEFT_PENDING = Mutant(operations, "_give_up", 'machine.transition(model, "cancel")', "pass")

# A start that failed for memory teaches nothing, and is tried again all the same.
UNTAUGHT = Mutant(engine_memory, "learns", "lessons[model.name] = lesson", "return True")

# What two operations need of one GPU is given to both.
SHARED_GPU = Mutant(GpuTasks, "free", "or any(self._locked[gpu] for gpu in gpus or (ON_CPU,))", "")

# An engine that has failed is forgotten, and goes on.
LEFT_RUNNING = Mutant(engine_steps, "_processes_ended", "await engine.stop()", "pass")

# What idles is put to sleep or ended though gateways may have sent it calls since.
UNDRAINED = Mutant(
    operations,
    "evict",
    "if model.lifecycle.pending is DRAIN and not await _drained(machine, model, after, within):",
    "if False:",
)

# A model that has failed too often is refused for ever: no call leads to another try.
RESTS_FOR_EVER = Mutant(ModelState, "rests", "now < until and ", "")

# A step of an engine that hangs is waited for.
WAITED_FOR = Mutant(sleep_steps, "_in_time", "asyncio.timeout(within)", "asyncio.timeout(600.0)")
