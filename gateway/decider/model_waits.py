"""Calls that wait for a model which no engine serves now: a sidecar has it made ready, or an engine is expected back.

Also the timers by which Dispatch looks at a model's queue again: when an outage has lasted for
`routing.hold_unserved`, and while calls are set aside for a full engine that has their prompts.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from gateway.core.admission.admission import AdmissionControl
from gateway.core.admission.queues import Queues, Ticket
from gateway.core.sidecars.sidecar import Outlook

LOOK_AGAIN = 0.5  # seconds; calls that were set aside are looked at at least as often
MOVED = 0.25  # seconds that a prediction must move for calls that wait for the model to be looked at again


class ModelWaits:
    """Waits of one Dispatch for models. `pump` looks at a model's queue.

    `wake` orders a model to be ready for so many seconds, even if no call waits. `woken` receives the class and the
    wait in seconds of each call that waited for a model.
    """

    def __init__(
        self,
        control: AdmissionControl,
        clock: Callable[[], float],
        pump: Callable[[str], None],
        wake: Callable[[str, float], None],
        woken: Callable[[str, float], None],
    ) -> None:
        self._control = control
        self._clock = clock
        self._pump = pump
        self.wake = wake
        self.woken = woken
        self.since: dict[Ticket, float] = {}  # when each call began to wait for its model
        self._ready_at: dict[str, float] = {}  # model -> when it will be ready, as its calls were told
        self._giving_up: dict[str, asyncio.Handle] = {}  # model -> timer: calls wait for an engine of it to come back
        self._looking_again: dict[str, asyncio.Handle] = {}  # model -> timer: calls were set aside for a while

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

    def deadline_unreachable(self, model: str, queues: Queues, now: float) -> list[Ticket]:
        """Return the calls to refuse of a model that no engine may be given for: none while a sidecar has it made
        ready, or an engine is expected back."""
        outlook = self._control.sidecars.outlook(model, now)
        if outlook is not None and outlook.ready_in is not None:
            self.wake(model, 0.0)
            return []
        until = self._control.held_until(model, now)
        if outlook is None and until > now:
            if model not in self._giving_up:
                self._giving_up[model] = asyncio.get_running_loop().call_at(until, self._give_up, model)
            return []
        return list(queues)

    def _give_up(self, model: str) -> None:
        """No engine of the model has come back in time: the pump refuses its calls."""
        del self._giving_up[model]
        self._pump(model)

    def look_again(self, model: str) -> None:
        """Look at the model's queue again in LOOK_AGAIN seconds: calls were set aside."""
        if model not in self._looking_again:
            self._looking_again[model] = asyncio.get_running_loop().call_later(LOOK_AGAIN, self._look, model)

    def _look(self, model: str) -> None:
        """Calls that were set aside may have waited for long enough."""
        del self._looking_again[model]
        self._pump(model)

    @property
    def timed(self) -> bool:
        """Whether any timer is set."""
        return bool(self._giving_up or self._looking_again)

    def keep_timers(self, model: str, queues: Queues) -> None:
        """Cancel the model's timers if nobody waits, and the one of its outage if an engine has come back."""
        if model in self._looking_again and not queues:
            self._looking_again.pop(model).cancel()
        if model in self._giving_up and (not queues or self._control.fleet.serves(model)):
            self._giving_up.pop(model).cancel()

    def forget_outages(self) -> None:
        """Cancel the timers of outages: the next pump sets them by the policy of then."""
        for model in list(self._giving_up):
            self._giving_up.pop(model).cancel()

    def left_over(self) -> dict[str, object]:
        """Return what is kept for calls that wait, by name."""
        return {
            "calls that wait for models": self.since,
            "timers of models without an engine": self._giving_up,
            "timers of calls that were set aside": self._looking_again,
        }
