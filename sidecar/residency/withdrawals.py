"""Withdrawal of models whose engines are to end, by a newer file, once their calls have.

Gateways send such an engine nothing more. Nothing is locked until its calls have ended, so other models of its GPUs
move as ever. Then it ends.
"""

from __future__ import annotations

from sidecar.core.lifecycle import DRAIN, ERROR, SLEEPING, STARTING, STOPPED
from sidecar.core.model_state import ModelState
from sidecar.residency.engine_steps import EngineSteps
from sidecar.residency.scheduler import Scheduler
from sidecar.residency.shared import SharedState

CALLS_WITHIN = 600.0  # seconds for the calls of an engine that is to end, as clients of vLLM wait for an answer


class Withdrawals:
    """The withdrawals under way."""

    def __init__(self, shared: SharedState, scheduler: Scheduler, steps: EngineSteps) -> None:
        self._scheduler, self._steps = scheduler, steps
        self._demand, self._tasks, self._clock = shared.demand, shared.tasks, shared.clock
        self._withdrawn: dict[str, tuple[int, float]] = {}  # the last report before that, and when to wait no longer

    def end(self, model: ModelState) -> bool:
        """Do what is due; to be asked whenever anything has changed. Whether its engine has ended, and nothing is under
        way about it."""
        life = model.lifecycle
        if model.name in self._tasks:
            if life.state is STARTING:
                self._steps.stop_starting(model)
        elif life.state in (STOPPED, ERROR):
            return True
        elif (life.state is SLEEPING or self._calls_over(model)) and self._tasks.free(model.gpus):
            self._scheduler.begin_idle(model, "stop", ordered=True)
        return False

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

    def stays(self, model: ModelState) -> None:
        """Cancel the withdrawal of an engine, unless a reason for its end remains."""
        if model.off:
            return
        if self.forget(model) and model.lifecycle.pending is DRAIN and model.name not in self._tasks:
            self._steps.transition(model, "cancel")

    def forget(self, model: ModelState) -> bool:
        """Forget the withdrawal of an engine that has ended or stays. Return whether the engine was awake when the
        withdrawal began."""
        return self._withdrawn.pop(model.name, None) is not None
