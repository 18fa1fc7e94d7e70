"""Lending of a grant: a proxy elsewhere forwards the call, and reports its first byte and its end.

It is the pipeline's exchange for calls of the decide port, as `forwarding.py` is for those of the data port. All before
the grant and all after the answer's end is the same code. There is one attempt, and no second one beside it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from gateway.core.admission import refusals
from gateway.core.admission.decider import Admission, Decider, Grant
from gateway.core.admission.shaping import shape_body
from gateway.core.policy.snapshot import Current
from gateway.core.request.call import Call
from gateway.core.request.engine_priority import with_priority
from gateway.core.request.outcome import Outcome, Refused
from gateway.core.request.record import Record
from gateway.relay.active_call import ActiveCall
from gateway.relay.attempts import EARLY, MISPLACED, answered, failure, patience
from gateway.relay.decide.held_calls import HOLD, HeldCall, HeldCalls
from gateway.relay.decide.messages import EndReport
from gateway.relay.heads import answer_lines, engine_lines
from gateway.relay.settling import note_grant, settle, settle_unanswered
from gateway.relay.wire.server import Request, Responder

TO_ENGINE = b"x-weir-set-"  # before each header that the engine is to be sent
EXPIRED = "hold_expired"  # why a call has ended that its proxy said nothing of
# Of each failure before an answer: its reason (trouble.REASONS), and words for operators.
MET = {
    "connect": ("unreachable", "the proxy could not connect"),
    "timeout": ("timeout", "no answer came in time"),
    "reset": ("reset", "the connection was reset"),
}


class Upstream(msgspec.Struct, frozen=True, gc=False):
    """Engine that a proxy sends a call to: its URL, and the key to show."""

    url: str
    key: str | None


class LentAnswer(msgspec.Struct, frozen=True, gc=False):
    """An EndedAnswer, as in settling.py, of which nothing was seen here."""

    outcome: Outcome
    status: int
    usage: LentUsage
    detail: str = ""
    reads: int = 0
    held_up: bool = True

    @property
    def told(self) -> bool:
        return self.usage.prompt_tokens is not None and self.usage.completion_tokens is not None


class LentUsage(msgspec.Struct, frozen=True, gc=False):
    """Token numbers that a proxy has passed on."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


class Lending:
    """`upstream` knows the engines by id, `current` is the policy of new calls."""

    def __init__(
        self,
        decider: Decider,
        held: HeldCalls,
        upstream: Callable[[str], Upstream],
        current: Current,
        clock: Callable[[], float],
    ) -> None:
        self._decider = decider
        self._held = held
        self._upstream = upstream
        self._current = current
        self._clock = clock

    async def exchange(
        self,
        request: Request,
        responder: Responder,
        live: ActiveCall,
        call: Call,
        admission: Admission,
        grant: Grant,
    ) -> None:
        """Answer with the grant, wait for the report of the call's end, settle it. Raises Refused."""
        record, now = live.record, self._clock()
        note_grant(record, call, grant, now)
        record.attempts, record.engine, call.sent_at = 1, grant.engine.id, now
        within = patience(call, grant, self._current.policy)

        def began() -> None:
            at = self._clock()
            record.ttft = at - request.at
            grant.first_byte(at)

        with self._held.held(HeldCall(request.fields.get(HOLD), now + within, call.deadline, began)) as held:
            until_first_byte = max(0.0, min(within, call.deadline - now))
            self._answer(held, request, responder, live, call, admission, grant, until_first_byte)
            call.body = b""
            request.release()
            try:
                report = await held.ended
            except asyncio.CancelledError:
                self._settle(None, call, admission, grant, held, record)
                raise
            if report is None:
                record.reason = EXPIRED
            elif report.failure == "client_gone":
                record.reason = report.failure
            elif report.status is None or report.status >= 500 or report.status in MISPLACED:
                refused = self._failed(report, call, grant)
                settle_unanswered(call, admission, record, self._clock(), pace=grant.pace, since=grant.hold.taken_at)
                raise refused
            elif report.status < 400:
                held.first_byte()  # a whole answer's comes with its last
            self._settle(report, call, admission, grant, held, record)

    def _failed(self, report: EndReport, call: Call, grant: Grant) -> Refused:
        """The engine has failed, and nothing of its answer was of use."""
        if report.status is not None:
            message = answered(grant, report.status)
        else:
            kind = report.failure or "reset"
            reason, message = MET[kind]
            over = self._clock() + EARLY >= call.deadline
            grant.failed(kind, message, reason, over=over)
            if kind == "timeout" and over:  # it was at work
                return refusals.no_first_byte()
        call.sent_at = None
        return failure(grant.engine, message, message)

    def _settle(
        self, report: EndReport | None, call: Call, admission: Admission, grant: Grant, held: HeldCall, record: Record
    ) -> None:
        """Settle a lent call by its report; None: no report came in time, or before this gateway ended."""
        status = None if report is None else report.status
        if status is not None:
            grant.answered(status)
        elif not held.begun:
            settle_unanswered(call, admission, record, self._clock(), pace=grant.pace, since=grant.hold.taken_at)
            record.outcome, record.status = Outcome.CLIENT_GONE, 499
            return
        usage = LentUsage()
        if report is not None and report.usage is not None:
            usage = LentUsage(*report.usage.read())
        now = self._clock()
        settle(
            call, grant, admission, LentAnswer(_outcome(report), status or 200, usage), now, record, self._decider, now
        )
        if record.outcome is Outcome.CLIENT_GONE:
            record.status = 499

    def _answer(
        self,
        held: HeldCall,
        request: Request,
        responder: Responder,
        live: ActiveCall,
        call: Call,
        admission: Admission,
        grant: Grant,
        within: float,
    ) -> None:
        """Answer the proxy with the grant: 200 with the body for the engine, or 204 if that is the client's own body.
        `within`: seconds until the first byte."""
        upstream = self._upstream(grant.engine.id)
        own = live.unchanged and not call.shaped and not grant.priority
        body = b"" if own else shape_body(call.body, call.route.kind, call.shaped) if call.shaped else call.body
        content_type = request.fields.get(b"content-type", b"application/json")
        left = max(0.0, call.deadline - self._clock())
        lines = b"%b: %b\r\nx-weir-upstream: %b\r\nx-weir-first-byte-within: %.3f\r\nx-weir-end-within: %.3f\r\n" % (
            HOLD, held.id.encode(), upstream.url.encode(), within, left,
        )  # fmt: skip
        if call.stream and call.route.usage_option and not call.wants_usage:
            lines += b"x-weir-hide-usage: true\r\n"
        to_engine = engine_lines(request, call, live.record)
        if grant.priority:
            to_engine, body = with_priority(to_engine, body, call.route, grant.priority)
        if upstream.key is not None:
            to_engine += b"authorization: Bearer %b\r\n" % upstream.key.encode()
        lines += b"".join([TO_ENGINE + line for line in to_engine.splitlines(keepends=True)])
        lines += answer_lines(call, admission, live.record, grant.engine.name, content_type)
        responder.send(204 if own else 200, lines, body)


def _outcome(report: EndReport | None) -> Outcome:
    if report is None or report.failure == "client_gone":
        return Outcome.CLIENT_GONE
    if report.failure == "truncated":
        return Outcome.TRUNCATED
    return Outcome.OK if report.status is not None and report.status < 400 else Outcome.ENGINE_REFUSED
