"""Orders of people and gateways: have a model ready, put it to sleep, wake it, stop it, withdraw it, switch it off.

An order notes what is wanted. The scheduler's next turn does the rest. `off` outlasts the sidecar: no call, gateway,
pin or restart starts the model until an operator has said `on`.
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

Order = Literal["sleep", "wake", "stop", "drain", "off", "on"]


class Refused(Exception):
    """An order that cannot be obeyed now, and why. `retry_in`: seconds after which it may be otherwise, if known."""

    def __init__(self, why: str, retry_in: float | None = None) -> None:
        super().__init__(why)
        self.retry_in = retry_in


class Orders:
    """On the models in `entries`. `report` gives the answer to an order: the model as it is then. `keep` is called when
    what the state file has to know has changed. `reports`: the number of the last report made."""

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
        keep: Callable[[], None],
        reports: Callable[[], int],
        clock: Callable[[], float],
    ) -> None:
        self._entries = entries
        self._scheduler = scheduler
        self._planner = planner
        self._steps = steps
        self._tasks = tasks
        self._report = report
        self._touch = touch
        self._keep = keep
        self._reports = reports
        self._clock = clock

    def ensure(self, profile: str) -> ModelReport:
        """Start or wake a model as soon as possible, and return its report. A model that is off stays off, and its
        report says so. Raises KeyError."""
        entry, now = self._entries[profile], self._clock()
        if entry.disabled:
            return self._report(profile)
        entry.stopped_by_hand = False
        self._readmit(entry)
        life = entry.lifecycle
        if not entry.serves():
            entry.want(now, ordered=True)
            entry.asked = life.state is ERROR and life.given_up
            self._scheduler.turn()  # so that the answer is what is being done
        self._touch()
        return self._report(profile)

    def give(self, profile: str, what: Order) -> ModelReport:
        """Take an order; the model as it is then. Raises KeyError, and Refused with nothing changed."""
        entry = self._entries[profile]
        if what in ("off", "on"):
            self._switch(entry, off=what == "off")
        elif entry.off:
            raise Refused(f"{profile} is off: `on` comes first")
        elif what == "stop":
            self._stop(entry)
        elif what == "wake" and entry.lifecycle.state is STOPPED:
            raise Refused(f"{profile} does not sleep, it is stopped: `ensure` starts it")
        elif what == "wake":
            return self.ensure(profile)
        else:
            self._free(entry)
            if entry.lifecycle.state is not RUNNING:
                raise Refused(f"{profile} is {entry.lifecycle.state.value}, not running")
            self._drain(entry) if what == "drain" else self._sleep(entry)
        self._touch()
        return self._report(profile)

    def _free(self, entry: ModelState) -> None:
        """Raises Refused while an operation on it is under way."""
        if entry.name in self._tasks:
            pending = entry.lifecycle.pending
            doing = pending.value if pending else "change"
            raise Refused(f"{entry.name} has a {doing} under way", self._planner.ready_in(entry))

    def _drain(self, entry: ModelState) -> None:
        entry.held_back = True
        entry.drained_after = self._reports()
        if entry.lifecycle.pending is None:
            entry.lifecycle.step("drain", self._clock())

    def _sleep(self, entry: ModelState) -> None:
        if entry.profile.sleeps is None:
            raise Refused(f"{entry.name} does not sleep: its profile has `sleep: null` or `pin: true`")
        if why := self._planner.better_stopped(entry):
            raise Refused(f"{why}: `stop` ends it")
        if not self._tasks.free(entry.gpus):
            raise Refused("something else is under way on its GPUs", 1.0)
        self._scheduler.begin_idle(entry, "sleep", ordered=True)

    def _stop(self, entry: ModelState) -> None:
        state = entry.lifecycle.state
        if state is not STARTING:
            self._free(entry)
        entry.stopped_by_hand, entry.wanted_since, entry.held_back = True, None, False
        if state is STARTING:
            self._stop_starting(entry)
        elif state is ERROR:
            self._steps.settle(entry)
        elif state is not STOPPED:
            self._scheduler.begin_idle(entry, "stop", ordered=True)

    def _switch(self, entry: ModelState, *, off: bool) -> None:
        """Off: no more calls from now on, and its engine ends once those that run have: see `Scheduler`."""
        changed = entry.off is not off
        entry.off = off
        if off:
            entry.wanted_since, entry.held_back, entry.asked = None, False, False
            state = entry.lifecycle.state
            self._steps.stop_starting(entry)  # also one that is not launched yet
            if state is STARTING:
                self._stop_starting(entry)
            elif state is ERROR and entry.name not in self._tasks:
                self._steps.settle(entry)
            elif state is RUNNING and entry.lifecycle.pending is None:
                entry.lifecycle.step("drain", self._clock())
        elif changed:
            self._readmit(entry)
        if changed:
            self._keep()
        self._touch()

    def _readmit(self, entry: ModelState) -> None:
        """Let a model have calls again, and size it again if it could not be run."""
        entry.held_back = False
        self.size_again(entry)
        if entry.lifecycle.pending is DRAIN and entry.name not in self._tasks and not entry.replaced:
            entry.lifecycle.step("cancel", self._clock())

    def _stop_starting(self, entry: ModelState) -> None:
        if entry.lifecycle.pending is not STOP:
            entry.lifecycle.step("stop", self._clock())
            self._steps.stop_starting(entry)

    def size_anew(self, entry: ModelState) -> None:
        """Size a model again that has no engine: the GPUs are others, or can be read again. What its failed starts have
        told is of the model, and stays."""
        if entry.name not in self._steps.running and entry.name not in self._tasks:
            self._tasks.begin([entry.name], (), self._steps.sizes.size(entry))

    def size_again(self, entry: ModelState) -> None:
        """Size a model again that could not be run: the reason may be gone."""
        if entry.unusable and entry.name not in self._tasks:
            self._steps.sizes.forget_lesson(entry)
            self._tasks.begin([entry.name], (), self._steps.sizes.size(entry))
