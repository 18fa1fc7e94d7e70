"""Entering a queue: the decision whether a call may wait is obeyed. It gets its ticket, or a refusal and a booking."""

from __future__ import annotations

from collections.abc import Callable

from gateway.core.admission import refusals
from gateway.core.admission.admission import AdmissionControl
from gateway.core.admission.bookings import HORIZON
from gateway.core.admission.decision import KEPT, WANT_OF_ROOM, Reason, Refuse
from gateway.core.admission.queues import Ticket
from gateway.core.request.call import Call
from gateway.core.request.outcome import Refused
from gateway.decider.model_waits import ModelWaits


class Entering:
    """`displace` refuses the waiting call that has to make room for another."""

    def __init__(
        self, control: AdmissionControl, waits: ModelWaits, displace: Callable[[Ticket, Refuse, float], None]
    ) -> None:
        self._control = control
        self._waits = waits
        self._displace = displace

    def ticket(self, call: Call, exclude: frozenset[str], now: float, *, front: bool) -> Ticket:
        """Return the call's place, which is not in its queue yet. Raises Refused."""
        control, waits = self._control, self._waits
        known = control.traffic.get(call.model)
        if known is not None:
            known.advance(now)
        control.outages.look(call.model, now)
        decision = control.to_wait(call, now, exclude, front=front)
        if decision.predicted is not None:
            call.predicted_wait = decision.predicted
        if decision.newcomer:
            control.workload.open(call.model, now)[1].offered(call, now)
        if decision.booking is not None:
            control.traffic[call.model].bookings[call.class_name].claim(call)
        if decision.outlook is not None:
            control.sidecars.wanted(decision.outlook, now)
        if isinstance(decision, Refuse):
            if decision.reason is Reason.NOT_READY:
                waits.wake(call.model, decision.foretold.ready)  # it is told when to come back
            raise self.refused(call, decision, now)
        control.workload.open(call.model, now)
        if decision.victim is not None:
            self._displace(decision.victim, Refuse(reason=Reason.DISPLACED, words=call.class_name), now)
        if decision.outlook is not None:
            waits.begin(decision.ticket, decision.outlook, now, front=front)
        elif decision.held:
            waits.since[decision.ticket] = now
        return decision.ticket

    def refused(self, call: Call, why: Refuse, now: float) -> Refused:
        """Return the call's refusal, with a booking if its reason has one."""
        due_in = None
        if why.reason in WANT_OF_ROOM:
            self._control.workload.open(call.model, now)[1].scaling.refused += call.cost
        if why.reason in KEPT:
            queues, traffic = self._control.workload.open(call.model, now)
            ready_in = 0.0 if why.outlook is None else why.outlook.ready_in or 0.0
            due_in = traffic.book(queues, call, now, ready_in)
            traffic.turned_away(call.class_name, HORIZON if due_in is None else due_in, now)
        return refusals.refused(why, call, now, due_in)

    def unknown(self, model: str, now: float) -> Refused:
        """Return the refusal of a call for a model that neither an engine nor a sidecar is known to have."""
        why = self._control.unknown(model, now)
        return refusals.unknown_model(model, why.engines, awaited=why.reports_awaited, away=why.away)
