"""Settlement of a call whose answer has ended: outcome, token counts, charge, and the estimates of later calls."""

from __future__ import annotations

from gateway.core.admission.decider import Admission, Decider, Grant
from gateway.core.engines.breaker import Ending
from gateway.core.request.call import Call
from gateway.core.request.outcome import Outcome
from gateway.core.request.record import Record
from gateway.core.request.settlement import clamped_usage, possible_output
from gateway.relay.answer import Relay
from gateway.upstream.client import Reply


def settle_unanswered(call: Call, admission: Admission, record: Record, wrote: int, now: float) -> None:
    """Nothing came of the call. What an engine was made to do is charged all the same, however it was ended; if
    that was by the engine's failure, or none had it, the charge is left to be refunded."""
    if call.sent_at is not None:
        record.completion_tokens = wrote
        admission.settle(call.prompt_tokens + wrote, now)


def settle(
    call: Call,
    grant: Grant,
    admission: Admission,
    relay: Relay,
    reply: Reply,
    record: Record,
    decider: Decider,
    now: float,
) -> None:
    """The engine's own numbers replace the estimate, and teach it; a failed answer teaches nothing."""
    record.outcome = relay.outcome
    record.status = relay.status
    record.reason = record.reason or relay.detail
    if relay.outcome in (Outcome.TRUNCATED, Outcome.UPSTREAM):
        grant.ending = Ending.FAILURE
    elif relay.outcome is not Outcome.OK and relay.status < 400:
        grant.ending = Ending.NEUTRAL  # the client left
    usage = relay.usage
    if not (relay.told if call.stream else usage.prompt_tokens is not None):
        record.completion_tokens = 0 if relay.status >= 400 else _written(call, grant, relay, reply, record, now)
        admission.settle(call.prompt_tokens + record.completion_tokens, now)
        return
    record.settled = True
    record.prompt_tokens, record.completion_tokens = clamped_usage(
        call, record.bytes_in, usage.prompt_tokens or 0, usage.completion_tokens or 0, decider.context
    )
    record.cached_tokens = usage.cached_tokens or 0
    admission.settle(record.prompt_tokens + record.completion_tokens, now)
    if relay.outcome is Outcome.OK:
        decider.learn(call, record.prompt_tokens, record.completion_tokens)
        grant.finished(now, record.prompt_tokens, record.completion_tokens)


def _written(call: Call, grant: Grant, relay: Relay, reply: Reply, record: Record, now: float) -> int:
    """Tokens that the engine can have written of an answer it did not tell the whole of."""
    pace, known = grant.engine.pace, relay.usage.completion_tokens
    if not call.stream:
        return possible_output(call, 0, now - grant.hold.taken_at, pace)
    began = call.arrived + record.ttft
    if known is None or relay.held_up:  # what was read last may have been written long before
        return max(
            possible_output(call, 0, now - began, pace),
            possible_output(call, max(known or 0, relay.reads), 0.0, pace),
        )
    return possible_output(call, known, now - max(began, reply.heard_at), pace)
