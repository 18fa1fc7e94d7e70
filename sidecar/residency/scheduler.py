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
from sidecar.residency.operations import Operations
from sidecar.residency.planner import RETRY, Planner
from sidecar.residency.shared import SharedState

LEAST, MOST = 0.001, 60.0  # seconds between two turns that nothing but the clock leads to
ASK = 0.2  # seconds between two reports while somebody waits for calls to end: their answers tell of that
FRESH = 1.0  # seconds that the gateways have to tell of their calls before a model moves because of them


class Scheduler:
    """Scheduler of the shared models."""

    def __init__(self, shared: SharedState, planner: Planner, operations: Operations) -> None:
        self._planner, self._operations = planner, operations
        self._models, self._demand, self._tasks, self._host = shared.models, shared.demand, shared.tasks, shared.host
        self._changed, self._touch, self._clock, self._say = shared.changed, shared.touch, shared.clock, shared.say
        self._asked_at = -math.inf  # when gateways were asked to tell of their calls

    def turn(self) -> float:
        """Give every order that is due and can be carried out now. When the next is due, at the latest."""
        now = self._clock()
        for model in self._models.values():
            self._hear(model, now)
        self._fit_host_memory()
        idle = [self._let_idle(model, now) for model in self._models.values()]
        first_wanted = sorted(self._models.values(), key=lambda model: model.wanted_since or now)  # else by the file
        start = [self._let_start(model, now) for model in first_wanted]
        return max(now + LEAST, min(now + MOST, *idle, *start))

    def _hear(self, model: ModelState, now: float) -> None:
        model.copy = self._demand.copy(model.name)
        if self._demand.waiting(model.name) and not model.serves():
            model.want(now)
        in_flight = self._demand.in_flight(model.name)
        model.has_calls(now, in_flight)
        if in_flight:
            model.used(now)

    def _let_idle(self, model: ModelState, now: float) -> float:
        """Put it to sleep or end it if it has idled for long enough, end it if it is off. When to look again."""
        if model.off:
            self._end_off(model)
            return math.inf
        step = model.idle_step()
        if step is None or not self._idle(model):
            return math.inf
        idle_until, what = step
        if idle_until <= now and self._tasks.free(model.gpus):
            self.begin_idle(model, what)
        return idle_until if idle_until > now else math.inf

    def _fit_host_memory(self) -> None:
        """End the coldest models that sleep at level 1 while they fill more host memory than they may: by a newer file,
        or because an engine with pools of host memory has started."""
        asleep = [model for model in self._models.values() if model.lifecycle.state is SLEEPING]
        leaving = sum(self._host.held(model.name) for model in asleep if model.lifecycle.pending is STOP)
        for model in sorted(asleep, key=lambda each: each.last_used):
            if self._host.total - leaving <= self._host.room:
                return
            idle = model.lifecycle.pending is None and model.name not in self._tasks and self._tasks.free(model.gpus)
            if idle and self._host.taken(model.name):
                leaving += self._host.held(model.name)
                self._say(f"{model.name} ends: models asleep fill more host memory than they may")
                self.begin_idle(model, "stop")

    def _end_off(self, model: ModelState) -> None:
        """Stop the engine of a model that is off. Its calls have as long to end as after an ordered stop. If an
        operation is under way on its GPUs, the end of that operation leads to another turn."""
        has_engine = model.lifecycle.state in (RUNNING, SLEEPING)
        if has_engine and model.name not in self._tasks and self._tasks.free(model.gpus):
            self.begin_idle(model, "stop", ordered=True)

    def _idle(self, model: ModelState) -> bool:
        return not self._demand.in_flight(model.name) and not model.busy and model.name not in self._tasks

    def _let_start(self, model: ModelState, now: float) -> float:
        """Start or wake it if it is to be and can be. When to look again."""
        model.advance(now)
        at = model.starts_at(now)
        if at is None or model.name in self._tasks:
            return math.inf
        if at > now:
            return at
        decision = self._planner.decide(model, now, copy=model.copy_only)
        if isinstance(decision, Plan) and self._moves_unasked(model, decision, now):
            return self._ask(now)
        # Nobody else is idle: one of them is withdrawn, and makes room once its calls have ended.
        patient = False
        for idle in ("copies", "all") if model.starved(now) else ("copies",):
            if isinstance(decision, Infeasible) and not decision.waits and not model.copy_only:
                decision, patient = self._planner.decide(model, now, idle=idle), True
        if model.preloads and (isinstance(decision, Infeasible) or decision.sleep or decision.stop):
            self._preload_later(model, decision)
        if isinstance(decision, Infeasible):
            if model.infeasible is None or model.infeasible.why != decision.why:
                self._changed.set()
            model.infeasible = decision
            if decision.retry_at is not None and any(map(self._demand.in_flight, self._models)):
                return self._ask(now)
            return min(now + RETRY, decision.retry_at or math.inf)
        # One that has failed comes back by itself, but nobody makes room for what nobody wants.
        if model.wanted(now) or model.asked or not (decision.sleep or decision.stop):
            self._begin(model, decision, patient=patient)
        return now + RETRY

    def _preload_later(self, model: ModelState, decision: Plan | Infeasible) -> None:
        """Preload a model later that has no room now, as long as other models have operations under way, which may free
        some. Otherwise give its preload up and say why."""
        model.preloads = any(each.lifecycle.pending for each in self._models.values())
        if not model.preloads:
            why = decision.why if isinstance(decision, Infeasible) else "others would have to make room"
            model.not_preloaded = f"{model.name} is not preloaded: {why}"
            self._say(model.not_preloaded)

    def _ask(self, now: float) -> float:
        """Have the gateways tell of their calls, not too often. When to look again."""
        if now >= self._asked_at + ASK:
            self._asked_at = now
            self._changed.set()
        return self._asked_at + ASK

    def _moves_unasked(self, model: ModelState, decision: Plan, now: float) -> bool:
        """Whether it would be stopped where it sleeps and started elsewhere for calls that may be over: no gateway has
        told of them since it was wanted."""
        if model.lifecycle.state is not SLEEPING or decision.start is None or model.wanted_since is None:
            return False
        return now < model.wanted_since + FRESH and not self._demand.all_heard_since(model.wanted_since)

    def _begin(self, model: ModelState, decision: Plan, *, patient: bool = False) -> None:
        """Give the orders of a plan and begin to carry them out; not now, if something is under way on these GPUs.
        `patient`: its victims may have calls that have to end first."""
        victims = {each.profile: self._models[each.profile] for each in decision.sleep}
        victims |= {name: self._models[name] for name in decision.stop if name != model.name}
        gpus = {*decision.gpus, *model.gpus, *(gpu for victim in victims.values() for gpu in victim.gpus)}
        names = [model.name, *victims]
        if not self._tasks.free(gpus, names):
            return
        now = self._clock()
        model.infeasible, model.asked, model.began = None, False, now + self._planner.makes_room(decision)
        if decision.wake is not None:
            model.lifecycle.step("wake", now)
        elif model.lifecycle.state in (STOPPED, ERROR):
            model.place(decision)
            model.lifecycle.step("start", now)
        else:
            model.lifecycle.step("stop", now)  # it sleeps where it cannot wake
        for each in decision.sleep:
            if each.level == 1:
                self._host.book(each.profile, self._models[each.profile].size.host)  # the plan has seen that it fits
        for victim in victims.values():
            victim.lifecycle.step("drain" if victim.lifecycle.state is RUNNING else "stop", now)
        carried_out = self._operations.carry_out(model, decision, victims, self._demand.reports, patient=patient)
        self._tasks.begin(names, gpus, carried_out)
        self._touch()

    def begin_idle(self, model: ModelState, what: Literal["sleep", "stop"], *, ordered: bool = False) -> None:
        """Begin to put it to sleep or to end it. `ordered`: somebody wants that, its calls have longer to end."""
        now = self._clock()
        if model.lifecycle.state is SLEEPING:
            model.lifecycle.step("stop", now)
        elif model.lifecycle.pending is not DRAIN:
            model.lifecycle.step("drain", now)
        level = self._planner.sleep_level(model) if what == "sleep" else None
        if level == 1:
            self._host.book(model.name, model.size.host)
        why = self._planner.better_stopped(model) if what == "sleep" else ""
        retired = self._operations.retire(model, level, self._demand.reports, ordered=ordered, why=why)
        self._tasks.begin([model.name], model.gpus, retired)
        self._touch()
