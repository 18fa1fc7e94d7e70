"""Scheduler: decides which models start, wake, sleep or end, in one synchronous turn whenever anything has changed.

A turn looks at everything there is (demand, idle models, failures, GPUs), gives orders, and begins the operations that
carry them out. It waits for nothing. Operations are tasks, one at a time on each GPU. The end of each leads to another
turn.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from typing import Literal

from sidecar.core.host_memory import HostMemory
from sidecar.core.lifecycle import DRAIN, ERROR, RUNNING, SLEEPING, STOP, STOPPED
from sidecar.core.model_state import ModelState
from sidecar.core.plan import Infeasible, Plan
from sidecar.residency.demand import GatewayDemand
from sidecar.residency.gpu_tasks import GpuTasks
from sidecar.residency.operations import Operations
from sidecar.residency.planner import RETRY, Planner

LEAST, MOST = 0.001, 60.0  # seconds between two turns that nothing but the clock leads to
ASK = 0.2  # seconds between two reports while somebody waits for calls to end: their answers tell of that
FRESH = 1.0  # seconds that the gateways have to tell of their calls before a model moves because of them


class Scheduler:
    """Scheduler of the models in `entries`. `tasks`: the operations under way. `host`: where sleeps at level 1 are
    booked. `changed` is set at every change worth a report, `touch` is called after every order. `say` takes a line for
    the operator."""

    def __init__(
        self,
        entries: Mapping[str, ModelState],
        planner: Planner,
        operations: Operations,
        tasks: GpuTasks,
        demand: GatewayDemand,
        host: HostMemory,
        *,
        changed: asyncio.Event,
        touch: Callable[[], None],
        clock: Callable[[], float],
        say: Callable[[str], None],
    ) -> None:
        self._entries = entries
        self._planner = planner
        self._operations = operations
        self._tasks = tasks
        self._demand = demand
        self._host = host
        self._changed = changed
        self._touch = touch
        self._clock = clock
        self._say = say
        self._asked_at = -math.inf  # when gateways were asked to tell of their calls

    def turn(self) -> float:
        """Give every order that is due and can be carried out now. When the next is due, at the latest."""
        now = self._clock()
        for entry in self._entries.values():
            self._hear(entry, now)
        self._fit_host_memory()
        idle = [self._let_idle(entry, now) for entry in self._entries.values()]
        first_wanted = sorted(self._entries.values(), key=lambda entry: entry.wanted_since or now)  # else by the file
        start = [self._let_start(entry, now) for entry in first_wanted]
        return max(now + LEAST, min(now + MOST, *idle, *start))

    def _hear(self, entry: ModelState, now: float) -> None:
        entry.copy = self._demand.copy(entry.name)
        if self._demand.waiting(entry.name) and not entry.serves():
            entry.want(now)
        in_flight = self._demand.in_flight(entry.name)
        entry.has_calls(now, in_flight)
        if in_flight:
            entry.used(now)

    def _let_idle(self, entry: ModelState, now: float) -> float:
        """Put it to sleep or end it if it has idled for long enough, end it if it is off. When to look again."""
        if entry.off:
            self._end_off(entry)
            return math.inf
        step = entry.idle_step()
        if step is None or not self._idle(entry):
            return math.inf
        idle_until, what = step
        if idle_until <= now and self._tasks.free(entry.gpus):
            self.begin_idle(entry, what)
        return idle_until if idle_until > now else math.inf

    def _fit_host_memory(self) -> None:
        """End the coldest models that sleep at level 1 while they fill more host memory than they may: by a newer file,
        or because an engine with pools of host memory has started."""
        asleep = [entry for entry in self._entries.values() if entry.lifecycle.state is SLEEPING]
        leaving = sum(self._host.held(entry.name) for entry in asleep if entry.lifecycle.pending is STOP)
        for entry in sorted(asleep, key=lambda each: each.last_used):
            if self._host.total - leaving <= self._host.room:
                return
            idle = entry.lifecycle.pending is None and entry.name not in self._tasks and self._tasks.free(entry.gpus)
            if idle and self._host.taken(entry.name):
                leaving += self._host.held(entry.name)
                self._say(f"{entry.name} ends: models asleep fill more host memory than they may")
                self.begin_idle(entry, "stop")

    def _end_off(self, entry: ModelState) -> None:
        """Stop the engine of a model that is off. Its calls have as long to end as after an ordered stop. If an
        operation is under way on its GPUs, the end of that operation leads to another turn."""
        has_engine = entry.lifecycle.state in (RUNNING, SLEEPING)
        if has_engine and entry.name not in self._tasks and self._tasks.free(entry.gpus):
            self.begin_idle(entry, "stop", ordered=True)

    def _idle(self, entry: ModelState) -> bool:
        return not self._demand.in_flight(entry.name) and not entry.busy and entry.name not in self._tasks

    def _let_start(self, entry: ModelState, now: float) -> float:
        """Start or wake it if it is to be and can be. When to look again."""
        entry.advance(now)
        at = entry.starts_at(now)
        if at is None or entry.name in self._tasks:
            return math.inf
        if at > now:
            return at
        decision = self._planner.decide(entry, now, copy=entry.copy_only)
        if isinstance(decision, Plan) and self._moves_unasked(entry, decision, now):
            return self._ask(now)
        # Nobody else is idle: one of them is withdrawn, and makes room once its calls have ended.
        patient = False
        for idle in ("copies", "all") if entry.starved(now) else ("copies",):
            if isinstance(decision, Infeasible) and not decision.waits and not entry.copy_only:
                decision, patient = self._planner.decide(entry, now, idle=idle), True
        if entry.preloads and (isinstance(decision, Infeasible) or decision.sleep or decision.stop):
            self._preload_later(entry, decision)
        if isinstance(decision, Infeasible):
            if entry.infeasible is None or entry.infeasible.why != decision.why:
                self._changed.set()
            entry.infeasible = decision
            if decision.retry_at is not None and any(map(self._demand.in_flight, self._entries)):
                return self._ask(now)
            return min(now + RETRY, decision.retry_at or math.inf)
        # One that has failed comes back by itself, but nobody makes room for what nobody wants.
        if entry.wanted(now) or entry.asked or not (decision.sleep or decision.stop):
            self._begin(entry, decision, patient=patient)
        return now + RETRY

    def _preload_later(self, entry: ModelState, decision: Plan | Infeasible) -> None:
        """Preload a model later that has no room now, as long as other models have operations under way, which may free
        some. Otherwise give its preload up and say why."""
        entry.preloads = any(each.lifecycle.pending for each in self._entries.values())
        if not entry.preloads:
            why = decision.why if isinstance(decision, Infeasible) else "others would have to make room"
            entry.not_preloaded = f"{entry.name} is not preloaded: {why}"
            self._say(entry.not_preloaded)

    def _ask(self, now: float) -> float:
        """Have the gateways tell of their calls, not too often. When to look again."""
        if now >= self._asked_at + ASK:
            self._asked_at = now
            self._changed.set()
        return self._asked_at + ASK

    def _moves_unasked(self, entry: ModelState, decision: Plan, now: float) -> bool:
        """Whether it would be stopped where it sleeps and started elsewhere for calls that may be over: no gateway has
        told of them since it was wanted."""
        if entry.lifecycle.state is not SLEEPING or decision.start is None or entry.wanted_since is None:
            return False
        return now < entry.wanted_since + FRESH and not self._demand.all_heard_since(entry.wanted_since)

    def _begin(self, entry: ModelState, decision: Plan, *, patient: bool = False) -> None:
        """Give the orders of a plan and begin to carry them out; not now, if something is under way on these GPUs.
        `patient`: its victims may have calls that have to end first."""
        victims = {each.profile: self._entries[each.profile] for each in decision.sleep}
        victims |= {name: self._entries[name] for name in decision.stop if name != entry.name}
        gpus = {*decision.gpus, *entry.gpus, *(gpu for victim in victims.values() for gpu in victim.gpus)}
        names = [entry.name, *victims]
        if not self._tasks.free(gpus, names):
            return
        now = self._clock()
        entry.infeasible, entry.asked, entry.began = None, False, now + self._planner.makes_room(decision)
        if decision.wake is not None:
            entry.lifecycle.step("wake", now)
        elif entry.lifecycle.state in (STOPPED, ERROR):
            entry.place(decision)
            entry.lifecycle.step("start", now)
        else:
            entry.lifecycle.step("stop", now)  # it sleeps where it cannot wake
        for each in decision.sleep:
            if each.level == 1:
                self._host.book(each.profile, self._entries[each.profile].size.host)  # the plan has seen that it fits
        for victim in victims.values():
            victim.lifecycle.step("drain" if victim.lifecycle.state is RUNNING else "stop", now)
        carried_out = self._operations.carry_out(entry, decision, victims, self._demand.reports, patient=patient)
        self._tasks.begin(names, gpus, carried_out)
        self._touch()

    def begin_idle(self, entry: ModelState, what: Literal["sleep", "stop"], *, ordered: bool = False) -> None:
        """Begin to put it to sleep or to end it. `ordered`: somebody wants that, its calls have longer to end."""
        now = self._clock()
        if entry.lifecycle.state is SLEEPING:
            entry.lifecycle.step("stop", now)
        elif entry.lifecycle.pending is not DRAIN:
            entry.lifecycle.step("drain", now)
        level = self._planner.sleep_level(entry) if what == "sleep" else None
        if level == 1:
            self._host.book(entry.name, entry.size.host)
        why = self._planner.better_stopped(entry) if what == "sleep" else ""
        retired = self._operations.retire(entry, level, self._demand.reports, ordered=ordered, why=why)
        self._tasks.begin([entry.name], entry.gpus, retired)
        self._touch()
