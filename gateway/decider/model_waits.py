"""Calls that wait for a model which no engine serves now: a sidecar has it made ready, or an engine is expected back.

Also the timers by which a model's queue is looked at again: when an outage has lasted for `routing.hold_unserved`, and
while calls are set aside for a full engine that has their prompts.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

import msgspec

from gateway.core.admission.admission import AdmissionControl
from gateway.core.admission.queues import Queues, Ticket
from gateway.core.sidecars.sidecar import Outlook

LOOK_AGAIN = 0.5  # seconds; calls that were set aside are looked at at least as often
MOVED = 0.25  # seconds that a prediction must move for calls that wait for the model to be looked at again


class ModelWaits(msgspec.Struct, eq=False):
    """Waits of one Dispatch for models. `pump` looks at a model's queue.

    `wake` orders a model to be ready for so many seconds, even if no call waits. `woken` receives the class and the
    wait in seconds of each call that waited for a model.
    """

    _control: AdmissionControl
    _pump: Callable[[str], None]
    wake: Callable[[str, float], None]
    woken: Callable[[str, float], None]
    since: dict[Ticket, float] = {}  # when each call began to wait for its model
    _ready_at: dict[str, float] = {}  # model -> when it will be ready, as its calls were told
    timers: dict[str, asyncio.Handle] = {}  # by model: its queue is looked at again

    def begin(self, ticket: Ticket, outlook: Outlook, now: float, *, front: bool) -> None:
        """A sidecar has the model made ready for the call."""
        model = ticket.call.model
        self.wake(model, 0.0)
        if not front:
            ready_at = now + (outlook.ready_in or 0.0)
            self._ready_at[model] = min(ready_at, self._ready_at.get(model, math.inf))
            self.since[ticket] = now

    def end(self, ticket: Ticket, now: float) -> None:
        """The call waits no longer, for a model or anything else."""
        since = self.since.pop(ticket, None)
        if since is not None:
            ticket.call.woken = now - since
            self.woken(ticket.call.class_name, now - since)

    def too_late(self, model: str, queues: Queues, now: float) -> list[Ticket]:
        """Return the calls for which the model will be ready too late, if the prediction has moved by MOVED."""
        control = self._control
        outlook = None if control.fleet.serves(model) else control.sidecars.outlook(model, now)
        if outlook is None or outlook.ready_in is None or control.rules.policy.deadlines == "run":
            return []
        ready_at = now + outlook.ready_in
        if ready_at <= self._ready_at.get(model, -math.inf) + MOVED:
            return []
        self._ready_at[model] = ready_at
        return [ticket for ticket in queues if control.too_late_for_model(ticket, ready_at, now)]

    def unservable(self, model: str, queues: Queues, now: float) -> list[Ticket]:
        """Return the waiting calls to refuse because no engine can serve the model: none while a sidecar has it made
        ready, or an engine is expected back."""
        outlook = self._control.sidecars.outlook(model, now)
        if outlook is not None and outlook.ready_in is not None:
            self.wake(model, 0.0)
            return []
        until = self._control.held_until(model, now)
        if outlook is None and until > now:
            self.look_again(model, until)
            return []
        return list(queues)

    def look_again(self, model: str, at: float) -> None:
        """Look at the model's queue again at this time, by the loop's clock; an earlier order is forgotten."""
        self.forget_look(model)
        self.timers[model] = asyncio.get_running_loop().call_at(at, self._look, model)

    def forget_look(self, model: str) -> None:
        """Cancel the model's timer, if it has one."""
        timer = self.timers.pop(model, None)
        if timer is not None:
            timer.cancel()

    def _look(self, model: str) -> None:
        del self.timers[model]
        self._pump(model)

    def left_over(self) -> dict[str, object]:
        """Return what is kept for calls that wait, by name."""
        return {"calls that wait for models": self.since, "timers of queues": self.timers}
