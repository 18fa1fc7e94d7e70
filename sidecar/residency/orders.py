"""Orders of people and gateways: have a model ready, put it to sleep, wake it, stop it, withdraw it.

An order notes what is wanted. The scheduler's next turn does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from gateway.shared.protocol import ModelReport
from sidecar.core.lifecycle import DRAIN, ERROR, RUNNING, STARTING, STOP, STOPPED
from sidecar.core.model_state import ModelState
from sidecar.residency.engine_steps import EngineSteps
from sidecar.residency.gpu_tasks import GpuTasks
from sidecar.residency.planner import Planner
from sidecar.residency.scheduler import Scheduler

Order = Literal["sleep", "wake", "stop", "drain"]


class Refused(Exception):
    """An order that cannot be obeyed now, and why. `retry_in`: seconds after which it may be otherwise, if known."""

    def __init__(self, why: str, retry_in: float | None = None) -> None:
        super().__init__(why)
        self.retry_in = retry_in


class Orders:
    """On the models in `entries`. `report` gives the answer to an order: the model as it is then."""

    def __init__(
        self,
        entries: Mapping[str, ModelState],
        scheduler: Scheduler,
        planner: Planner,
        steps: EngineSteps,
        tasks: GpuTasks,
        *,
        report: Callable[[str], ModelReport],
        touch: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._entries = entries
        self._scheduler = scheduler
        self._planner = planner
        self._steps = steps
        self._tasks = tasks
        self._report = report
        self._touch = touch
        self._clock = clock

    def ensure(self, profile: str) -> ModelReport:
        """It is wanted: start or wake it as soon as that can be. Raises KeyError."""
        entry, now = self._entries[profile], self._clock()
        entry.off = entry.held_back = False
        life = entry.lifecycle
        self.size_again(entry)
        if life.pending is DRAIN and profile not in self._tasks:
            life.step("cancel", now)
        if not entry.serves():
            entry.want(now, ordered=True)
            entry.asked = life.state is ERROR and life.given_up
            self._scheduler.turn()  # so that the answer is what is being done
        self._touch()
        return self._report(profile)

    def give(self, profile: str, what: Order) -> ModelReport:
        """Take an order; the model as it is then. Raises KeyError, and Refused with nothing changed."""
        entry, life = self._entries[profile], self._entries[profile].lifecycle
        if what == "wake":
            if life.state is STOPPED:
                raise Refused(f"{profile} does not sleep, it is stopped: `ensure` starts it")
            return self.ensure(profile)
        if what == "stop" and life.state is STARTING:
            entry.off, entry.wanted_since = True, None
            if life.pending is not STOP:
                life.step("stop", self._clock())
                self._steps.stop_starting(entry)
        elif entry.name in self._tasks:
            doing = life.pending.value if life.pending else "change"
            raise Refused(f"{profile} has a {doing} under way", self._planner.ready_in(entry))
        elif what == "stop":
            self._stop(entry)
        elif life.state is not RUNNING:
            raise Refused(f"{profile} is {life.state.value}, not running")
        elif what == "drain":
            entry.held_back = True
            if life.pending is None:
                life.step("drain", self._clock())
        elif entry.profile.sleeps is None:
            raise Refused(f"{profile} does not sleep: its profile has `sleep: null` or `pin: true`")
        elif not self._tasks.free(entry.gpus):
            raise Refused("something else is under way on its GPUs", 1.0)
        else:
            self._scheduler.begin_idle(entry, "sleep", ordered=True)
        self._touch()
        return self._report(profile)

    def _stop(self, entry: ModelState) -> None:
        entry.off, entry.wanted_since, entry.held_back = True, None, False
        state = entry.lifecycle.state
        if state is ERROR:
            self._steps.settle(entry)
        elif state is not STOPPED:
            self._scheduler.begin_idle(entry, "stop", ordered=True)

    def size_anew(self, entry: ModelState) -> None:
        """Size a model again that has no engine: the GPUs are others."""
        self.size_again(entry)
        if entry.name not in self._steps.running and entry.name not in self._tasks:
            self._tasks.begin([entry.name], (), self._steps.size(entry))

    def size_again(self, entry: ModelState) -> None:
        """Size a model again that could not be run: the reason may be gone."""
        if entry.unusable and entry.name not in self._tasks:
            self._steps.forget_lesson(entry)
            self._tasks.begin([entry.name], (), self._steps.size(entry))
