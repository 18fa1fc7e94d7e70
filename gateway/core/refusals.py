"""What a call is told that dispatch does not take, or no longer keeps: each says whose limit it was and what to do."""

from __future__ import annotations

import math
from collections.abc import Iterable

from gateway.core.call import Call
from gateway.core.fleet import Engine
from gateway.core.outcome import Outcome, Refused
from gateway.core.sidecar import Outlook

SOON = 1.0  # seconds: nothing better is known
UNKNOWN = 5.0  # seconds: what is in the way may take long, and nobody knows how long
NO_MEMORY = "no_memory"  # the one reason of a sidecar's that callers are told as a word


def unknown_model(model: str, engines: Iterable[Engine]) -> Refused:
    """Nobody has it, or nobody has said yet what it has."""
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


def no_engine(model: str) -> Refused:
    return Refused(
        Outcome.NO_ENGINE, f"No engine that serves {model!r} is up at the moment. Retry shortly.", retry_after=2.0
    )


def unavailable(model: str, outlook: Outlook) -> Refused:
    """No sidecar can have it ready now, and the soonest says why."""
    return Refused(
        Outcome.MODEL_UNAVAILABLE,
        f"The model {model!r} cannot be had at the moment: {outlook.message.rstrip('.') or 'nobody says why'}.",
        retry_after=UNKNOWN if outlook.retry_in is None else outlook.retry_in,
        reason=NO_MEMORY if outlook.why == NO_MEMORY else "",
    )


def not_ready(call: Call, ready_in: float) -> Refused:
    """It is being made ready, too late for this call."""
    return Refused(
        Outcome.MODEL_UNAVAILABLE,
        f"The model {call.model!r} is being made ready, which takes about {ready_in:.1f} s more: too long for this "
        f"request of class {call.class_name!r}. Retry after the time given.",
        retry_after=ready_in,
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
    return _come_back(Outcome.QUEUE_FULL, f"The queue of class {call.class_name!r} is full ({bound}).", place)


def displaced(call: Call, place: float | None) -> Refused:
    message = f"This request of class {call.class_name!r} made room for a more important one."
    return _come_back(Outcome.SHED, message, place)


def refused_by_mode(call: Call, why: str, wait: float) -> Refused:
    return Refused(Outcome.SHED, f"The engines of {call.model!r} are under pressure: {why}.", retry_after=wait)


def hopeless(call: Call, wait: float, place: float | None) -> Refused:
    message = (
        f"With about {wait:.1f} s of work ahead of it, this request of class {call.class_name!r} would miss its target."
    )
    return _come_back(Outcome.HOPELESS, message, place)


def shed_late(call: Call, waited: float, place: float | None) -> Refused:
    message = f"After {waited:.1f} s in the queue of class {call.class_name!r} it could no longer meet its target."
    return _come_back(Outcome.SHED, message, place)


def _come_back(outcome: Outcome, message: str, place: float | None) -> Refused:
    """`place`: seconds after which the call finds a place kept for it; None: so much is booked that none can be."""
    if place is not None:
        return Refused(outcome, f"{message} Retry after the time given: a place is kept.", retry_after=place, kept=True)
    return Refused(outcome, f"{message} Retrying within the next minute will not help.", retry=False)


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
