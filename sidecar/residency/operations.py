"""Operations that carry out a plan: make room, then start or wake; put to sleep or end what idles.

The orders are given already: `Scheduler` decides. An engine that gateways still use is never put to sleep or ended to
make room: the operation gives up, and everything stays as it was.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from gateway.shared.files.units import GIB
from sidecar.core.engine_records import EngineFailed
from sidecar.core.lifecycle import DRAIN, SLEEP, SLEEPING, STOP, STOPPED, WAKE
from sidecar.core.model_state import ModelState
from sidecar.core.plan import Plan
from sidecar.core.sleep import Level
from sidecar.residency.engine_steps import EngineSteps, Reason
from sidecar.residency.liveness import EVERY as PROBE_EVERY
from sidecar.residency.shared import SharedState
from sidecar.residency.sleep_steps import SleepSteps

DRAIN_WITHIN = 15.0  # seconds for gateways and engine to have ended what runs, where it makes room
ORDERED_WITHIN = 60.0  # seconds, where somebody has ordered it
LOOK_EVERY = 0.05  # seconds between two looks at an engine that is being drained


class Operations:
    """Whole operations, each made of `steps` and `sleeps`. `has_room`: whether a model can begin as planned now."""

    def __init__(
        self, shared: SharedState, steps: EngineSteps, sleeps: SleepSteps, has_room: Callable[[ModelState, Plan], bool]
    ) -> None:
        self._steps, self._sleeps, self._has_room = steps, sleeps, has_room
        self._demand, self._host, self._clock, self._say = shared.demand, shared.host, shared.clock, shared.say

    async def carry_out(
        self, model: ModelState, plan: Plan, victims: Mapping[str, ModelState], after: int, *, patient: bool = False
    ) -> None:
        """Make room as planned, then start or wake. All of them have their orders: see `Scheduler`. `after`: the number
        of the last report that was made before they had. `patient`: calls of victims are waited for; where they take
        too long, those go on for as long again as this one has waited."""
        try:
            if await self._made_room(model, plan, victims, after, patient=patient):
                await self._begin(model, plan)
        finally:
            for name in victims:
                self._host.cancel(name)

    async def _made_room(
        self, model: ModelState, plan: Plan, victims: Mapping[str, ModelState], after: int, *, patient: bool
    ) -> bool:
        within = ORDERED_WITHIN if patient else DRAIN_WITHIN
        residues = {name: each.size.residue for name, each in victims.items()}
        steps: list[tuple[ModelState, Level | None]] = [(victims[each.profile], each.level) for each in plan.sleep]
        steps += [(victims[name], None) for name in plan.stop if name != model.name]
        for number, (victim, level) in enumerate(steps):
            self._say(f"{victim.name} {f'goes to sleep at level {level}' if level else 'ends'} for {model.name}")
            if victim.copy:
                self._steps.count(victim, "gave_place")
            if not await self.evict(victim, level, after, within, "room"):
                if patient:
                    model.wanted_since = self._clock()
                self._give_up([model, *(each for each, _ in steps[number:])])
                return False
        foreseen = {each.profile: residues[each.profile] for each in plan.sleep}
        larger = [victims[name] for name, residue in foreseen.items() if victims[name].size.residue > residue]
        for victim in sorted(larger, key=lambda each: -each.size.residue):
            if victim.lifecycle.state is SLEEPING and not self._has_room(model, plan):
                kept = f"{victim.size.residue / GIB:.1f} GiB asleep"
                self._say(f"{victim.name} keeps {kept}, which leaves too little for {model.name}: it ends")
                if not await self._steps.end(victim):
                    self._give_up([model])
                    return False
        if model.off:
            self._give_up([model])
            return False
        return True

    async def _begin(self, model: ModelState, plan: Plan) -> None:
        """Start or wake it: there is room."""
        if model.copy_only:
            self._steps.count(model, "copy")
        if model.lifecycle.pending is STOP:  # it sleeps where it cannot wake
            if not await self._steps.end(model):
                return
            model.place(plan)
            self._steps.transition(model, "start")
        if not await self._steps.has_room(model):
            self._say(f"{model.name} is planned anew: less is free there than its victims were to give back")
            self._give_up([model])
            return
        if model.off:  # since a moment ago: nothing has begun that would have to be ended
            self._give_up([model])
            return
        if model.lifecycle.pending is WAKE:
            await self._sleeps.wake(model)
        else:
            await self._steps.start(model)

    def _give_up(self, models: Sequence[ModelState]) -> None:
        """Withdraw the orders that no step was taken for: those models stay as they are, sleeping ones too."""
        for model in models:
            if model.lifecycle.pending not in (None, SLEEP):
                if model.name not in self._steps.running:
                    model.gpus = ()
                self._steps.transition(model, "cancel")

    async def evict(self, model: ModelState, level: Level | None, after: int, within: float, reason: Reason) -> bool:
        """Put it to sleep at `level`, or end it if None. False: it is still used, or its memory has not come back."""
        try:
            if model.lifecycle.pending is DRAIN and not await self._drained(model, after, within):
                return False
        except EngineFailed as error:
            return await self._steps.fail(model, error)
        began = self._clock()
        pins = model.pins(level)
        made_room = await (self._steps.end(model) if level is None else self._sleeps.sleep(model, level))
        if made_room and model.lifecycle.state is (STOPPED if level is None else SLEEPING):
            if not pins:
                model.times.took("stop" if level is None else "sleep", self._clock() - began)
            self._steps.evictions[model.name, "stop" if level is None else "sleep", reason] += 1
        return made_room

    async def retire(self, model: ModelState, level: Level | None, after: int, *, ordered: bool, why: str = "") -> None:
        """Put an engine to sleep at `level`, or stop it if `level` is None, because it is idle or because that was
        `ordered`. An ordered stop is obeyed in any case. `after`: as in `carry_out`. `why`: the reason for a stop in
        place of sleep."""
        if why:
            self._say(f"{model.name} is stopped instead of put to sleep: {why}")
        try:
            await self._retired(model, level, after, ordered=ordered)
        finally:
            self._host.cancel(model.name)

    async def _retired(self, model: ModelState, level: Level | None, after: int, *, ordered: bool) -> None:
        reason: Reason = "off" if model.off else "order" if ordered else "idle"
        if not await self.evict(model, level, after, ORDERED_WITHIN if ordered else DRAIN_WITHIN, reason):
            if ordered and level is None and model.lifecycle.pending is DRAIN:
                await self._steps.end(model)
            else:
                self._give_up([model])

    async def _drained(self, model: ModelState, after: int, within: float) -> bool:
        """Until no gateway sends it calls any more and it has none; False: not in time, or it has just got one. Raises
        EngineFailed where it hangs, since then its calls never end."""
        engine = self._steps.running[model.name]
        patient = within == ORDERED_WITHIN
        end, look_at = self._clock() + within, self._clock() + PROBE_EVERY
        while True:
            if self._clock() >= look_at:  # nobody else looks after an engine while an operation has it
                await engine.alive()
                look_at = self._clock() + PROBE_EVERY
            drained = self._demand.drained(model.name, after)
            if drained:
                model.busy = await engine.busy()
                if not model.busy:
                    return True
            if self._clock() >= end or (drained is False and not patient):
                return False
            await asyncio.sleep(LOOK_EVERY)
