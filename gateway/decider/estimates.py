"""Estimates of what waits: places in queues, waits, engines wanted. For status, sidecars and the scaling signal."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from gateway.core.admission.admission import AdmissionControl
from gateway.core.admission.ticket import SCANNED
from gateway.core.engines.choice import usable_of
from gateway.core.engines.fleet import Fleet
from gateway.core.request.call import Call
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

    def place(self, call: Call) -> tuple[int, float | None]:
        """Return the place of a call that waits among those of its class, by the order of one tenant, and the seconds
        until its turn. 0: it is not among the first SCANNED that were looked at; None: nobody knows."""
        control, now, model = self._control, self._clock(), call.model
        queues, traffic = control.workload.open(model, now)
        line = [ticket for ticket in islice(queues, SCANNED) if ticket.call.class_name == call.class_name]
        own = next((ticket for ticket in line if ticket.call is call), None)
        if own is None:
            return 0, None
        place = 1 + sum([ticket.key < own.key for ticket in line])
        ready_in = 0.0
        if not self._fleet.serves(model):
            outlook = control.sidecars.outlook(model, now)
            if outlook is None or outlook.ready_in is None:
                return place, None
            ready_in = outlook.ready_in
        return place, ready_in + traffic.wait(queues, call, now, own)

    def engines_wanted(self) -> dict[str, int]:
        """Return the scaling signal of each model of the house that calls have come for."""
        now, fleet, queues = self._clock(), self._fleet, self._control.queues
        outside = self._control.rules.outside
        return {
            model: traffic.scale(fleet.serving(model), queues[model].total_tokens, now)
            for model, traffic in self._control.traffic.items()
            if model not in outside
        }
