"""Calls, grants and refusals as messages, and back. Fields cross by their names: none is copied by hand."""

from __future__ import annotations

from operator import attrgetter

from msgspec.structs import asdict, astuple

from gateway.core.engines.hold import Hold
from gateway.core.engines.transfer import Prefill
from gateway.core.request.call import Call
from gateway.core.request.outcome import Refused
from gateway.core.request.routes import Route
from gateway.frames.messages import (
    Ask,
    CallFacts,
    CallRequest,
    EngineTerms,
    GrantTerms,
    PrefillTerms,
    RefusalFacts,
    RefusedCall,
)

_FACTS = CallFacts.__struct_fields__
_request_fields = attrgetter(
    *["route.path" if name == "route" else name for name in CallRequest.__struct_fields__ if name != "body"]
)
_facts_fields = attrgetter(*_FACTS)
_engine_fields = attrgetter("id", "name", "url", "speed.tpot", "speed.pace")  # in the order of EngineTerms
_refusal_fields = attrgetter(*RefusalFacts.__struct_fields__)


def ask_of(number: int, call: Call, version: int, *, wait: bool) -> Ask:
    """Return the question about a call, by this version of the policy."""
    body = hash(call.body).to_bytes(8, "big", signed=True)
    return Ask(number, CallRequest(*(*_request_fields(call), body)), version, wait)


def call_of(ask: Ask, route: Route) -> Call:
    """Return the call that a question is about. Its body is what stands for it."""
    fields = asdict(ask.call)
    fields["route"] = route
    call = Call(class_name=ask.call.asked_class or "default", **fields)
    if ask.facts is not None:
        fill_in(call, ask.facts)
    return call


def facts_of(call: Call) -> CallFacts:
    """Return what is known of a call that was judged."""
    return CallFacts(*_facts_fields(call))


def fill_in(call: Call, facts: CallFacts) -> None:
    """Set what another process has found out about the call."""
    for name, value in zip(_FACTS, astuple(facts), strict=True):
        setattr(call, name, value)


def prefill_terms(plan: Prefill) -> PrefillTerms:
    """Return the decision where a prompt is read, as its relay is told."""
    engine = None if plan.engine is None else EngineTerms(*_engine_fields(plan.engine))
    return PrefillTerms(engine, plan.reason, plan.here, plan.there, plan.within, plan.unread, plan.moved, plan.priority)


def terms_of(number: int, turn: int, epoch: int, call: Call, hold: Hold) -> GrantTerms:
    """Return the terms of a call's hold. What its prompt may find cached, and when, is for the caller to add."""
    engine = EngineTerms(*_engine_fields(hold.engine))
    return GrantTerms(
        number, turn, epoch, engine, hold.tokens, hold.taken_at, hold.prefill, cached=0, expected=0.0,
        facts=facts_of(call),
    )  # fmt: skip


def refusal_of(number: int, turn: int, refused: Refused, facts: CallFacts | None = None) -> RefusedCall:
    """Return the message that has all of a refusal."""
    return RefusedCall(number, turn, RefusalFacts(*_refusal_fields(refused)), facts)


def refused_of(message: RefusedCall) -> Refused:
    """Return the refusal that a message has."""
    refused = Refused(message.refusal.outcome, message.refusal.message)
    vars(refused).update(asdict(message.refusal))
    return refused
