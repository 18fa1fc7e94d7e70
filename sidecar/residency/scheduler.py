"""Scheduler: decides which models start, wake, sleep or end, in one synchronous turn whenever anything has changed.

A turn looks at everything there is (demand, idle models, failures, GPUs), gives orders, and begins the operations that
carry them out. It waits for nothing. Operations are tasks, one at a time on each GPU. The end of each leads to another
turn.
"""

from __future__ import annotations

import math
from typing import Literal

from sidecar.core.lifecycle import DRAIN, ERROR, RUNNING, SLEEPING, STOP, STOPPED
from sidecar.core.model_state import ModelState
from sidecar.core.plan import Infeasible, Plan
from sidecar.residency import operations, planner
from sidecar.residency.machine import Machine
from sidecar.residency.planner import RETRY

LEAST, MOST = 0.001, 60.0  # seconds between two turns that nothing but the clock leads to
ASK = 0.2  # seconds between two reports while somebody waits for calls to end: their answers tell of that
FRESH = 1.0  # seconds that the gateways have to tell of their calls before a model moves because of them


def turn(machine: Machine) -> float:
    """Give every order that is due and can be carried out now. When the next is due, at the latest."""
    now, models = machine.clock(), machine.models.values()
    for model in models:
        _hear(machine, model, now)
    _fit_host_memory(machine)
    idle = [_let_idle(machine, model, now) for model in models]
    first_wanted = sorted(models, key=lambda model: model.wanted_since or now)  # else by the file
    start = [_let_start(machine, model, now) for model in first_wanted]
    return max(now + LEAST, min(now + MOST, *idle, *start))


def _hear(machine: Machine, model: ModelState, now: float) -> None:
    model.copy = machine.demand.copy(model.name)
    if machine.demand.waiting(model.name) and not model.serves():
        model.want(now)
    in_flight = machine.demand.in_flight(model.name)
    model.has_calls(now, in_flight)
    if in_flight:
        model.used(now)


def _let_idle(machine: Machine, model: ModelState, now: float) -> float:
    """Put a model to sleep or end it if it has idled for long enough, end it if it is off. When to look again."""
    if model.off:
        _end_off(machine, model)
        return math.inf
    step = model.idle_step()
    if step is None or machine.demand.in_flight(model.name) or model.busy or model.name in machine.tasks:
        return math.inf
    idle_until, what = step
    if idle_until <= now and machine.tasks.free(model.gpus):
        begin_idle(machine, model, what)
    return idle_until if idle_until > now else math.inf


def _fit_host_memory(machine: Machine) -> None:
    """End the coldest models that sleep at level 1 while they fill more host memory than they may: by a newer file, or
    because an engine with pools of host memory has started."""
    tasks = machine.tasks
    asleep = [model for model in machine.models.values() if model.lifecycle.state is SLEEPING]
    leaving = sum(model.host_held for model in asleep if model.lifecycle.pending is STOP)
    for model in sorted(asleep, key=lambda each: each.last_used):
        if machine.host_total - leaving <= machine.host_room:
            return
        idle = model.lifecycle.pending is None and model.name not in tasks and tasks.free(model.gpus)
        if idle and model.host_taken:
            leaving += model.host_held
            machine.say(f"{model.name} ends: models asleep fill more host memory than they may")
            begin_idle(machine, model, "stop")


def _end_off(machine: Machine, model: ModelState) -> None:
    """Stop the engine of a model that is off. Its calls have as long to end as after an ordered stop. If an operation
    is under way on its GPUs, the end of that operation leads to another turn."""
    has_engine = model.lifecycle.state in (RUNNING, SLEEPING)
    if has_engine and machine.tasks.free(model.gpus, [model.name]):
        begin_idle(machine, model, "stop", ordered=True)


