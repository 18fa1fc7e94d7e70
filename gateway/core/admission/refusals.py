"""Refusals: status, words and Retry-After of every reason for which a call gets no answer of an engine.

Whoever decides names a reason and numbers. Each message says whose limit it was, which of the times that add up broke
which target, and what to do; `Refused.full_message` adds when to come back. Refusals of requests that cannot be
parsed, or that nobody may send, are beside their parsers in `core/request`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from gateway.core.admission.bookings import HORIZON, SOON
from gateway.core.admission.bucket import Bucket
from gateway.core.admission.deadline import MARGIN
from gateway.core.admission.decision import KEPT, Foretold, Reason, Refuse
from gateway.core.admission.quotas import HELD, QuotaWindow
from gateway.core.engines.breaker import BreakerState
from gateway.core.policy.traffic import Refusal
from gateway.core.request.call import Call
from gateway.core.request.outcome import ISSUER_KEYS, MODEL_AWAY, Outcome, Refused
from gateway.shared.protocol import FAILED, NO_MEMORY, OFF

QUOTA = "insufficient_quota"  # as OpenAI calls it
MODEL_OFF = "model_off"
BOOKED_OUT = HORIZON + 1.0  # seconds; more than SDKs wait, so they are told not to retry by themselves
UNKNOWN = 5.0  # seconds: what is in the way may take long, and nobody knows how long
SHOWN = 0.05  # seconds; less is no cause


# Refusals whose message is one sentence: outcome, and message. `{late}`: what `lateness` says.
_SENTENCES: Mapping[Reason, tuple[Outcome, str]] = MappingProxyType({
    Reason.DRAINING: (Outcome.DRAINING, "This gateway is shutting down; retry elsewhere."),
    Reason.OVERDUE: (
        Outcome.EXPIRED,
        "The deadline passed before this call of class {call.class_name!r} was whole: it began {why.waited:.1f} s ago.",
    ),
    Reason.TOO_LARGE: (
        Outcome.TOO_LARGE,
        "This request needs about {call.cost} tokens of KV cache and no engine of this fleet can hold more than "
        "{why.largest} for {call.model!r}. Shorten the prompt or lower max_tokens.",
    ),
    Reason.MODE: (Outcome.SHED, "The engines of {call.model!r} are under pressure: {why.words}."),
    Reason.NOT_READY: (
        Outcome.MODEL_UNAVAILABLE,
        "The model {call.model!r} is being made ready. This call of class {call.class_name!r} cannot wait for it: "
        "{late}.",
    ),
    Reason.TOO_LATE: (
        Outcome.DEADLINE_UNREACHABLE,
        "This call of class {call.class_name!r} would be too late: {late}.",
    ),
    Reason.QUEUE_FULL: (
        Outcome.QUEUE_FULL,
        "The queue of class {call.class_name!r} for {call.model!r} is full: its limit is {why.words}.",
    ),
    Reason.DISPLACED: (
        Outcome.SHED,
        "The queue for {call.model!r} was full, and a call of class {why.words!r}, which is more important, took the "
        "place of this one of class {call.class_name!r}.",
    ),
    Reason.SHED_LATE: (Outcome.SHED, "This call of class {call.class_name!r} has become too late: {late}."),
    Reason.EXPIRED: (
        Outcome.EXPIRED,
        "The deadline passed after {why.waited:.1f} s in the queue of class {call.class_name!r}.",
    ),
})  # fmt: skip


def refused(why: Refuse, call: Call, now: float, due_in: float | None = None) -> Refused:
    """The refusal as its caller gets it. `due_in`: seconds until the call's booking is due; None: it has none."""
    told = _TOLD.get(why.reason)
    if told is not None:
        return told(why, call)
    outcome, sentence = _SENTENCES[why.reason]
    late = lateness(why.foretold, call, now) if "{late}" in sentence else ""
    message = sentence.format(call=call, why=why, late=late)
    if why.reason is Reason.TOO_LARGE:
        return Refused(outcome, message, code="context_length_exceeded")
    if why.reason not in KEPT:
        retry_after = {Reason.MODE: why.wait, Reason.NOT_READY: why.foretold.ready}.get(why.reason, SOON)
        return Refused(outcome, message, retry_after=retry_after)
    if due_in is None:
        return Refused(outcome, f"{message} The next minute is booked out.", retry_after=BOOKED_OUT)
    return Refused(outcome, message, retry_after=due_in, kept=True)


