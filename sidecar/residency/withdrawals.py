"""Withdrawal of models whose engines are to end, by a newer file or by their hours, once their calls have.

Gateways send such an engine nothing more. Nothing is locked until its calls have ended, so other models of its GPUs
move as ever. Then it ends.
"""

from __future__ import annotations

from collections.abc import Callable

from sidecar.core.lifecycle import DRAIN, ERROR, SLEEPING, STARTING, STOP, STOPPED
from sidecar.core.model_state import ModelState
from sidecar.residency.demand import GatewayDemand
from sidecar.residency.engine_steps import EngineSteps
from sidecar.residency.gpu_tasks import GpuTasks
from sidecar.residency.scheduler import Scheduler

CALLS_WITHIN = 600.0  # seconds for the calls of an engine that is to end, as clients of vLLM wait for an answer


class Withdrawals:
    """The withdrawals under way."""

    def __init__(
        self,
        scheduler: Scheduler,
        steps: EngineSteps,
        tasks: GpuTasks,
        demand: GatewayDemand,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._steps = steps
        self._tasks = tasks
        self._demand = demand
        self._clock = clock
        self._withdrawn: dict[str, tuple[int, float]] = {}  # the last report before that, and when to wait no longer

    def end(self, entry: ModelState) -> bool:
        """Do what is due; to be asked whenever anything has changed. Whether its engine has ended, and nothing is under
        way about it."""
        life = entry.lifecycle
        if entry.name in self._tasks:
            if life.state is STARTING and life.pending is not STOP:
                self._steps.transition(entry, "stop")
                self._steps.stop_starting(entry)
        elif life.state in (STOPPED, ERROR):
            return True
        elif (life.state is SLEEPING or self._calls_over(entry)) and self._tasks.free(entry.gpus):
            self._scheduler.begin_idle(entry, "stop", ordered=True)
        return False

    def _calls_over(self, entry: ModelState) -> bool:
        """Whether no gateway sends it anything any more and it has nothing to do, or that has lasted for too long."""
        now, known = self._clock(), self._withdrawn.get(entry.name)
        if known is None or entry.lifecycle.pending is None:  # or somebody else had withdrawn it, and has given that up
            known = self._demand.reports, now + CALLS_WITHIN if known is None else known[1]
            self._withdrawn[entry.name] = known
            if entry.lifecycle.pending is None:
                self._steps.transition(entry, "drain")
        after, until = known
        return now >= until or (self._demand.drained(entry.name, after) is True and not entry.busy)

    def stays(self, entry: ModelState) -> None:
        """Cancel the withdrawal of an engine, unless a reason for its end remains."""
        if entry.held_back or entry.disabled or entry.replaced:
            return
        if self.forget(entry) and entry.lifecycle.pending is DRAIN and entry.name not in self._tasks:
            self._steps.transition(entry, "cancel")

    def forget(self, entry: ModelState) -> bool:
        """Forget the withdrawal of an engine that has ended or stays. Return whether the engine was awake when the
        withdrawal began."""
        return self._withdrawn.pop(entry.name, None) is not None