def _let_start(machine: Machine, model: ModelState, now: float) -> float:
    """Start or wake a model if it is to be and can be. When to look again."""
    model.advance(now)
    at = model.starts_at(now)
    if at is None or model.name in machine.tasks:
        return math.inf
    if at > now:
        return at
    decision = planner.decide(machine, model, now, copy=model.copy_only)
    if isinstance(decision, Plan) and _moves_unasked(machine, model, decision, now):
        return _ask(machine, now)
    # Nobody else is idle: one of them is withdrawn, and makes room once its calls have ended.
    patient = False
    for idle in ("copies", "all") if model.starved(now) else ("copies",):
        if isinstance(decision, Infeasible) and not decision.waits and not model.copy_only:
            decision, patient = planner.decide(machine, model, now, idle=idle), True
    if isinstance(decision, Infeasible):
        if model.infeasible is None or model.infeasible.why != decision.why:
            machine.changed.set()
        model.infeasible = decision
        if decision.retry_at is not None and any(map(machine.demand.in_flight, machine.models)):
            return _ask(machine, now)
        return min(now + RETRY, decision.retry_at or math.inf)
    # One that has failed comes back by itself, but nobody makes room for what nobody wants.
    if model.wanted(now) or model.asked or not (decision.sleep or decision.stop):
        _begin(machine, model, decision, patient=patient)
    return now + RETRY


def _ask(machine: Machine, now: float) -> float:
    """Have the gateways tell of their calls, not too often. When to look again."""
    if now >= machine.asked_at + ASK:
        machine.asked_at = now
        machine.changed.set()
    return machine.asked_at + ASK


def _moves_unasked(machine: Machine, model: ModelState, decision: Plan, now: float) -> bool:
    """Whether a model would be stopped where it sleeps and started elsewhere for calls that may be over: no gateway has
    told of them since it was wanted."""
    if model.lifecycle.state is not SLEEPING or decision.start is None or model.wanted_since is None:
        return False
    return now < model.wanted_since + FRESH and not machine.demand.all_heard_since(model.wanted_since)


def _begin(machine: Machine, model: ModelState, decision: Plan, *, patient: bool) -> None:
    """Give the orders of a plan and begin to carry them out; not now, if something is under way on these GPUs.
    `patient`: its victims may have calls that have to end first."""
    victims = {each.profile: machine.models[each.profile] for each in decision.sleep}
    victims |= {name: machine.models[name] for name in decision.stop if name != model.name}
    gpus = {*decision.gpus, *model.gpus, *(gpu for victim in victims.values() for gpu in victim.gpus)}
    names = [model.name, *victims]
    if not machine.tasks.free(gpus, names):
        return
    now = machine.clock()
    model.infeasible, model.asked, model.began = None, False, now + planner.makes_room(machine, decision)
    if decision.wake is not None:
        model.lifecycle.step("wake", now)
    elif model.lifecycle.state in (STOPPED, ERROR):
        model.place(decision)
        model.lifecycle.step("start", now)
    else:
        model.lifecycle.step("stop", now)  # it sleeps where it cannot wake
    for each in decision.sleep:
        if each.level == 1:
            victims[each.profile].host_booked = victims[each.profile].size.host  # the plan has seen that it fits
    for victim in victims.values():
        victim.lifecycle.step("drain" if victim.lifecycle.state is RUNNING else "stop", now)
    after = machine.demand.reports
    machine.tasks.begin(names, gpus, operations.carry_out(machine, model, decision, victims, after, patient=patient))
    machine.touch()


def begin_idle(machine: Machine, model: ModelState, what: Literal["sleep", "stop"], *, ordered: bool = False) -> None:
    """Begin to put a model to sleep or to end it. `ordered`: somebody wants that, its calls have longer to end."""
    now = machine.clock()
    if model.lifecycle.state is SLEEPING:
        model.lifecycle.step("stop", now)
    elif model.lifecycle.pending is not DRAIN:
        model.lifecycle.step("drain", now)
    level = planner.sleep_level(machine, model) if what == "sleep" else None
    if level == 1:
        model.host_booked = model.size.host
    why = planner.better_stopped(machine, model) if what == "sleep" else ""
    retired = operations.retire(machine, model, level, machine.demand.reports, ordered=ordered, why=why)
    machine.tasks.begin([model.name], model.gpus, retired)
    machine.touch()
