"""Resync of a relay: what its calls hold as it connects is taken over, and what it does not report is released.

A relay that connects reports each grant it holds, then that this was all. Until then the calls of its connection before
are orphans: they keep what they hold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import asdict

from gateway.core.engines.choice import Choice
from gateway.core.engines.transfer import Prefill
from gateway.core.request.routes import Route
from gateway.decider.grant import LocalGrant
from gateway.decider.relays.served import ServedCall
from gateway.frames.calls import fill_in
from gateway.frames.messages import AllHeld, GrantTerms, Held

if TYPE_CHECKING:
    from gateway.decider.relays.hub import RelayHub

AGREE = 1.0  # seconds by which the time of one hold may differ for two machines


class Resync:
    """`calls`: of the relay's session, which restored calls join. `orphans`: calls of the relay's connection before
    this one, until it reports them. `done`: the relay has reported all that it holds."""

    def __init__(self, hub: RelayHub, calls: dict[int, ServedCall]) -> None:
        self.orphans: dict[int, ServedCall] = {}
        self.done = False
        self._hub = hub
        self._calls = calls
        self.last = 0  # the highest number that the relay is known to have given: it counts its calls up
        self._seconds: set[int] = set()  # calls for which it holds a second attempt too

    def is_over(self, number: int) -> bool:
        """Whether the call has ended, so that a question about it comes too late. It is none that is here."""
        return self.done and number <= self.last

    def asked_again(self, served: ServedCall) -> None:
        """Take over the charges of a call that an earlier decider, or connection, has let in."""
        kept = self.orphans.pop(served.ask.number, None)
        if kept is not None and served.ask.facts is not None:
            served.admission = kept.admission  # it stays charged
        elif kept is not None:
            kept.forgotten()
        if served.admission is None and served.ask.facts is not None:
            self._carry(served)

    def restore(self, held: Held, route: Route) -> None:
        """Take over the hold of a grant of an earlier decider's."""
        if self.done:
            return  # it was told on another connection
        ask, terms = held.ask, held.terms
        if held.second:
            self._seconds.add(ask.number)
        if self._keeps(held):
            return
        served = self._calls.get(ask.number)
        if served is None:
            served = self._calls[ask.number] = ServedCall(ask, route)
            fill_in(served.call, terms.facts)
            self._carry(served)
        if (served.second if held.second else served.grant) is not None:
            return
        fill_in(served.call, terms.facts)
        prefill = 0 if held.first_byte else terms.prefill
        engine = self._hub.engine_of(terms.engine.id, terms.engine.url)
        choice = Choice(engine=engine, prefill=prefill, cached=terms.cached, ttft=terms.expected)
        dispatch = self._hub.decider.dispatch
        grant = dispatch.restored(served.call, choice, terms.taken_at, held.first_byte)
        if held.second:
            served.second = grant
        else:
            served.grant = grant
            self._restore_half(grant, terms)

    def _restore_half(self, grant: LocalGrant, terms: GrantTerms) -> None:
        """Take over the hold of a prompt that another engine still reads."""
        plan = terms.elsewhere
        if plan is not None and plan.engine is not None:
            engine = self._hub.engine_of(plan.engine.id, plan.engine.url)
            grant.split(Prefill(**asdict(plan) | {"engine": engine}), terms.taken_at, restored=True)

    def _carry(self, served: ServedCall) -> None:
        """An earlier decider let it in: its tokens count in its tenant's quota here."""
        hub = self._hub
        served.admission = hub.decider.limits.carry(served.call.tenant, served.call.cost, hub.clock())

    def _keeps(self, held: Held) -> bool:
        """Whether this is a grant of this very decider's, which it has kept since the relay's last connection."""
        number = held.ask.number
        served = self.orphans.get(number) or self._calls.get(number)
        if served is None:
            return False
        first, second = served.grant, served.second
        if first is not None and second is not None and not held.second and _is_of(held, second):
            first.take(second)  # its relay has taken it, and the news of that was lost
            served.second = None
        grant = served.second if held.second else first
        if grant is None or not _is_of(held, grant):
            return False
        self._calls[number] = served
        self.orphans.pop(number, None)
        served.turn = held.ask.turn
        if held.terms.elsewhere is None and grant.half is not None:
            grant.half.close()  # the news of its end was lost
        if held.first_byte and grant.hold.awaited:
            grant.first_byte(held.first_byte)
        return True

    def finish(self, told: AllHeld) -> None:
        """Release what the relay has not reported. A call that is asked for again keeps its charges."""
        self.done, self.last, alive = True, told.last, set(told.alive)
        for number, served in self._calls.items():
            if served.second is not None and number not in self._seconds:
                served.second.close()
                served.second = None
        for number, served in list(self.orphans.items()):
            if number in self._calls:
                del self.orphans[number]
                served.forgotten()  # it holds something else
            elif number in alive:
                served.released()
            else:
                del self.orphans[number]
                served.lost()


def _is_of(held: Held, grant: LocalGrant) -> bool:
    """Whether it is this grant that a relay tells of."""
    hold, terms = grant.hold, held.terms
    return hold.live and grant.engine.id == terms.engine.id and abs(hold.taken_at - terms.taken_at) <= AGREE
