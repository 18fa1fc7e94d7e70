"""Changes by a newer file of the sidecar, brought about model by model while it runs.

A model whose engine would be started as before has its new settings at once. One whose engine would be started
otherwise, or that is gone, is withdrawn first (withdrawals.py). Then its new settings count, or its name goes. A still
newer file, also one that takes everything back, finds whatever there is then.
"""

from __future__ import annotations

from sidecar.core.config import SidecarConfig
from sidecar.core.file.reload import Reload, changes, in_force, too_many
from sidecar.core.model_state import ModelState
from sidecar.residency.engine_steps import EngineSteps
from sidecar.residency.planner import Planner
from sidecar.residency.shared import SharedState
from sidecar.residency.withdrawals import Withdrawals


class FileChanges:
    """Changes of the file to the shared models, which are added and removed here. `config`: the config in force, with
    the old profiles of engines that have to end first."""

    def __init__(
        self, shared: SharedState, config: SidecarConfig, planner: Planner, withdrawals: Withdrawals, steps: EngineSteps
    ) -> None:
        self.config = config
        self._taken = config  # what the newest file says
        self._planner, self._withdrawals, self._steps, self._engines = planner, withdrawals, steps, shared.engines
        self._models, self._times, self._tasks = shared.models, shared.times, shared.tasks
        self._touch, self._clock, self._say = shared.touch, shared.clock, shared.say

    def take(self, file: SidecarConfig, taken: SidecarConfig, host_memory: int) -> Reload:
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
                self._withdrawals.stays(model)
        self._come_into_force()
        for name in found.added:
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
            if self._withdrawals.end(model):
                self._ended(model)

    def _ended(self, model: ModelState) -> None:
        """Apply the new settings of a model whose engine has ended, or remove the model if the file no longer has
        it."""
        was_awake = self._withdrawals.forget(model)
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
