"""Refusals and facts of a call as messages, and back."""

from __future__ import annotations

from gateway.core.request.call import Call
from gateway.core.request.outcome import Refused
from gateway.frames.messages import CallFacts, RefusedCall


def refusal_of(
    number: int, turn: int, refused: Refused, facts: CallFacts | None = None, predicted_wait: float = 0.0
) -> RefusedCall:
    """The message that has all of a refusal."""
    return RefusedCall(
        number,
        turn,
        refused.outcome,
        refused.message,
        refused.param,
        refused.code,
        refused.retry_after,
        refused.headers,
        refused.retry,
        refused.limit,
        refused.kept,
        refused.reason,
        refused.detail,
        refused.own,
        refused.jittered,
        facts,
        predicted_wait,
    )


def refused_of(refusal: RefusedCall) -> Refused:
    """The refusal that a message has."""
    refused = Refused(
        refusal.outcome,
        refusal.message,
        param=refusal.param,
        code=refusal.code,
        retry_after=refusal.retry_after,
        headers=refusal.headers,
        retry=refusal.retry,
        limit=refusal.limit,
        kept=refusal.kept,
        reason=refusal.reason,
        detail=refusal.detail,
    )
    refused.own, refused.jittered = refusal.own, refusal.jittered
    return refused


def facts_of(call: Call) -> CallFacts:
    """What is known of a call that was judged."""
    return CallFacts(
        call.class_name,
        call.deadline,
        call.ttft_by,
        call.prompt_tokens,
        call.asked,
        call.output_tokens,
        call.expected_tokens,
        call.model,
        call.likely_tokens,
    )


def fill_in(call: Call, facts: CallFacts) -> None:
    """The call as it was judged elsewhere."""
    call.class_name = facts.class_name
    call.deadline = facts.deadline
    call.ttft_by = facts.ttft_by
    call.prompt_tokens = facts.prompt_tokens
    call.asked = facts.asked
    call.output_tokens = facts.output_tokens
    call.expected_tokens = facts.expected_tokens
    call.model = facts.model
    call.likely_tokens = facts.likely_tokens
