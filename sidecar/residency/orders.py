"""Orders of people and gateways: have a model ready, put it to sleep, stop it, switch it off.

An order notes what is wanted. The scheduler's next turn does the rest. `off` outlasts the sidecar: no call, gateway,
pin or restart starts the model until an operator has said `on`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from gateway.shared.protocol import ModelReport
from sidecar.core.lifecycle import DRAIN, ERROR, RUNNING, STARTING, STOPPED
from sidecar.core.model_state import ModelState
from sidecar.residency.engine_steps import EngineSteps
from sidecar.residency.planner import Planner
from sidecar.residency.scheduler import Scheduler
from sidecar.residency.shared import SharedState

Order = Literal["sleep", "stop", "off", "on"]


class Refused(Exception):
    """An order that cannot be obeyed now, and why. `retry_in`: seconds after which it may be otherwise, if known."""

    def __init__(self, why: str, retry_in: float | None = None) -> None:
        super().__init__(why)
        self.retry_in = retry_in


class Orders:
    """Orders on the shared models. `report` gives the answer to an order: the model as it is then."""

    def __init__(
        self,
        shared: SharedState,
        scheduler: Scheduler,
        planner: Planner,
        steps: EngineSteps,
        report: Callable[[str], ModelReport],
    ) -> None:
        self._scheduler, self._planner, self._steps, self._report = scheduler, planner, steps, report
        self._models, self._tasks = shared.models, shared.tasks
        self._touch, self._keep, self._clock = shared.touch, shared.keep, shared.clock

    def ensure(self, profile: str) -> ModelReport:
        """Start or wake a model as soon as possible, and return its report. A model that is off stays off, and its
        report says so. Raises KeyError."""
        model, now = self._models[profile], self._clock()
        if model.off:
            return self._report(profile)
        model.stopped_by_hand = False
        self._readmit(model)
        life = model.lifecycle
        if not model.serves():
            model.want(now, ordered=True)
            model.asked = life.state is ERROR and life.given_up
            self._scheduler.turn()  # so that the answer is what is being done
        self._touch()
        return self._report(profile)

    def give(self, profile: str, what: Order) -> ModelReport:
        """Take an order; the model as it is then. Raises KeyError, and Refused with nothing changed."""
        model = self._models[profile]
        if what in ("off", "on"):
            self._switch(model, off=what == "off")
        elif model.off:
            raise Refused(f"{profile} is off: `on` comes first")
        elif what == "stop":
            self._stop(model)
        else:
            self._sleep(model)
        self._touch()
        return self._report(profile)

    def _free(self, model: ModelState) -> None:
        """Raises Refused while an operation on it is under way."""
        if model.name in self._tasks:
            pending = model.lifecycle.pending
            doing = pending.value if pending else "change"
            raise Refused(f"{model.name} has a {doing} under way", self._planner.ready_in(model))

    def _sleep(self, model: ModelState) -> None:
        self._free(model)
        if model.lifecycle.state is not RUNNING:
            raise Refused(f"{model.name} is {model.lifecycle.state.value}, not running")
        if model.profile.sleeps is None:
            raise Refused(f"{model.name} does not sleep: its profile has `sleep: null` or `pin: true`")
        if why := self._planner.better_stopped(model):
            raise Refused(f"{why}: `stop` ends it")
        if not self._tasks.free(model.gpus):
            raise Refused("something else is under way on its GPUs", 1.0)
        self._scheduler.begin_idle(model, "sleep", ordered=True)

    def _stop(self, model: ModelState) -> None:
        state = model.lifecycle.state
        if state is not STARTING:
            self._free(model)
        model.stopped_by_hand, model.wanted_since = True, None
        if state is STARTING:
            self._steps.stop_starting(model)
        elif state is ERROR:
            self._steps.settle(model)
        elif state is not STOPPED:
            self._scheduler.begin_idle(model, "stop", ordered=True)

    def _switch(self, model: ModelState, *, off: bool) -> None:
        """Off: no more calls from now on, and its engine ends once those that run have: see `Scheduler`."""
        changed = model.off is not off
        model.off = off
        if off:
            model.wanted_since, model.asked = None, False
            state = model.lifecycle.state
            self._steps.stop_starting(model)  # also one that is not launched yet
            if state is ERROR and model.name not in self._tasks:
                self._steps.settle(model)
            elif state is RUNNING and model.lifecycle.pending is None:
                model.lifecycle.step("drain", self._clock())
        elif changed:
            self._readmit(model)
        if changed:
            self._keep()
        self._touch()

    def _readmit(self, model: ModelState) -> None:
        """Let a model have calls again, and size it again if it could not be run."""
        self.size_again(model)
        if model.lifecycle.pending is DRAIN and model.name not in self._tasks and not model.replaced:
            model.lifecycle.step("cancel", self._clock())

    def size_anew(self, model: ModelState) -> None:
        """Size a model again that has no engine: the GPUs are others, or can be read again. What its failed starts have
        told is of the model, and stays."""
        if model.name not in self._steps.running and model.name not in self._tasks:
            self._tasks.begin([model.name], (), self._steps.sizes.size(model))

    def size_again(self, model: ModelState) -> None:
        """Size a model again that could not be run: the reason may be gone."""
        if model.unusable and model.name not in self._tasks:
            self._steps.sizes.forget_lesson(model)
            self._tasks.begin([model.name], (), self._steps.sizes.size(model))
