"""Changes by a newer file of the sidecar, brought about model by model while it runs.

A model whose engine would be started as before has its new settings at once. One whose engine would be started
otherwise, or that is gone, is withdrawn first: gateways send its engine nothing more, and the engine ends once its
calls have. Nothing is locked until then, so other models of its GPUs move as ever. Then its new settings count, or its
name goes. A still newer file, also one that takes everything back, finds whatever there is then.
"""

from __future__ import annotations

from sidecar.core.config import SidecarConfig
from sidecar.core.lifecycle import DRAIN, ERROR, SLEEPING, STARTING, STOPPED
from sidecar.core.model_state import ModelState
from sidecar.core.reload import NEW, Changes, changes, in_force, too_many
from sidecar.residency.engine_steps import EngineSteps
from sidecar.residency.planner import Planner
from sidecar.residency.scheduler import Scheduler
from sidecar.residency.shared import SharedState

CALLS_WITHIN = 600.0  # seconds for the calls of an engine that is to end, as clients of vLLM wait for an answer


class FileChanges:
    """Changes of the file to the shared models, which are added and removed here. `config`: the config in force, with
    the old profiles of engines that have to end first."""

    def __init__(
        self, shared: SharedState, config: SidecarConfig, planner: Planner, scheduler: Scheduler, steps: EngineSteps
    ) -> None:
        self.config = config
        self._taken = config  # what the newest file says
        self._withdrawn: dict[str, tuple[int, float]] = {}  # the last report before that, and when to wait no longer
        self._planner, self._scheduler, self._steps, self._engines = planner, scheduler, steps, shared.engines
        self._models, self._times, self._tasks, self._demand = shared.models, shared.times, shared.tasks, shared.demand
        self._touch, self._clock, self._say = shared.touch, shared.clock, shared.say

    def take(self, file: SidecarConfig, taken: SidecarConfig, host_memory: int) -> Changes:
        """Take a newer file, of which `taken` takes effect. Raises ValueError, with nothing changed."""
        wrong = too_many(self._models, taken.models)
        if wrong:
            raise ValueError(wrong)
        before, was = self.config, self._taken
        found = changes(was, file, taken, lambda name: self._same(name, was, taken))
        self._taken = taken
        self._planner.host.bound = host_memory
        now = self._clock()
        for name, model in self._models.items():
            model.leaving = name not in taken.models
            model.replaced = model.leaving or not self._same(name, before, taken)
            if not model.replaced:
                model.preloads = model.preloads or (taken.models[name].preload and not model.profile.preload)
                model.profile = taken.models[name]
                model.not_preloaded = model.not_preloaded if model.profile.preload else ""
                self._stays(model)
        self._come_into_force()
        for name in found[NEW]:
            if name not in self._models:
                self._models[name] = ModelState(name, taken.models[name], now, self._times)
                self._size(self._models[name])
        self.turn()
        self._touch()
        return found

    def _same(self, name: str, before: SidecarConfig, after: SidecarConfig) -> bool:
        """Whether its engine is started in the same way by both."""
        return self._engines.settings(name, before) == self._engines.settings(name, after)

    def _come_into_force(self) -> None:
        ending = {name for name, model in self._models.items() if model.replaced}
        self.config = self._planner.config = in_force(self.config, self._taken, ending)
        self._engines.apply(self.config)

    # -- what has to end first ----------------------------------------------------------------------------------

    def turn(self) -> None:
        """Do what is due for models that have to end first; to be asked whenever anything has changed."""
        for model in [model for model in self._models.values() if model.replaced]:
            life = model.lifecycle
            if model.name in self._tasks:
                if life.state is STARTING:
                    self._steps.stop_starting(model)
            elif life.state in (STOPPED, ERROR):
                self._ended(model)
            elif (life.state is SLEEPING or self._calls_over(model)) and self._tasks.free(model.gpus):
                self._scheduler.begin_idle(model, "stop", ordered=True)

    def _calls_over(self, model: ModelState) -> bool:
        """Whether no gateway sends it anything any more and it has nothing to do, or that has lasted for too long."""
        now, known = self._clock(), self._withdrawn.get(model.name)
        if known is None or model.lifecycle.pending is None:  # or somebody else had withdrawn it, and has given that up
            known = self._demand.reports, now + CALLS_WITHIN if known is None else known[1]
            self._withdrawn[model.name] = known
            if model.lifecycle.pending is None:
                self._steps.transition(model, "drain")
        after, until = known
        return now >= until or (self._demand.drained(model.name, after) is True and not model.busy)

    def _stays(self, model: ModelState) -> None:
        """Cancel the withdrawal of an engine, unless a reason for its end remains."""
        if model.off:
            return
        withdrawn = self._withdrawn.pop(model.name, None) is not None
        if withdrawn and model.lifecycle.pending is DRAIN and model.name not in self._tasks:
            self._steps.transition(model, "cancel")

    def _ended(self, model: ModelState) -> None:
        """Apply the new settings of a model whose engine has ended, or remove the model if the file no longer has
        it."""
        was_awake = self._withdrawn.pop(model.name, None) is not None
        self._steps.facts.pop(model.name, None)
        if model.leaving:
            del self._models[model.name], self._times[model.name]
            self._steps.forget(model)
            self._say(f"{model.name} is gone, as the file no longer has it")
        else:
            model.renew(self._taken.models[model.name], self._clock())
            model.preloads = model.profile.preload and was_awake
            self._say(f"{model.name} has its new settings")
        self._come_into_force()
        if not model.leaving:
            self._size(model)
        self._touch()

    def _size(self, model: ModelState) -> None:
        self._tasks.begin([model.name], (), self._steps.sizes.size(model))
