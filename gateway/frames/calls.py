"""Calls, grants and refusals as messages, and back. Fields cross by their names: none is copied by hand."""

from __future__ import annotations

from operator import attrgetter

from msgspec.structs import asdict, astuple

from gateway.core.engines.hold import Hold
from gateway.core.engines.transfer import Prefill
from gateway.core.request.call import Call
from gateway.core.request.outcome import Refused
from gateway.core.request.routes import Route
from gateway.frames import messages as frames

_FACTS = frames.CallFacts.__struct_fields__
_request_fields = attrgetter(
    *["route.path" if name == "route" else name for name in frames.CallRequest.__struct_fields__ if name != "body"]
)
_facts_fields = attrgetter(*_FACTS)
_engine_fields = attrgetter("id", "name", "url", "speed.tpot", "speed.pace")  # in the order of EngineTerms
_refusal_fields = attrgetter(*frames.RefusalFacts.__struct_fields__)


def ask_of(number: int, call: Call, version: int, *, wait: bool) -> frames.Ask:
    """Return the question about a call, by this version of the policy."""
    body = hash(call.body).to_bytes(8, "big", signed=True)
    return frames.Ask(number, frames.CallRequest(*(*_request_fields(call), body)), version, wait)


def call_of(ask: frames.Ask, route: Route) -> Call:
    """Return the call that a question is about. Its body is what stands for it."""
    fields = asdict(ask.call)
    fields["route"] = route
    call = Call(class_name=ask.call.asked_class or "default", **fields)
    if ask.facts is not None:
        fill_in(call, ask.facts)
    return call


def facts_of(call: Call) -> frames.CallFacts:
    """Return what is known of a call that was judged."""
    return frames.CallFacts(*_facts_fields(call))


def fill_in(call: Call, facts: frames.CallFacts) -> None:
    """Set what another process has found out about the call."""
    for name, value in zip(_FACTS, astuple(facts), strict=True):
        setattr(call, name, value)


def prefill_terms(plan: Prefill) -> frames.PrefillTerms:
    """Return the decision where a prompt is read, as its relay is told."""
    engine = None if plan.engine is None else frames.EngineTerms(*_engine_fields(plan.engine))
    return frames.PrefillTerms(**asdict(plan) | {"engine": engine})


def terms_of(number: int, turn: int, epoch: int, call: Call, hold: Hold) -> frames.GrantTerms:
    """Return the terms of a call's hold. What its prompt may find cached, and when, is for the caller to add."""
    engine = frames.EngineTerms(*_engine_fields(hold.engine))
    return frames.GrantTerms(
        number, turn, epoch, engine, hold.tokens, hold.taken_at, hold.prefill, cached=0, expected=0.0,
        facts=facts_of(call),
    )  # fmt: skip


def refusal_of(number: int, turn: int, refused: Refused, facts: frames.CallFacts | None = None) -> frames.RefusedCall:
    """Return the message that has all of a refusal."""
    return frames.RefusedCall(number, turn, frames.RefusalFacts(*_refusal_fields(refused)), facts)


def refused_of(message: frames.RefusedCall) -> Refused:
    """Return the refusal that a message has."""
    refused = Refused(message.refusal.outcome, message.refusal.message)
    vars(refused).update(asdict(message.refusal))
    return refused
