"""Mutation testing: bugs planted on purpose, each as a small change of one function's text, made in memory.

A mutant names the place and what is put there; the function is compiled again with that one change, so no second copy
of it exists. A place that is no longer there is an error: a mutant that changes nothing proves nothing.
"""

from __future__ import annotations
import __future__

import inspect
import textwrap
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from gateway.core.admission.admission import AdmissionControl
from gateway.core.admission.fairness import ClassQueue
from gateway.core.engines.cache_age import CacheAge
from gateway.decider.dispatch import Dispatch
from gateway.decider.waiting import WaitingCalls
from gateway.relay.epp.lending import Lending, LentCall
from gateway.relay.forwarding import Forwarding
from gateway.relay.pipeline import Pipeline


class Mutant(NamedTuple):
    """`owner.name` with `new` in place of `old`."""

    owner: type | ModuleType
    name: str
    old: str
    new: str

    def function(self) -> Callable[..., Any]:
        """The changed function. Raises ValueError unless its place is there, once."""
        source = textwrap.dedent(inspect.getsource(getattr(self.owner, self.name)))
        if source.count(self.old) != 1:
            raise ValueError(f"{self.owner.__name__}.{self.name} has {self.old!r} {source.count(self.old)} times")
        original: FunctionType = getattr(self.owner, self.name)
        flags = __future__.annotations.compiler_flag
        code = compile(source.replace(self.old, self.new), f"<mutant of {self.name}>", "exec", flags)
        names: dict[str, Any] = {}
        exec(code, original.__globals__, names)  # noqa: S102 # the project's own source, with one change
        changed: Callable[..., Any] = names[self.name]
        return changed


# A call that is cancelled in the very moment of its grant keeps what it holds.
LEAKED_HOLD = Mutant(WaitingCalls, "leave", "turn.result().discard()", "pass")

# Room comes in the moment at which the next call's time is up: that call is told, and nobody goes in its place.
LOST_WAKE_UP = Mutant(
    WaitingCalls,
    "pump",
    "        while late:\n            ticket, why = late.pop()\n            self.refuse(ticket, why, now)\n",
    "        if late:\n            ticket, why = late.pop()\n            self.refuse(ticket, why, now)\n"
    "            break\n",
)

# An engine has read its last prompt: calls that fill gaps sleep on until its next sample.
UNFILLED_GAP = Mutant(Dispatch, "read", "if self._turns:", "if False:")

# A call whose body took until its deadline goes at once all the same.
LATE_AT_ONCE = Mutant(AdmissionControl, "at_once", "now >= call.deadline", "False")

# What will probably be late does not go at once, whatever engine is idle.
PREDICTED_AT_ONCE = Mutant(
    Dispatch, "at_once", "if choice is None:", "if choice is None or now + choice.ttft > call.ttft_by:"
)

# Nobody is charged for what waited: tenants go in turn by anything but what they were served.
UNCHARGED = Mutant(ClassQueue, "take", "queue.counter += ticket.charge / queue.weight", "pass")

# Whose head was read last pays, though its body is still coming and this one's has come.
ANOTHERS_ACCOUNT = Mutant(Pipeline, "call", "if self._whose is request else None", "")

# A call that its own deadline ends before the first byte is refunded, though an engine was made to work for it.
REFUNDED_EXPIRY = Mutant(
    Forwarding, "exchange", "except (asyncio.CancelledError, Refused):", "except ZeroDivisionError:"
)

# A call waits without end for the full engine that has its prompt.
SET_ASIDE = Mutant(
    AdmissionControl, "_choose", "worth_waiting(call, choice, now, waited)", "worth_waiting(call, choice, now, 0.0)"
)

# What an engine has evicted stays in the picture of its cache.
NEVER_EVICTED = Mutant(CacheAge, "_removed", "stored.pop(", "stored.get(")

# The call of a proxy that died with its grant is held until somebody ends it.
NO_TTL = Mutant(LentCall, "__init__", "asyncio.timeout_at(min(by, until) + GRACE)", "asyncio.timeout(None)")

# That of one that died after its first byte is.
NO_TTL_BEGUN = Mutant(
    LentCall, "first_byte", "self.limit.reschedule(self.until + GRACE)", "self.limit.reschedule(None)"
)

# A whole answer that an engine did not give a proxy in time is free.
UNSETTLED = Mutant(
    Lending,
    "exchange",
    "settle_unanswered(call, admission, record, self._clock(), pace=grant.pace, since=grant.hold.taken_at)",
    "pass",
)
