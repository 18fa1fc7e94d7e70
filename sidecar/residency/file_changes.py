"""Changes by a newer file of the sidecar, brought about model by model while it runs.

A model whose engine would be started as before has its new settings at once. One whose engine would be started
otherwise, or that is gone, is withdrawn first: gateways send its engine nothing more, and the engine ends once its
calls have. Nothing is locked until then, so other models of its GPUs move as ever. Then its new settings count, or its
name goes. A still newer file, also one that takes everything back, finds whatever there is then.
"""

from __future__ import annotations

import msgspec

from sidecar.core.config import MAX_MODELS, SidecarConfig
from sidecar.core.lifecycle import DRAIN, ERROR, SLEEPING, STARTING, STOPPED
from sidecar.core.model_state import ModelState
from sidecar.core.reload import NEW, Changes, changes
from sidecar.residency import engine_memory as memory
from sidecar.residency import engine_steps as steps
from sidecar.residency import scheduler
from sidecar.residency.machine import Machine

CALLS_WITHIN = 600.0  # seconds for the calls of an engine that is to end, as clients of vLLM wait for an answer


class FileChanges:
    """Changes of the file to the models of a machine, which are added and removed here."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._taken = machine.config  # what the newest file says

    def take(self, file: SidecarConfig, taken: SidecarConfig, host_memory: int) -> Changes:
        """Take a newer file, of which `taken` takes effect. Raises ValueError, with nothing changed."""
        machine, models = self._machine, self._machine.models
        if (together := len({*models, *taken.models})) > MAX_MODELS:
            why = f"with those that have to end first there are {together}, and a report holds {MAX_MODELS}"
            raise ValueError(f"models: {why}")
        before, was = machine.config, self._taken
        found = changes(was, file, taken, lambda name: self._same(name, was, taken))
        self._taken = taken
        machine.host_bound = host_memory
        for name, model in models.items():
            model.leaving = name not in taken.models
            model.replaced = model.leaving or not self._same(name, before, taken)
            if not model.replaced:
                model.profile = taken.models[name]
                self._stays(model)
                if model.unusable and name not in machine.tasks:  # its pools may have room now
                    self._size(model)
        self._come_into_force()
        for name in found[NEW]:
            if name not in models:
                models[name] = ModelState(name, taken.models[name], machine.clock(), machine.times)
                self._size(models[name])
        self.turn()
        machine.touch()
        return found

    def _same(self, name: str, before: SidecarConfig, after: SidecarConfig) -> bool:
        """Whether a model's engine is started in the same way by both."""
        settings = self._machine.engines.settings
        return settings(name, before) == settings(name, after)

    def _come_into_force(self) -> None:
        """Have engines started and sized by the newest file, and those that have to end first known as they were."""
        machine, was = self._machine, self._machine.config
        ending = [name for name, model in machine.models.items() if model.replaced]
        kept = {name: msgspec.structs.replace(was.models[name], engine=was.engine_of(name)) for name in ending}
        machine.config = msgspec.structs.replace(self._taken, models={**self._taken.models, **kept})
        machine.engines.apply(machine.config)

    # -- what has to end first ----------------------------------------------------------------------------------

    def turn(self) -> None:
        """Do what is due for models that have to end first; to be asked whenever anything has changed."""
        machine = self._machine
        for model in [model for model in machine.models.values() if model.replaced]:
            life = model.lifecycle
            if model.name in machine.tasks:
                if life.state is STARTING:
                    steps.stop_starting(machine, model)
            elif life.state in (STOPPED, ERROR):
                self._ended(model)
            elif (life.state is SLEEPING or self._calls_over(model)) and machine.tasks.free(model.gpus):
                scheduler.begin_idle(machine, model, "stop", ordered=True)

    def _calls_over(self, model: ModelState) -> bool:
        """Whether no gateway sends a model anything any more and it has nothing to do, or that has lasted for too
        long."""
        machine, life, known = self._machine, model.lifecycle, model.withdrawn
        now, demand = machine.clock(), machine.demand
        if known is None or life.pending is None:  # or somebody else had withdrawn it, and has given that up
            known = model.withdrawn = demand.reports, now + CALLS_WITHIN if known is None else known[1]
            if life.pending is None:
                machine.transition(model, "drain")
        after, until = known
        return now >= until or (demand.drained(model.name, after) is True and not model.busy)

    def _stays(self, model: ModelState) -> None:
        """Cancel the withdrawal of an engine, unless a reason for its end remains."""
        if model.off:
            return
        withdrawn, model.withdrawn = model.withdrawn is not None, None
        if withdrawn and model.lifecycle.pending is DRAIN and model.name not in self._machine.tasks:
            self._machine.transition(model, "cancel")

    def _ended(self, model: ModelState) -> None:
        """Apply the new settings of a model whose engine has ended, or remove the model if the file no longer has
        it."""
        machine = self._machine
        if model.leaving:
            del machine.models[model.name], machine.times[model.name]
            machine.say(f"{model.name} is gone, as the file no longer has it")
        else:
            model.renew(self._taken.models[model.name], machine.clock())
            machine.say(f"{model.name} has its new settings")
        self._come_into_force()
        if not model.leaving:
            self._size(model)
        machine.touch()

    def _size(self, model: ModelState) -> None:
        self._machine.tasks.begin([model.name], (), memory.size(self._machine, model))
