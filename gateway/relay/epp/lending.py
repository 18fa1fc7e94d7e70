"""Lending of a grant: a proxy elsewhere forwards the call, and its stream reports the first byte and the end.

It is the pipeline's exchange for calls of an endpoint picker, as `forwarding.py` is for those of the data port. All
before the grant and all after the answer's end is the same code. There is one attempt, and no second one beside it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal

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
from gateway.relay.heads import answer_lines, engine_lines
from gateway.relay.settling import TokenCounts, note_grant, settle, settle_unanswered
from gateway.relay.wire.server import Request, Responder

# Before the answer's head: no connection, no answer in time, a connection that broke. After it: the engine's answer
# broke off. Either: the client has left.
Failure = Literal["connect", "timeout", "reset", "truncated", "client_gone"]
Headers = list[tuple[bytes, bytes]]

GRACE = 1.0  # seconds for a report that is made in the last moment
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


class NoUsage(msgspec.Struct, frozen=True, gc=False):
    """TokenCounts of an answer that tells none."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


class EndReport(msgspec.Struct, frozen=True):
    """End of a lent call. `status`: of the engine's answer; None where there was none."""

    status: int | None
    failure: Failure | None = None
    usage: TokenCounts = NoUsage()


class LentAnswer(msgspec.Struct, frozen=True, gc=False):
    """An EndedAnswer, as in settling.py, of which nothing was seen here."""

    outcome: Outcome
    status: int
    usage: TokenCounts
    detail: str = ""
    reads: int = 0
    held_up: bool = True

    @property
    def told(self) -> bool:
        return self.usage.prompt_tokens is not None


class LentCall:
    """Call that a proxy forwards. `by` and `until`: when its first byte and its end must have been reported, in the
    loop's time.

    `ended` is the report, or None once the time is over. `began` is called once, with the first byte, and `begun` is
    then true.
    """

    def __init__(self, by: float, until: float, began: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[EndReport | None] = self._loop.create_future()
        self.by = by
        self.until = until
        self._began = began
        self.begun = False
        self._timer = self._loop.call_at(min(by, until) + GRACE, self._over)

    def first_byte(self) -> None:
        """The engine's answer has begun; a second time changes nothing."""
        if self.begun:
            return
        self.begun = True
        self._timer.cancel()
        self._timer = self._loop.call_at(self.until + GRACE, self._over)
        self._began()

    def end(self, report: EndReport) -> None:
        """End the call; a second report changes nothing."""
        if not self.ended.done():
            self.ended.set_result(report)

    def close(self) -> None:
        self._timer.cancel()

    def _over(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


class LentGrant(msgspec.Struct, frozen=True):
    """Granted call for its proxy. `body` None: the client's own may be sent unchanged. `hides_usage`: the client did
    not ask for the usage event of its stream."""

    call: LentCall
    url: str
    for_engine: Headers  # headers that the engine is to be sent, its key included
    for_client: Headers  # headers of the answer to the client
    body: bytes | None
    hides_usage: bool


class Lending:
    """`upstream` knows the engines by id, `current` is the policy of new calls."""

    def __init__(
        self, decider: Decider, upstream: Callable[[str], Upstream], current: Current, clock: Callable[[], float]
    ) -> None:
        self._decider = decider
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
        """Lend the grant, wait for the report of the call's end, settle it. Raises Refused."""
        record, now = live.record, self._clock()
        note_grant(record, call, grant, now)
        record.attempts, record.engine, call.sent_at = 1, grant.engine.id, now
        within = patience(call, grant, self._current.policy)

        def began() -> None:
            at = self._clock()
            record.ttft = at - request.at
            grant.first_byte(at)

        lent = LentCall(now + within, call.deadline, began)
        try:
            request.lent = self._lend(lent, request, live, call, admission, grant)
            responder.send(200, b"", b"")
            call.body = b""
            request.release()
            try:
                report = await lent.ended
            except asyncio.CancelledError:
                if lent.ended.cancelled():
                    self._settle(None, call, admission, grant, lent, record)
                    raise
                report = lent.ended.result()  # it came in this turn of the loop
            if report is None:
                record.reason = EXPIRED
            elif report.failure == "client_gone":
                record.reason = report.failure
            elif report.status is None or report.status >= 500 or report.status in MISPLACED:
                refused = self._failed(report, call, grant)
                settle_unanswered(call, admission, record, self._clock(), pace=grant.pace, since=grant.hold.taken_at)
                raise refused
            elif report.status < 400:
                lent.first_byte()  # a whole answer's comes with its last
            self._settle(report, call, admission, grant, lent, record)
        finally:
            lent.close()

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
        self, report: EndReport | None, call: Call, admission: Admission, grant: Grant, lent: LentCall, record: Record
    ) -> None:
        """Settle a lent call by its report; None: no report came in time, or before this gateway ended."""
        status = None if report is None else report.status
        if status is not None:
            grant.answered(status)
        elif not lent.begun:
            settle_unanswered(call, admission, record, self._clock(), pace=grant.pace, since=grant.hold.taken_at)
            record.outcome, record.status = Outcome.CLIENT_GONE, 499
            return
        now = self._clock()
        ended = LentAnswer(_outcome(report), status or 200, NoUsage() if report is None else report.usage)
        settle(call, grant, admission, ended, now, record, self._decider, now)
        if record.outcome is Outcome.CLIENT_GONE:
            record.status = 499

    def _lend(
        self, lent: LentCall, request: Request, live: ActiveCall, call: Call, admission: Admission, grant: Grant
    ) -> LentGrant:
        """Tell the proxy what to send, and where."""
        upstream = self._upstream(grant.engine.id)
        own = live.unchanged and not call.shaped and not grant.priority
        body = shape_body(call.body, call.route.kind, call.shaped) if call.shaped else call.body
        content_type = request.fields.get(b"content-type", b"application/json")
        to_engine = engine_lines(request, call, live.record)
        if grant.priority:
            to_engine, body = with_priority(to_engine, body, call.route, grant.priority)
        if upstream.key is not None:
            to_engine += b"authorization: Bearer %b\r\n" % upstream.key.encode()
        to_client = answer_lines(call, admission, live.record, grant.engine.name, content_type)
        return LentGrant(
            lent,
            upstream.url,
            headers_of(to_engine),
            [each for each in headers_of(to_client) if each[0] != b"content-type"],
            None if own else body,
            call.stream and call.route.usage_option and not call.wants_usage,
        )


def headers_of(lines: bytes) -> Headers:
    """Headers of preformatted lines."""
    return [(name, value) for name, _, value in (line.partition(b": ") for line in lines.splitlines())]


def _outcome(report: EndReport | None) -> Outcome:
    if report is None or report.failure == "client_gone":
        return Outcome.CLIENT_GONE
    if report.failure == "truncated":
        return Outcome.TRUNCATED
    return Outcome.OK if report.status is not None and report.status < 400 else Outcome.ENGINE_REFUSED
