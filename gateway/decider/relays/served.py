"""Call of a relay, as its decider keeps it: the call without its body, its admission, its grants, its wait."""

from __future__ import annotations

import asyncio

from gateway.core.admission import refusals
from gateway.core.admission.limits import Charge
from gateway.core.engines.breaker import Ending
from gateway.core.policy.snapshot import Snapshot
from gateway.core.request.outcome import Outcome, Refused
from gateway.core.request.record import Record
from gateway.core.request.routes import Route
from gateway.decider.grant import LocalGrant
from gateway.decider.local import LocalAdmission
from gateway.decider.waiting import QueuePlace
from gateway.frames.calls import call_of, prefill_terms, terms_of
from gateway.frames.messages import Ask, CallEnd, GrantTerms, Left


class ServedCall:
    """`turn`: of the last question about it. `place`: in a queue, if it waits for its turn; `task`: what it waits for
    otherwise."""

    __slots__ = ("admission", "ask", "attempts", "call", "grant", "place", "record", "second", "task", "turn")

    def __init__(self, ask: Ask, route: Route) -> None:
        self.ask = ask
        self.call = call_of(ask, route)
        self.record = Record(request_id=ask.call.request_id, route=route.path, tenant=ask.call.tenant)
        self.turn = ask.turn
        self.attempts = 0
        self.admission: LocalAdmission | Charge | None = None  # a charge: an earlier decider has let the call in
        self.grant: LocalGrant | None = None
        self.second: LocalGrant | None = None
        self.place: QueuePlace | None = None
        self.task: asyncio.Task[None] | None = None

    def go_by(self, snapshot: Snapshot) -> None:
        """Judge the call by this policy. A class that only an earlier decider's policy has counts as not asked for."""
        call = self.call
        call.class_name = snapshot.classes.known(call.asked_class)
        if call.class_name != call.asked_class:
            call.asked_class = ""

    def terms(self, grant: LocalGrant, turn: int, epoch: int, hedge_after: float | None, now: float) -> GrantTerms:
        """Terms of the grant, as sent to its relay."""
        terms = terms_of(self.ask.number, turn, epoch, self.call, grant.hold)
        terms.cached, terms.expected, terms.hedge_after = grant.cached, grant.expected, hedge_after
        terms.lines = b"" if self.admission is None else self.admission.headers(now)
        terms.second, terms.priority = grant is self.second, grant.priority
        terms.elsewhere = None if grant.prefill is None else prefill_terms(grant.prefill)
        return terms

    def ended(self, end: CallEnd) -> None:
        """Give back all that it holds, as its end says."""
        grant, admission = self.grant, self.admission
        if grant is not None and end.first_byte is not None:
            grant.first_byte(end.first_byte)
        if admission is not None and end.tokens is not None:
            admission.settle(end.tokens, end.at)
        if grant is not None:
            if end.finished is not None:
                grant.finished(end.at, *end.finished)
            elif end.wrote is not None:
                grant.wrote(end.wrote)
            if end.ending is not None:
                grant.ending = end.ending
        self._leave(error_of(end.left, end.outcome))

    def waits_no_more(self) -> None:
        """Give up its place in a queue, or whatever it waits for."""
        place, self.place = self.place, None
        if place is not None:
            place.leave()
        if self.task is not None:
            self.task.cancel()
            self.task = None

    def released(self) -> None:
        """Give back its holds, and its place in a queue."""
        self.waits_no_more()
        for grant in (self.second, self.grant):
            if grant is not None:
                grant.close()

    def lost(self) -> None:
        """Give everything back: the call has ended, and nobody has reported how."""
        self.given_back(asyncio.CancelledError())

    def forgotten(self) -> None:
        """Give everything back, charges too: the relay is gone, or asks for the call once more."""
        self.given_back(refusals.no_decider())

    def given_back(self, error: BaseException) -> None:
        """End the call with this error, which says nothing about its engine."""
        if self.grant is not None:
            self.grant.ending = Ending.NEUTRAL
        self._leave(error)

    def _leave(self, error: BaseException | None) -> None:
        self.released()
        if self.admission is not None:
            self.admission.__exit__(None if error is None else type(error), error, None)


def error_of(left: Left, outcome: Outcome) -> BaseException | None:
    """An exception of the kind that the relay has met."""
    match left:
        case "":
            return None
        case "refused":
            return Refused(outcome, "")
        case "error":
            return RuntimeError("a bug in the relay, which has told of it")
        case "cancelled":
            return asyncio.CancelledError()
