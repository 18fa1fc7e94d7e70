"""Settlement of a call whose answer has ended: outcome, token counts, charge, and the estimates of later calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from gateway.core.admission.decider import Admission, Decider, Grant
from gateway.core.answer.json_usage import JSONUsage
from gateway.core.answer.sse_usage import SSEUsage
from gateway.core.engines.breaker import Ending
from gateway.core.request.call import Call
from gateway.core.request.outcome import OK, Outcome
from gateway.core.request.record import Record
from gateway.core.request.settlement import clamped_usage, possible_output

if TYPE_CHECKING:
    from gateway.relay.answer import Relay
    from gateway.relay.epp.lending import LentAnswer

AnswerUsage: TypeAlias = SSEUsage | JSONUsage  # reader of the token numbers that an engine reports
TOO_BUSY = 429  # status of an engine that has read nothing of a call


def note_grant(record: Record, call: Call, grant: Grant, now: float) -> None:
    """The record of a call that has an engine now."""
    record.queue = now - call.arrived
    if call.predicted_wait:
        record.predicted_wait = call.predicted_wait
    record.affinity_tokens = grant.cached
    record.held_tokens = grant.hold.tokens
    if call.shaped:
        record.shaped_tokens = (call.asked - call.shaped) * call.n


def settle_unanswered(
    call: Call, admission: Admission, record: Record, now: float, *, pace: float = 0.0, since: float | None = None
) -> None:
    """Charge a call without an answer for the engine's work, however the call ended. Without an engine, or after the
    engine's failure, the charge stays open for a refund. `since`: when the engine began, which writes at `pace` seconds
    a token; None: nothing was written. A stream's first token is its first byte; of a whole answer nothing is seen
    before its last."""
    if call.sent_at is not None:
        written = 0 if since is None or call.stream else possible_output(call, 0, now - since, pace)
        record.completion_tokens = written
        admission.settle(call.prompt_tokens + written, now)


def settle(
    call: Call,
    grant: Grant,
    admission: Admission,
    answer: Relay | LentAnswer,
    heard_at: float,
    record: Record,
    decider: Decider,
    now: float,
) -> None:
    """The engine's own numbers replace the estimate, and teach it; a failed answer teaches nothing. `heard_at`: when
    the engine was read last."""
    record.outcome = outcome = answer.outcome
    record.status = answer.status
    if answer.detail and not record.reason:
        record.reason = answer.detail
    if outcome is not OK:
        if outcome in (Outcome.TRUNCATED, Outcome.UPSTREAM):
            grant.ending = Ending.FAILURE
        elif answer.status < 400:
            grant.ending = Ending.NEUTRAL  # the client left, or the engine has refused its request within a stream
    if outcome is Outcome.UPSTREAM and answer.status >= 500:
        return  # the engine has failed it: the charge stays open for a refund
    usage = answer.usage
    if call.route.counts:
        record.prompt_tokens = 0
        admission.settle(0, now)
        return
    if not (answer.told if call.stream else usage.prompt_tokens is not None):
        record.completion_tokens = 0 if answer.status >= 400 else _written(call, grant, answer, heard_at, record, now)
        grant.wrote(call.prompt_tokens + record.completion_tokens)
        read = 0 if answer.status == TOO_BUSY else call.prompt_tokens
        admission.settle(read + record.completion_tokens, now)
        return
    record.settled = True
    record.prompt_tokens, record.completion_tokens = clamped_usage(
        call, record.bytes_in, usage.prompt_tokens or 0, usage.completion_tokens or 0, decider.context
    )
    record.cached_tokens = min(record.prompt_tokens, usage.cached_tokens or 0)
    admission.settle(record.prompt_tokens + record.completion_tokens, now)
    if outcome is OK:
        decider.learn(call, record.prompt_tokens, record.completion_tokens)
        grant.finished(now, record.prompt_tokens, record.completion_tokens, usage.cached_tokens)
    else:
        grant.wrote(record.prompt_tokens + record.completion_tokens)


def _written(call: Call, grant: Grant, answer: Relay | LentAnswer, heard_at: float, record: Record, now: float) -> int:
    """Tokens that the engine can have written of an answer it did not tell the whole of."""
    pace, known = grant.pace, answer.usage.completion_tokens
    if not call.stream:
        return possible_output(call, 0, now - grant.hold.taken_at, pace)
    began = call.arrived + record.ttft
    if known is None or answer.held_up:  # what was read last may have been written long before
        return max(
            possible_output(call, 0, now - began, pace),
            possible_output(call, max(known or 0, answer.reads), 0.0, pace),
        )
    return possible_output(call, known, now - max(began, heard_at), pace)