def quota_exceeded(window: QuotaWindow, tokens: int, now: float, lines: bytes) -> Refused:
    """A tenant's quota of a calendar window. `tokens`: the call's, estimated; `lines`: its x-ratelimit headers."""
    amount, used, seconds = window.amount or 0, window.used(now), window.frees_in(tokens, now)
    limit = f"{amount} tokens per {window.span}"
    message = f"Tenant {window.tenant} has a quota of {limit} (UTC): {used} are used, and this call needs {tokens}"
    if seconds == math.inf:
        message += ", more than the whole quota. Make the prompt or max_tokens smaller."
        return Refused(Outcome.RATE_LIMITED, message, headers=lines, retry=False, code=QUOTA, limit=limit)
    if used + tokens <= amount:
        message += f". Calls under way hold {window.reserved} until they end."
    else:
        message += f". The next {window.span} begins with nothing used."
    return Refused(Outcome.RATE_LIMITED, message, retry_after=seconds, headers=lines, code=QUOTA, limit=limit)


def rate_limited(
    bucket: Bucket, amount: int, seconds: float, now: float, lines: bytes, *, kept: bool | None
) -> Refused:
    """The limit that a call has to wait for longest. `seconds`: until it is allowed, infinite where it never is.
    `kept`: whether it has a booking; None: nothing is promised. `lines`: its x-ratelimit headers."""
    limit = f"{bucket.quota.rate} {bucket.key[0]}"
    if seconds == math.inf:
        message = (
            f"This call needs {amount} tokens, and the limit of {bucket.owner} ({limit}) never lets more than "
            f"{bucket.burst} through at once: make the prompt or max_tokens smaller."
        )
        return Refused(Outcome.RATE_LIMITED, message, headers=lines, retry=False, limit=limit)
    message = f"The limit of {bucket.owner} is {limit}: this call needs {amount}, {bucket.left(now)} are left."
    retry = kept is not False
    return Refused(
        Outcome.RATE_LIMITED, message, retry_after=seconds, headers=lines, retry=retry, kept=bool(kept), limit=limit
    )


def lateness(foretold: Foretold, call: Call, now: float) -> str:
    """Clause that names the target the call would miss, and the predicted times that make it late."""
    first = now - call.arrived + foretold.ready + foretold.wait + foretold.ttft
    writing = call.expected_tokens * foretold.tpot
    parts = [
        (now - call.arrived - foretold.waited, "since it began to come in"),
        (foretold.waited, "in the queue so far"),
        (foretold.ready, "until its model is ready"),
        (foretold.wait, "until its turn"),
        (foretold.ttft, "from there to its first token"),
    ]
    if math.isinf(call.ttft_by) or first + writing > call.deadline - call.arrived:
        parts.append((writing, f"to write the {call.expected_tokens} tokens that such answers have"))
        what, target, sum_ = "last token", f"its deadline is {_s(call.deadline - call.arrived)}", first + writing
    else:
        allowed = call.ttft_by - call.arrived
        target = f"class {call.class_name!r} allows {_s(allowed)}"
        if first <= allowed:
            target += f", of which {_s(MARGIN * allowed)} are kept for the way"
        what, sum_ = "first token", first
    causes = ", ".join([f"{_s(seconds)} {words}" for seconds, words in parts if seconds >= SHOWN])
    return f"its {what} would come after {_s(sum_)}{f' ({causes})' if causes else ''}, and {target}"


