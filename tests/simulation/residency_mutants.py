"""Bugs planted in the sidecar, which the laws over random machines must find. See mutants.py."""

from __future__ import annotations

from sidecar.core.model_state import ModelState
from sidecar.residency.engine_sizes import EngineSizes
from sidecar.residency.engine_steps import EngineSteps
from sidecar.residency.gpu_tasks import GpuTasks
from sidecar.residency.operations import Operations
from sidecar.residency.sleep_steps import SleepSteps
from tests.simulation.mutants import Mutant

# An operation that gives up leaves its orders behind.
LEFT_PENDING = Mutant(Operations, "_give_up", 'self._steps.transition(model, "cancel")', "pass")

# A start that failed for memory teaches nothing, and is tried again all the same.
UNTAUGHT = Mutant(EngineSizes, "learns", "self._known.lessons[model.name] = lesson", "return True")

# What two operations need of one GPU is given to both.
SHARED_GPU = Mutant(GpuTasks, "free", "or any(self._locked[gpu] for gpu in gpus or (ON_CPU,))", "")

# An engine that has failed is forgotten, and goes on.
LEFT_RUNNING = Mutant(EngineSteps, "_processes_ended", "await engine.stop()", "pass")

# What idles is put to sleep or ended though gateways may have sent it calls since.
UNDRAINED = Mutant(
    Operations,
    "evict",
    "if model.lifecycle.pending is DRAIN and not await self._drained(model, after, within):",
    "if False:",
)

# A model that has failed too often is refused for ever: no call leads to another try.
RESTS_FOR_EVER = Mutant(ModelState, "rests", "now < until and ", "")

# A step of an engine that hangs is waited for.
WAITED_FOR = Mutant(SleepSteps, "_in_time", "asyncio.timeout(within)", "asyncio.timeout(600.0)")
