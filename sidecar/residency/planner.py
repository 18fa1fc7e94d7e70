"""Planner: the steps that would have a model run, with the machine as it is now or as it is foreseen.

It asks `core.plan` and changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from gateway.shared.files.units import GIB
from sidecar.core.inventory import PlanSettings, Resident, Size, Target
from sidecar.core.lifecycle import RUNNING, SLEEPING, START, STARTING, WAKE
from sidecar.core.model_state import ModelState
from sidecar.core.placement import as_resident, as_targets
from sidecar.core.plan import Infeasible, Plan, plan
from sidecar.core.sleep import POOL, Level, chosen_level, levels
from sidecar.residency.engine_memory import unseen
from sidecar.residency.machine import Machine

Idle = Literal["", "copies", "all"]
RETRY = 1.0  # seconds until what could not be had is planned once more
LATER = 0.25  # of the time until a forecast's last plan, before its next: a model may starve for 30 days


def decide(
    machine: Machine,
    model: ModelState,
    now: float,
    *,
    since: float | None = None,
    idle: Idle = "",
    copy: bool = False,
    there: Sequence[Resident] = (),
) -> Plan | Infeasible:
    """The plan to have a model run now; `since`: from when on it is taken to be wanted, where nobody wants it yet;
    `idle`: see `residents`; `copy`: beside another engine of its model, see core.inventory; `there`: what `residents`
    returned, where that is known."""
    if machine.config.engine_of(model.name).device == "cpu":
        wakes = model.lifecycle.state is SLEEPING
        return Plan(start=None if wakes else model.name, wake=model.name if wakes else None)
    settings = PlanSettings(host_memory=machine.host_room, hot=machine.hot, max_starvation=model.max_starvation)
    since = now if since is None else since
    residents_, gpus = there or residents(machine, idle=idle), machine.monitor.gpus
    totals = dict(machine.monitor.totals)

    def best(targets: list[tuple[int, Target]]) -> Plan | Infeasible:
        found = [(total, plan(target, residents_, gpus, now, settings)) for total, target in targets]
        sized = [(total, _for_its_size(each, total, totals, now)) for total, each in found]
        return _best(sized, residents_, model.sizes)

    decision = best(as_targets(model, since, totals, copy=copy))
    if isinstance(decision, Infeasible) and model.least_room and model.tries_again(now):
        # Nothing more can be evicted for it: with what there is.
        return best(as_targets(model, since, totals, room=False, copy=copy))
    return decision


def residents(machine: Machine, *, idle: Idle = "") -> list[Resident]:
    """Everything that holds memory or is about to. Calls that wait for one that serves already are about to reach it.
    `idle`: as if all calls that are under way were over, or all of copies."""
    now, demand = machine.clock(), machine.demand
    found = [
        as_resident(
            model,
            now,
            demand.in_flight(model.name) + (demand.waiting(model.name) if model.serves() else 0),
            unseen(machine, model),
        )
        for model in machine.models.values()
        if model.gpus
    ]
    if not idle:
        return found
    return [msgspec.structs.replace(each, ref_count=0) if idle == "all" or each.copy else each for each in found]


def has_room(machine: Machine, model: ModelState, decision: Plan) -> bool:
    """Whether a model can begin on its GPUs as planned, with everybody else as they are now."""
    wakes = model.lifecycle.state is SLEEPING and decision.wake is not None
    need, own = (model.size.claim, model.size.residue) if wakes else (model.size.start_needs, 0)
    others = [each for each in residents(machine) if each.profile != model.name]
    for gpu in machine.monitor.gpus:
        here = [each for each in others if gpu.index in each.gpus]
        free = gpu.free + own - sum(each.unseen for each in here)
        if gpu.index in decision.gpus and need > min(free, gpu.total - sum(each.held for each in here)):
            return False
    return True


def sleep_level(machine: Machine, model: ModelState) -> Level | None:
    """Level to sleep at, 1 only while host memory has room for the weights; None: the model is better stopped."""
    return chosen_level(model.sleep_levels(), host_fits=machine.host_fits(model, model.size.host))


def better_stopped(machine: Machine, model: ModelState) -> str:
    """The reason why a model that may sleep by its profile is stopped instead, in words; empty: it may sleep."""
    if model.profile.sleeps is None or sleep_level(machine, model) is not None:
        return ""
    name, size = model.name, model.size
    if not levels(model.profile, model.slept, unified=model.unified):
        return f"{name} has no level 2, and {POOL}"
    if not model.sleep_levels():
        return f"{name} keeps {size.residue / GIB:.1f} GiB asleep, twice what it kept at first"
    left = max(0, machine.host_left(model)) / GIB
    return f"{name} would fill {size.host / GIB:.1f} GiB of host memory, {left:.1f} are left, and it has no level 2"


def forecast(
    machine: Machine, model: ModelState, now: float, there: Sequence[Resident] = ()
) -> Plan | Infeasible | None:
    """The plan for a model that is not on its way, were it wanted; None: it is, or runs. `there`: see `decide`.

    Where it is only too soon to evict, or calls or operations have to end first, that is a plan for later: one that is
    refused until it is wanted, and wanted by nobody since it is refused, would never come to be had.
    """
    if model.lifecycle.pending is not None or model.lifecycle.state in (RUNNING, STARTING) or not model.sized:
        return None
    there = there or residents(machine)
    decision = later = decide(machine, model, now, there=there)
    at, pause = now, 0.0
    if isinstance(decision, Infeasible):
        there = [each.after_all() for each in there]
    while isinstance(later, Infeasible) and later.retry_at is not None and at - now <= model.max_starvation:
        at = max(at + pause, later.retry_at)
        pause = max(RETRY, LATER * (at - now))
        later = decide(machine, model, at, since=now, there=there)
    if isinstance(later, Infeasible):
        return decision
    victims = [machine.models[name] for name in (*(each.profile for each in later.sleep), *later.stop)]
    coming = [each.ready_in(now, None) or 0.0 for each in victims if each.lifecycle.pending in (START, WAKE)]
    room = makes_room(machine, later)
    return msgspec.structs.replace(later, after=max(at - now, *coming, 0.0), makes_room=room)


def copy_in(machine: Machine, model: ModelState, now: float, there: Sequence[Resident] = ()) -> float | None:
    """Seconds until a model could serve as a copy, were it wanted as one now; None: it serves, is no copy, or has no
    place that no warmer model would lose. `there`: see `decide`."""
    life = model.lifecycle
    if not model.copy or model.serves() or not model.sized:
        return None
    if life.pending is not None:
        return model.ready_in(now, None) if life.pending in (START, WAKE) else None
    if life.state in (STARTING, RUNNING):
        return None
    decision = decide(machine, model, now, copy=True, there=there)
    if isinstance(decision, Plan):
        decision = msgspec.structs.replace(decision, makes_room=makes_room(machine, decision))
    return model.ready_in(now, decision)


def makes_room(machine: Machine, decision: Plan) -> float:
    """Seconds until the victims of a plan are gone, one after the other."""
    sleep = sum(machine.models[each.profile].sleep_seconds for each in decision.sleep)
    return sleep + sum(machine.models[name].stop_seconds for name in decision.stop)


def _for_its_size(decision: Plan | Infeasible, total: int, totals: Mapping[int, int], now: float) -> Plan | Infeasible:
    """A plan for GPUs of `total` bytes, unless all that it starts on are larger: a share takes more there."""
    if not total or isinstance(decision, Infeasible) or decision.start is None:
        return decision
    if min(totals[gpu] for gpu in decision.gpus) == total:
        return decision
    return Infeasible(f"{decision.start} has room on larger GPUs alone, with another claim", now + RETRY)


def _best(
    found: list[tuple[int, Plan | Infeasible]], residents: Sequence[Resident], sizes: Mapping[int, Size]
) -> Plan | Infeasible:
    """Pick the best plan across GPU sizes, of which `found` has the smaller first.

    Prefer a plan that wakes a sleeping engine, then the fewest evictions, then the longest context, then the least
    recently used victims, then the smaller GPU; a model whose need is not known yet, the largest. Without any plan,
    return the refusal that can change soonest, the largest GPUs' where nobody knows when.
    """
    last_used = {each.profile: each.last_used for each in residents}

    def cost(each: Plan) -> tuple[bool, int, float, float]:
        victims = {*(nap.profile for nap in each.sleep), *each.stop} - {each.start}
        size = sizes.get(each.total, Size())
        room = float(each.total) if size.guessed else size.context_length or math.inf
        coldest = max((last_used[name] for name in victims), default=-math.inf)
        return each.start is not None, len(victims), -room, coldest

    plans = [msgspec.structs.replace(each, total=total) for total, each in found if isinstance(each, Plan)]
    if plans:
        return min(plans, key=cost)
    others = [each for _, each in reversed(found) if isinstance(each, Infeasible)]
    return min(others, key=lambda each: math.inf if each.retry_at is None else each.retry_at)
