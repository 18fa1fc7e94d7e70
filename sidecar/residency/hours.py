"""Hours of models with a schedule: each is switched when the wall clock says so, and withdrawn before it is off."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from sidecar.core.file.schedule import Hours, Offset, changes_at, kept
from sidecar.core.lifecycle import ERROR
from sidecar.core.model_state import ModelState
from sidecar.residency.engine_steps import EngineSteps
from sidecar.residency.withdrawals import Withdrawals

LOOK_EVERY = 60.0  # seconds, for a wall clock that is set meanwhile
WORDS = {
    "": "as its profile says",
    "off": "off",
    "pinned": "pinned",
    "preloaded": "to be loaded if there is room",
}


class OpeningHours:
    """Schedules of the models in `models`. `wall` gives Unix seconds, `offset` how far the local clock is ahead of
    UTC."""

    def __init__(
        self,
        models: Mapping[str, ModelState],
        withdrawals: Withdrawals,
        steps: EngineSteps,
        *,
        wall: Callable[[], float],
        offset: Offset,
        clock: Callable[[], float],
        touch: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        self._models = models
        self._withdrawals = withdrawals
        self._steps = steps
        self._wall = wall
        self._offset = offset
        self._clock = clock
        self._touch = touch
        self._say = say
        self._looked: dict[str, tuple[tuple[Hours, ...], float]] = {}  # by profile: its schedule, and the next look

    def turn(self) -> float:
        """Switch what is due, and end what is off. When something is due next."""
        now = self._clock()
        self._looked = {name: each for name, each in self._looked.items() if name in self._models}
        for model in self._models.values():
            schedule, next_look = self._looked.get(model.name, ((), -math.inf))
            if model.profile.schedule != schedule or (schedule and now >= next_look):
                self._look(model, now)
            if model.hours == "off" and self._withdrawals.end(model) and model.lifecycle.state is ERROR:
                self._steps.settle(model)
        return min((at for schedule, at in self._looked.values() if schedule), default=math.inf)

    def _look(self, model: ModelState, now: float) -> None:
        schedule, at = model.profile.schedule, self._wall()
        until = changes_at(schedule, at, self._offset)
        model.hours_until = None if until is None else now + until - at
        self._looked[model.name] = schedule, min(now + LOOK_EVERY, model.hours_until or math.inf)
        was, model.hours = model.hours, kept(schedule, at, self._offset)
        if model.hours == was:
            return
        self._say(f"{model.name} is {WORDS[model.hours]} from this hour on")
        model.preloads = model.preloads or model.hours == "preloaded"
        model.not_preloaded = ""
        if model.hours == "off":
            model.wanted_since, model.asked, model.preloads = None, False, False
        if was == "off":
            self._withdrawals.stays(model)
        self._touch()
