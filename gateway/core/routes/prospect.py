"""Whether a model can serve a call within its targets, and why not."""

from __future__ import annotations

import random
from enum import Enum

import msgspec

from gateway.core.admission.admission import AdmissionControl
from gateway.core.admission.decision import Reason, Refuse, Wait
from gateway.core.request.call import Call

DOWN = frozenset({Reason.UNKNOWN_MODEL, Reason.NO_ENGINE, Reason.UNAVAILABLE})


class Readiness(Enum):
    """Speed at which a model can serve a call: the smaller, the sooner."""

    AT_ONCE = 0
    IN_TIME = 1  # after a wait in its queue
    WHEN_READY = 2  # in time too, once a sidecar has made the model ready
    LEAVES = 3  # in time, but it would go to a provider before that
    HELD = 4  # an engine is expected back
    NEVER = 5


class Prospect(msgspec.Struct, frozen=True):
    """`refusal`: why the call would be refused; None: it would not."""

    readiness: Readiness
    refusal: Refuse | None = None

    @property
    def in_time(self) -> bool:
        """Whether the model serves the call within its targets, as far as anybody can predict."""
        return self.readiness.value < Readiness.LEAVES.value

    @property
    def leaves(self) -> bool:
        """Whether it would do so too, and a provider that takes the call gets it even so."""
        return self.readiness is Readiness.LEAVES

    @property
    def is_down(self) -> bool:
        """Whether no engine of the model works: a want of engines, not of room or time."""
        refusal = self.refusal
        return self.readiness is Readiness.HELD or (refusal is not None and refusal.reason in DOWN)


def prospect_of(control: AdmissionControl, call: Call, now: float, rng: random.Random, *, less: int = 0) -> Prospect:
    """Say whether `call.model` can serve the call within the call's targets and, if not, why.

    It is the decision of admission itself, asked beforehand: a model that is full, asleep, out of service, too small or
    too late gets the refusal that the call would get. Nothing changes. The call must have its estimates and its class.
    `now`: monotonic seconds. `rng` breaks ties between engines. `less`: see `AdmissionControl.to_wait`.
    """
    decision = control.decide(call, now, rng, less=less)
    if isinstance(decision, Refuse):
        return Prospect(Readiness.NEVER, decision)
    if not isinstance(decision, Wait):
        return Prospect(Readiness.AT_ONCE)
    if decision.held:
        return Prospect(Readiness.HELD)
    leaves_at = decision.ticket.expires
    waits_longer = leaves_at < control.expires(call) and now + (decision.predicted or 0.0) > leaves_at
    if waits_longer and control.rules.predict and call.model not in control.rules.outside:
        return Prospect(Readiness.LEAVES)
    return Prospect(Readiness.IN_TIME if decision.outlook is None else Readiness.WHEN_READY)