def _s(seconds: float) -> str:
    return f"{seconds:.{0 if seconds >= 100 else 1 if seconds >= 1 else 2}f} s"


def _unknown_model(why: Refuse, call: Call) -> Refused:
    """No engine has the model, or some have not told their models yet."""
    if why.reports_awaited:
        message = (
            f"This gateway has just begun and awaits its sidecars' reports, so it does not know {call.model!r} yet."
        )
        return Refused(Outcome.NO_ENGINE, message, retry_after=SOON)
    if any(math.isinf(engine.health.back_at) for engine in why.engines):
        message = "Not every engine has been reached yet, so its models are not known."
        return Refused(Outcome.NO_ENGINE, message, retry_after=SOON)
    if why.away:
        message = f"The model {call.model!r} is not here now: the machine that had it is away."
        return Refused(Outcome.NOT_FOUND, message, param="model", reason=MODEL_AWAY)
    message = f"The model {call.model!r} does not exist here. GET /v1/models lists what does."
    return Refused(Outcome.NOT_FOUND, message, param="model")


def forbidden_model(call: Call) -> Refused:
    return Refused(
        Outcome.FORBIDDEN,
        f"Tenant {call.tenant!r} may not use the model {call.model!r}. Ask whoever keeps this gateway's policy.",
        param="model",
        code="model_not_allowed",
    )


def _no_engine(why: Refuse, call: Call) -> Refused:
    """Engines serve the model, and none of them may be given calls."""
    engines = why.engines
    up = [engine for engine in engines if engine.health.up]
    taken = [engine for engine in up if not engine.draining]
    failing = sum([engine.breaker.state is not BreakerState.CLOSED for engine in taken])
    counts = ((len(engines) - len(up), "down"), (len(up) - len(taken), "drained"), (failing, "failing"))
    states = ", ".join([f"{count} {state}" for count, state in counts if count])
    told = f" (of {len(engines)}: {states})" if states else ""
    held = f" This call has waited {_s(why.waited)} for one." if why.waited >= SHOWN else ""
    message = f"No engine that serves {call.model!r} can be given calls now{told}.{held}"
    return Refused(Outcome.NO_ENGINE, message, retry_after=2.0)


def _unavailable(why: Refuse, call: Call) -> Refused:
    """No sidecar can have the model ready now, and the soonest says why."""
    model, said = call.model, why.words.rstrip(".") or "nobody says why"
    if why.why == OFF:
        message = f"An operator has switched the model {model!r} off. GET /v1/models lists what can be had."
        return Refused(Outcome.MODEL_UNAVAILABLE, message, retry=False, code=MODEL_OFF, reason=MODEL_OFF)
    if why.why == FAILED and why.retry_in is None:
        message = f"The model {model!r} cannot be run before its settings change: {said}. No retry helps until then."
        return Refused(Outcome.MODEL_UNAVAILABLE, message, retry=False)
    message = f"The model {model!r} cannot be made ready at the moment: {said}."
    retry_after = UNKNOWN if why.retry_in is None else why.retry_in
    reason = NO_MEMORY if why.why == NO_MEMORY else ""
    return Refused(Outcome.MODEL_UNAVAILABLE, message, retry_after=retry_after, reason=reason)


def _unaffordable(why: Refuse, call: Call) -> Refused:
    """The budget of a provider, or the tenant's share of it, has no room; or it has room of which the storage has not
    been told yet."""
    provider, frees_in = why.words, why.retry_in
    if frees_in is None:
        message = f"Money for calls such as this one to the provider {provider} is not set aside in the storage yet."
        return Refused(Outcome.NO_ENGINE, message, retry_after=SOON)
    budget = f"The budget of the provider {provider} for tenant {call.tenant!r}"
    message = f"{budget} has no room for what this call may cost at most"
    if frees_in == math.inf:
        message += ", even with nothing spent. Make the prompt or max_tokens smaller."
        return Refused(Outcome.RATE_LIMITED, message, retry=False, code=QUOTA)
    rest = "until calls under way have ended" if frees_in <= HELD else "until the next begins, with nothing spent"
    message += f", {rest}. A smaller max_tokens costs less."
    return Refused(Outcome.RATE_LIMITED, message, retry_after=frees_in, code=QUOTA)


