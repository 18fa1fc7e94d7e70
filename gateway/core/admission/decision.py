"""Admission decisions: a grant, a wait or a refusal, with the reason and the numbers behind it.

A grant is a `Choice`: the engine that the call goes to. Decisions are facts and carry no words; `refusals.py` makes
status, words and Retry-After of a reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import msgspec

from gateway.core.admission.bookings import Booking
from gateway.core.admission.ticket import Ticket
from gateway.core.engines.choice import Choice
from gateway.core.engines.engine import Engine
from gateway.core.sidecars.sidecar import Outlook


class Reason(Enum):
    """Reason of a refusal, in the order in which admission checks them. The last three are for calls that wait."""

    DRAINING = "draining"  # the gateway is shutting down
    OVERDUE = "overdue"  # its deadline passed before it was whole
    UNKNOWN_MODEL = "unknown_model"  # nobody has its model
    NO_ENGINE = "no_engine"  # no engine of its model may be given calls
    UNAVAILABLE = "unavailable"  # no sidecar can have its model ready
    TOO_LARGE = "too_large"  # no engine can ever hold it
    UNAFFORDABLE = "unaffordable"  # no budget of a provider has room for it
    MODE = "mode"  # its model's mode refuses it
    NOT_READY = "not_ready"  # its model will be ready too late
    TOO_LATE = "too_late"  # its turn would come too late
    QUEUE_FULL = "queue_full"
    DISPLACED = "displaced"  # a more important call has pushed it out
    SHED_LATE = "shed_late"  # it has become too late while it waited
    EXPIRED = "expired"  # its deadline has passed while it waited

    __hash__ = object.__hash__


KEPT = frozenset({Reason.TOO_LATE, Reason.QUEUE_FULL, Reason.DISPLACED, Reason.SHED_LATE})  # they get a booking
# Refusals that another engine would have spared a caller.
WANT_OF_ROOM = KEPT | {Reason.MODE, Reason.NOT_READY, Reason.NO_ENGINE, Reason.UNAVAILABLE, Reason.EXPIRED}


class Foretold(msgspec.Struct, frozen=True, kw_only=True):
    """The predicted times of a call from now on, in seconds. `waited`: in its queue already. `ready`: until its model
    is ready; `wait`: then until its turn; `ttft`: then until its first token; `tpot`: for each token after it."""

    waited: float = 0.0
    ready: float = 0.0
    wait: float = 0.0
    ttft: float
    tpot: float


NOTHING = Foretold(ttft=0.0, tpot=0.0)


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """The call waits as `ticket`, which is in no queue yet. `predicted`: seconds until its turn.

    `booking`: the room that was kept for it. `victim`: who must leave the queue for it. `outlook`: how its model is
    made ready, where no engine serves it now. `held`: no engine may be given calls for its model, and one is expected
    back. `newcomer`: it asks for a share of what its class is served.
    """

    ticket: Ticket
    predicted: float | None = None
    booking: Booking | None = None
    victim: Ticket | None = None
    outlook: Outlook | None = None
    held: bool = False
    newcomer: bool = False


class Refuse(msgspec.Struct, frozen=True, kw_only=True):
    """The call is refused for `reason`; the other fields are the numbers that the reason goes by.

    `largest`: tokens of the largest call. `words`: the bound that is full, the mode's rule, the provider, or the class
    that takes its place. `wait`: seconds until all that waits now has been served. `waited`: seconds since it came.
    `engines`: of its model. `reports_awaited`: sidecars may have its model, and have not said so yet. `away`: one had
    it. `retry_in`, `why`: the words of the sidecar that cannot have the model ready, or seconds until a budget may
    have room; None: it does not know. The rest is as in `Wait`.
    """

    reason: Reason
    predicted: float | None = None
    booking: Booking | None = None
    outlook: Outlook | None = None
    newcomer: bool = False
    foretold: Foretold = NOTHING
    largest: int = 0
    words: str = ""
    wait: float = 0.0
    waited: float = 0.0
    engines: Sequence[Engine] = ()
    reports_awaited: bool = False
    away: bool = False
    retry_in: float | None = None
    why: str = ""


Decision = Choice | Wait | Refuse
