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
from gateway.core.answer.json_usage import JSONUsage
from gateway.core.policy.snapshot import Current
from gateway.core.request.call import Call
from gateway.core.request.engine_priority import with_priority
from gateway.core.request.outcome import Outcome, Refused
from gateway.core.request.record import Record
from gateway.relay.active_call import ActiveCall
from gateway.relay.attempts import EARLY, MISPLACED, answered, failure, patience
from gateway.relay.heads import answer_lines, engine_lines
from gateway.relay.settling import AnswerUsage, note_grant, settle, settle_unanswered
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


class EndReport(msgspec.Struct, frozen=True):
    """End of a lent call. `status`: of the engine's answer; None where there was none."""

    status: int | None
    failure: Failure | None = None
    usage: AnswerUsage = msgspec.field(default_factory=JSONUsage)


class LentAnswer(msgspec.Struct, frozen=True):
    """Answer of which nothing was seen here, as its settlement needs to know it."""

    outcome: Outcome
    status: int
    usage: AnswerUsage
    detail: str = ""
    reads: int = 0
    held_up: bool = True

    @property
    def told(self) -> bool:
        return self.usage.prompt_tokens is not None


class LentCall:
    """Granted call that a proxy forwards to the engine at `url`. `by` and `until`: when its first byte and its end must
    have been reported, in the loop's time.

    `ended` is the report; it is cancelled once the time is over. `began` is called once, with the first byte, and
    `begun` is then true.
    """

    def __init__(self, url: str, by: float, until: float, began: Callable[[], None]) -> None:
        self.ended: asyncio.Future[EndReport] = asyncio.get_running_loop().create_future()
        self.limit = asyncio.timeout_at(min(by, until) + GRACE)  # of the wait for it
        self.url = url
        self.by = by
        self.until = until
        self._began = began
        self.begun = False
        self.for_engine: Headers = []  # headers that the engine is to be sent, its key included
        self.for_client: Headers = []  # headers of the answer to the client
        self.body: bytes | None = None  # for the engine, where the client's own may not be sent unchanged
        self.hides_usage = False  # the client did not ask for the usage event of its stream

    def first_byte(self) -> None:
        """The engine's answer has begun; a second time changes nothing."""
        if not self.begun:
            self.begun = True
            if not self.ended.done():
                self.limit.reschedule(self.until + GRACE)
            self._began()

    def end(self, report: EndReport) -> None:
        """End the call; a second report changes nothing."""
        if not self.ended.done():
            self.ended.set_result(report)


class Lending(msgspec.Struct, eq=False):
    """`upstream` returns the URL and the key of an engine, `current` is the policy of new calls."""

    _decider: Decider
    _upstream: Callable[[str], tuple[str, str | None]]
    _current: Current
    _clock: Callable[[], float]

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

        url, key = self._upstream(grant.engine.id)
        lent = LentCall(url, now + within, call.deadline, began)
        _fill_in(lent, key, request, live, call, admission, grant)
        request.lent = lent
        responder.send(200, b"", b"")
        call.body = b""
        request.release()
        try:
            async with lent.limit:
                report: EndReport | None = await lent.ended
        except (TimeoutError, asyncio.CancelledError) as error:
            report = None if lent.ended.cancelled() else lent.ended.result()  # it came in this turn of the loop
            if report is None and isinstance(error, asyncio.CancelledError):
                self._settle(None, call, admission, grant, lent, record)
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
            lent.first_byte()  # a whole answer's comes with its last
        self._settle(report, call, admission, grant, lent, record)

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
        ended = LentAnswer(_outcome(report), status or 200, JSONUsage() if report is None else report.usage)
        settle(call, grant, admission, ended, now, record, self._decider, now)
        if record.outcome is Outcome.CLIENT_GONE:
            record.status = 499


def _fill_in(
    lent: LentCall,
    key: str | None,
    request: Request,
    live: ActiveCall,
    call: Call,
    admission: Admission,
    grant: Grant,
) -> None:
    """Tell the proxy what to send, with the engine's key."""
    body = shape_body(call.body, call.route.kind, call.shaped) if call.shaped else call.body
    to_engine = engine_lines(request, call, live.record)
    if grant.priority:
        to_engine, body = with_priority(to_engine, body, call.route, grant.priority)
    if key is not None:
        to_engine += b"authorization: Bearer %b\r\n" % key.encode()
    content_type = request.fields.get(b"content-type", b"application/json")
    to_client = answer_lines(call, admission, live.record, grant.engine.name, content_type)
    lent.for_engine = headers_of(to_engine)
    lent.for_client = [each for each in headers_of(to_client) if each[0] != b"content-type"]
    if not live.unchanged or call.shaped or grant.priority:
        lent.body = body
    lent.hides_usage = call.stream and call.route.usage_option and not call.wants_usage


def headers_of(lines: bytes) -> Headers:
    """Headers of preformatted lines."""
    return [(name, value) for name, _, value in (line.partition(b": ") for line in lines.splitlines())]


def _outcome(report: EndReport | None) -> Outcome:
    if report is None or report.failure == "client_gone":
        return Outcome.CLIENT_GONE
    if report.failure == "truncated":
        return Outcome.TRUNCATED
    return Outcome.OK if report.status is not None and report.status < 400 else Outcome.ENGINE_REFUSED
