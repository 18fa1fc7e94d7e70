"""Outages: since when none of a model's engines may be given calls, while one is expected back.

Synchronous, no I/O; `now` is monotonic seconds.
"""

from __future__ import annotations

import math

from gateway.core.engines.fleet import Fleet


class Outages:
    """Outages of the models of a fleet. `since`: when each began."""

    def __init__(self, fleet: Fleet) -> None:
        self.since: dict[str, float] = {}
        self._fleet = fleet

    def look(self, model: str, now: float) -> None:
        """Note whether an outage of the model has begun or is over."""
        if self._lasts(model):
            self.since.setdefault(model, now)
        elif self.since:
            self.since.pop(model, None)

    def held_until(self, model: str, now: float, hold: float) -> float:
        """Time when calls that wait for an engine of the model to come back are given up, `hold` seconds after the
        outage began. Negative infinity if an engine may receive calls, or if no engine is expected back."""
        return self.since.get(model, now) + hold if self._lasts(model) else -math.inf

    def _lasts(self, model: str) -> bool:
        """Whether no engine may be given calls for the model, and one is expected back."""
        return not self._fleet.serves(model) and any(not engine.leaving for engine in self._fleet.serving(model))
