"""What a call is told that dispatch does not take, or no longer keeps.

Each says whose limit it was, which of the times that add up broke which target, and what to do. When to come back is
added by `Refused.full_message`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

from gateway.core.engines.breaker import BreakerState
from gateway.core.engines.fleet import Engine
from gateway.core.request.call import Call
from gateway.core.request.outcome import Outcome, Refused
from gateway.core.sidecars.sidecar import Outlook

SOON = 1.0  # seconds: nothing better is known
UNKNOWN = 5.0  # seconds: what is in the way may take long, and nobody knows how long
NO_MEMORY = "no_memory"  # the one reason of a sidecar's that callers are told as a word
SHOWN = 0.05  # seconds; less is no cause


class Foretold(msgspec.Struct, frozen=True, kw_only=True):
    """The predicted times of a call from now on, in seconds. `waited`: in its queue already. `ready`: until its model
    is ready; `wait`: then until its turn; `ttft`: then until its first token; `tpot`: for each token after it."""

    waited: float = 0.0
    ready: float = 0.0
    wait: float = 0.0
    ttft: float
    tpot: float

    def late(self, call: Call, now: float) -> str:
        """Which target of the call is missed, by which of these times, in a sentence."""
        first = now - call.arrived + self.ready + self.wait + self.ttft
        writing = call.expected_tokens * self.tpot
        parts = [
            (now - call.arrived - self.waited, "since it began to come in"),
            (self.waited, "in the queue so far"),
            (self.ready, "until its model is ready"),
            (self.wait, "until its turn"),
            (self.ttft, "from there to its first token"),
        ]
        if call.arrived + first <= call.ttft_by or first + writing > call.deadline - call.arrived:
            parts.append((writing, f"to write the {call.expected_tokens} tokens that such answers have"))
            what, target, sum_ = "last token", f"its deadline is {_s(call.deadline - call.arrived)}", first + writing
        else:
            target = f"class {call.class_name!r} allows {_s(call.ttft_by - call.arrived)}"
            what, sum_ = "first token", first
        causes = ", ".join([f"{_s(seconds)} {words}" for seconds, words in parts if seconds >= SHOWN])
        return f"its {what} would come after {_s(sum_)}{f' ({causes})' if causes else ''}, and {target}"


def _s(seconds: float) -> str:
    return f"{seconds:.{0 if seconds >= 100 else 1 if seconds >= 1 else 2}f} s"


def unknown_model(model: str, engines: Iterable[Engine], *, awaited: bool = False) -> Refused:
    """Nobody has it, or not everybody has said yet what it has. `awaited`: sidecars have not."""
    if awaited:
        message = f"This gateway has just begun and awaits its sidecars' reports, so it does not know {model!r} yet."
        return Refused(Outcome.NO_ENGINE, message, retry_after=SOON)
    if any(math.isinf(engine.back_at) for engine in engines):
        message = "Not every engine has been reached yet, so its models are not known."
        return Refused(Outcome.NO_ENGINE, message, retry_after=SOON)
    message = f"The model {model!r} does not exist here. GET /v1/models lists what does."
    return Refused(Outcome.NOT_FOUND, message, param="model")


def forbidden_model(call: Call) -> Refused:
    return Refused(
        Outcome.FORBIDDEN,
        f"Tenant {call.tenant!r} may not use the model {call.model!r}. Ask whoever keeps this gateway's policy.",
        param="model",
        code="model_not_allowed",
    )


def no_engine(model: str, engines: Sequence[Engine] = ()) -> Refused:
    """`engines` serve the model, and none of them may be given calls."""
    up = [engine for engine in engines if engine.up]
    taken = [engine for engine in up if not engine.draining]
    failing = sum([engine.breaker.state is not BreakerState.CLOSED for engine in taken])
    counts = ((len(engines) - len(up), "down"), (len(up) - len(taken), "drained"), (failing, "failing"))
    states = ", ".join([f"{count} {state}" for count, state in counts if count])
    why = f" (of {len(engines)}: {states})" if states else ""
    return Refused(Outcome.NO_ENGINE, f"No engine that serves {model!r} can be given calls now{why}.", retry_after=2.0)


def unavailable(model: str, outlook: Outlook) -> Refused:
    """No sidecar can have it ready now, and the soonest says why."""
    return Refused(
        Outcome.MODEL_UNAVAILABLE,
        f"The model {model!r} cannot be made ready at the moment: {outlook.message.rstrip('.') or 'nobody says why'}.",
        retry_after=UNKNOWN if outlook.retry_in is None else outlook.retry_in,
        reason=NO_MEMORY if outlook.why == NO_MEMORY else "",
    )


def not_ready(call: Call, now: float, foretold: Foretold) -> Refused:
    """It is being made ready, too late for this call."""
    return Refused(
        Outcome.MODEL_UNAVAILABLE,
        f"The model {call.model!r} is being made ready. This call of class {call.class_name!r} cannot wait for it: "
        f"{foretold.late(call, now)}.",
        retry_after=foretold.ready,
    )


def too_large(call: Call, largest: int) -> Refused:
    return Refused(
        Outcome.TOO_LARGE,
        f"This request needs about {call.cost} tokens of KV cache and no engine of this fleet can hold more than "
        f"{largest} for {call.model!r}. Shorten the prompt or lower max_tokens.",
        code="context_length_exceeded",
    )


def draining() -> Refused:
    return Refused(Outcome.DRAINING, "This gateway is shutting down; retry elsewhere.", retry_after=SOON)


def queue_full(call: Call, bound: str, place: float | None) -> Refused:
    message = f"The queue of class {call.class_name!r} for {call.model!r} is full: its limit is {bound}."
    return _come_back(Outcome.QUEUE_FULL, message, place)


def displaced(call: Call, by: Call, place: float | None) -> Refused:
    message = (
        f"The queue for {call.model!r} was full, and a call of class {by.class_name!r}, which is more important, took "
        f"the place of this one of class {call.class_name!r}."
    )
    return _come_back(Outcome.SHED, message, place)


def refused_by_mode(call: Call, why: str, wait: float) -> Refused:
    return Refused(Outcome.SHED, f"The engines of {call.model!r} are under pressure: {why}.", retry_after=wait)


def hopeless(call: Call, now: float, foretold: Foretold, place: float | None) -> Refused:
    message = f"This call of class {call.class_name!r} would be too late: {foretold.late(call, now)}."
    return _come_back(Outcome.HOPELESS, message, place)


def shed_late(call: Call, now: float, foretold: Foretold, place: float | None) -> Refused:
    message = f"This call of class {call.class_name!r} has become too late: {foretold.late(call, now)}."
    return _come_back(Outcome.SHED, message, place)


def _come_back(outcome: Outcome, message: str, place: float | None) -> Refused:
    """`place`: seconds after which the call finds a place kept for it; None: so much is booked that none can be."""
    if place is not None:
        return Refused(outcome, message, retry_after=place, kept=True)
    return Refused(outcome, f"{message} The next minute is booked out: retrying within it will not help.", retry=False)


def too_slow(call: Call, seconds: float) -> Refused:
    """Its deadline, which counts from its head's first byte, passed before it could enter the queue."""
    return Refused(
        Outcome.EXPIRED,
        f"The deadline passed before this call of class {call.class_name!r} was whole: it began {seconds:.1f} s ago.",
        retry_after=SOON,
    )


def expired(call: Call, waited: float) -> Refused:
    return Refused(
        Outcome.EXPIRED,
        f"The deadline passed after {waited:.1f} s in the queue of class {call.class_name!r}.",
        retry_after=SOON,
    )
