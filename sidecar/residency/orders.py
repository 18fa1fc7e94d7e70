"""Orders of people and gateways: have a model ready, put it to sleep, stop it, switch it off.

An order notes what is wanted. The scheduler's next turn does the rest. `off` outlasts the sidecar: no call, gateway,
pin or restart starts the model until an operator has said `on`.
"""

from __future__ import annotations

from typing import Literal

from gateway.shared.protocol import ModelReport
from sidecar.core.lifecycle import DRAIN, ERROR, RUNNING, STARTING, STOPPED
from sidecar.core.model_state import ModelState
from sidecar.residency import engine_memory as memory
from sidecar.residency import engine_steps as steps
from sidecar.residency import planner, scheduler
from sidecar.residency.machine import Machine
from sidecar.residency.report import model_report

Order = Literal["ensure", "sleep", "stop", "off", "on"]


class Refused(Exception):
    """An order that cannot be obeyed now, and why. `retry_in`: seconds after which it may be otherwise, if known."""

    def __init__(self, why: str, retry_in: float | None = None) -> None:
        super().__init__(why)
        self.retry_in = retry_in


class Orders:
    """Orders on the models of a machine. The answer to an order is the model's report as it is then."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def ensure(self, profile: str) -> ModelReport:
        """Start or wake a model as soon as possible, and return its report. A model that is off stays off, and its
        report says so. Raises KeyError."""
        machine = self._machine
        model, now = machine.models[profile], machine.clock()
        if not model.off:
            model.stopped_by_hand = False
            _readmit(machine, model)
            life = model.lifecycle
            if not model.serves():
                model.want(now, ordered=True)
                model.asked = life.state is ERROR and life.given_up
                scheduler.turn(machine)  # so that the answer is what is being done
            machine.touch()
        return model_report(machine, profile)

    def give(self, profile: str, what: Order) -> ModelReport:
        """Take an order; the model as it is then. Raises KeyError, and Refused with nothing changed."""
        if what == "ensure":
            return self.ensure(profile)
        machine, model = self._machine, self._machine.models[profile]
        if what in ("off", "on"):
            _switch(machine, model, off=what == "off")
        elif model.off:
            raise Refused(f"{profile} is off: `on` comes first")
        elif what == "stop":
            _stop(machine, model)
        else:
            _sleep(machine, model)
        machine.touch()
        return model_report(machine, profile)


def _free(machine: Machine, model: ModelState) -> None:
    """Raises Refused while an operation on a model is under way."""
    if model.name in machine.tasks:
        pending = model.lifecycle.pending
        now, doing = machine.clock(), pending.value if pending else "change"
        retry_in = model.ready_in(now, planner.forecast(machine, model, now))
        raise Refused(f"{model.name} has a {doing} under way", retry_in)


def _sleep(machine: Machine, model: ModelState) -> None:
    _free(machine, model)
    if model.lifecycle.state is not RUNNING:
        raise Refused(f"{model.name} is {model.lifecycle.state.value}, not running")
    if model.profile.sleeps is None:
        raise Refused(f"{model.name} does not sleep: its profile has `sleep: null` or `pin: true`")
    if why := planner.better_stopped(machine, model):
        raise Refused(f"{why}: `stop` ends it")
    if not machine.tasks.free(model.gpus):
        raise Refused("something else is under way on its GPUs", 1.0)
    scheduler.begin_idle(machine, model, "sleep", ordered=True)


def _stop(machine: Machine, model: ModelState) -> None:
    state = model.lifecycle.state
    if state is not STARTING:
        _free(machine, model)
    model.stopped_by_hand, model.wanted_since = True, None
    if state is STARTING:
        steps.stop_starting(machine, model)
    elif state is ERROR:
        steps.settle(machine, model)
    elif state is not STOPPED:
        scheduler.begin_idle(machine, model, "stop", ordered=True)


def _switch(machine: Machine, model: ModelState, *, off: bool) -> None:
    """Switch a model off: no more calls from now on, and its engine ends once those that run have (scheduler.py). Or
    on."""
    changed = model.off is not off
    model.off = off
    if off:
        model.wanted_since, model.asked = None, False
        state = model.lifecycle.state
        steps.stop_starting(machine, model)  # also one that is not launched yet
        if state is ERROR and model.name not in machine.tasks:
            steps.settle(machine, model)
        elif state is RUNNING and model.lifecycle.pending is None:
            model.lifecycle.step("drain", machine.clock())
    elif changed:
        _readmit(machine, model)
    if changed:
        machine.keep()


def _readmit(machine: Machine, model: ModelState) -> None:
    """Let a model have calls again, and size it again if it could not be run: the reason may be gone."""
    if model.unusable and model.name not in machine.tasks:
        memory.forget_lesson(machine, model)
        machine.tasks.begin([model.name], (), memory.size(machine, model))
    if model.lifecycle.pending is DRAIN and model.name not in machine.tasks and not model.replaced:
        model.lifecycle.step("cancel", machine.clock())
