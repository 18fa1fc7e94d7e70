"""Estimates of what waits: waits and engines wanted. For status, sidecars and the scaling signal."""

from __future__ import annotations

from collections.abc import Callable

from gateway.core.admission.admission import AdmissionControl
from gateway.core.engines.choice import usable_of
from gateway.core.engines.fleet import Fleet
from gateway.core.sidecars.copies import LongWait


class Estimates:
    """Estimates over the queues of `control`. `clock` gives monotonic seconds."""

    def __init__(self, control: AdmissionControl, fleet: Fleet, clock: Callable[[], float]) -> None:
        self._control = control
        self._fleet = fleet
        self._clock = clock

    def unserved(self, model: str) -> bool:
        """Whether calls wait for a model that no engine may be given for."""
        return bool(self._control.queues.get(model)) and not usable_of(self._fleet.serving(model), self._clock())

    def waiting(self, model: str) -> int:
        """Return the number of calls that wait for a model."""
        return len(self._control.queues.get(model, ()))

    def longest_wait(self, model: str) -> LongWait | None:
        """Return the class of a model whose calls wait longest, as predicted now; None: none waits, or no engine serves
        it."""
        now, known = self._clock(), self._control.traffic.get(model)
        if known is None:
            return None
        known.advance(now)
        return self._control.workload.longest_wait(model, self._fleet.serving(model), now)

    def wait(self, model: str) -> float:
        """Return the seconds until all calls that wait now have been served."""
        return self._control.workload.wait_estimate(model, self._clock())

    def engines_wanted(self) -> dict[str, int]:
        """Return the scaling signal of each model of the house that calls have come for."""
        now, fleet, queues = self._clock(), self._fleet, self._control.queues
        outside = self._control.rules.outside
        return {
            model: traffic.scale(fleet.serving(model), queues[model].total_tokens, now)
            for model, traffic in self._control.traffic.items()
            if model not in outside
        }