# Refusals whose message depends on more.
_TOLD: Mapping[Reason, Callable[[Refuse, Call], Refused]] = MappingProxyType({
    Reason.UNKNOWN_MODEL: _unknown_model,
    Reason.NO_ENGINE: _no_engine,
    Reason.UNAVAILABLE: _unavailable,
    Reason.UNAFFORDABLE: _unaffordable,
})  # fmt: skip


def keys_awaited() -> Refused:
    message = "The token cannot be checked yet: the keys of its issuer are being read."
    return Refused(Outcome.UPSTREAM, message, retry_after=1.0, reason=ISSUER_KEYS)


def no_decider() -> Refused:
    """Refusal of a call whose relay reached no decider for as long as the call could wait."""
    return Refused(Outcome.NO_ENGINE, "Nobody could decide about this call in time; retry.", retry_after=SOON)


# -- calls that an engine was given ------------------------------------------------------------------------------------


def engine_failed(name: str, id: str, message: str, told: str, again: int | None = None) -> Refused:
    """An engine's failure. Its address, and `message` where that may hold one, are for the log. `again`: seconds of its
    own Retry-After."""
    detail = f"Engine {id} failed: {message}."
    return Refused(Outcome.UPSTREAM, f"Engine {name} failed: {told}.", retry_after=again or SOON, detail=detail)


def wrong_answer(message: str, detail: str = "") -> Refused:
    """An engine's answer that cannot be passed on."""
    return Refused(Outcome.UPSTREAM, message, retry_after=SOON, detail=detail)


def no_first_byte() -> Refused:
    return Refused(Outcome.EXPIRED, "The deadline passed before the engine's first byte.")


def cut_by_deadline() -> Refused:
    return Refused(Outcome.EXPIRED, "The deadline passed before the end of the answer.")


def cut_by_drain() -> Refused:
    return Refused(Outcome.DRAINING, "This gateway is shutting down.", retry_after=SOON)


def bug(request_id: str) -> Refused:
    return Refused(Outcome.BUG, f"This is a bug in the gateway. Please report request id {request_id}.")


def no_room_for_copy() -> Refused:
    """A mirrored copy found no room at once: it waits for nobody."""
    return Refused(Outcome.QUEUE_FULL, "No engine had room at once for this copy of a call, so it was dropped.")


# -- a tenant's own words ---------------------------------------------------------------------------------------------

_PLACEHOLDER = re.compile(r"\{(tenant|class|model|limit|retry_after|request_id)\}")


def own_words(
    template: Refusal, refused: Refused, *, tenant: str, class_name: str, model: str, request_id: str
) -> bytes:
    """JSON for a tenant's callers instead of OpenAI's error object: the template with its placeholders filled in.
    `{retry_after}` is whole seconds, `-` where a retry cannot help.

    Only text is filled in, in one pass: what a client put into a name is data, also where it looks like a placeholder.
    """
    words = {"tenant": tenant, "class": class_name, "model": model, "limit": refused.limit, "request_id": request_id}
    words["retry_after"] = "-" if refused.retry_after is None else str(math.ceil(refused.retry_after))

    def filled(value: Any) -> Any:
        if isinstance(value, str):
            return _PLACEHOLDER.sub(lambda found: words[found[1]], value)
        if isinstance(value, dict):
            return {name: filled(item) for name, item in value.items()}
        return [filled(item) for item in value] if isinstance(value, list) else value

    return msgspec.json.encode(filled(template.body))
