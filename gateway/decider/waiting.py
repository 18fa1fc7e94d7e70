"""Calls that wait: their places in the queues, their turns, and the pump that grants or refuses them in order.

`pump` is the single writer of queues and of waiting calls' holds. It is synchronous, hence atomic in one event loop: no
locks, no sweepers. Leaving a queue, cancelled, refused or expired, gives back what the call has there.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING

from gateway.core.admission import refusals
from gateway.core.admission.bookings import HORIZON
from gateway.core.admission.decision import KEPT, WANT_OF_ROOM, Reason, Refuse
from gateway.core.admission.queues import Queues, Ticket
from gateway.core.engines.choice import Aside, Choice
from gateway.core.engines.engine import Engine
from gateway.core.request.call import Call
from gateway.core.request.outcome import Refused
from gateway.core.request.tenants import MIRROR
from gateway.decider.model_waits import LOOK_AGAIN, ModelWaits
from gateway.decider.successor import HandedOver, Successor

if TYPE_CHECKING:
    from gateway.decider.dispatch import Dispatch
    from gateway.decider.grant import LocalGrant


class QueuePlace:
    """A waiting call's place: `turn` is its grant, or the refusal. `ticket` is another once the call has got another of
    its route's models."""

    __slots__ = ("_waiting", "ticket", "turn")

    def __init__(self, waiting: WaitingCalls, ticket: Ticket, turn: asyncio.Future[LocalGrant]) -> None:
        self._waiting = waiting
        self.ticket = ticket
        self.turn = turn

    def leave(self) -> None:
        """Give it up, also in the very moment of its grant."""
        self._waiting.leave(self)


class WaitingCalls:
    """Calls that wait for a grant of `dispatch`. `turns`: their places. `wake` and `woken`: see ModelWaits."""

    def __init__(
        self, dispatch: Dispatch, wake: Callable[[str, float], None], woken: Callable[[str, float], None]
    ) -> None:
        self._dispatch = dispatch
        self._control = control = dispatch.control
        self.turns: dict[Ticket, QueuePlace] = {}
        self.expiries = Expiries(self._expire)
        self.for_models = ModelWaits(control, self._pump_model, wake, woken)
        self._late: list[tuple[Ticket, Refuse]] = []  # met by the pump, to be shed

    # -- entering -----------------------------------------------------------------------------------------------

    def queue(self, call: Call, exclude: frozenset[str], *, front: bool = False) -> QueuePlace:
        """A place in the class's queue, which is to be left if nobody waits for its turn any more. Raises Refused."""
        if call.tenant == MIRROR:
            raise refusals.no_room_for_copy()
        turn: asyncio.Future[LocalGrant] = asyncio.get_running_loop().create_future()
        place = QueuePlace(self, self._ticket(call, exclude, front=front), turn)
        self._push(place, front=front)
        return place

    def _ticket(self, call: Call, exclude: frozenset[str], *, front: bool) -> Ticket:
        """The call's place, which is not in its queue yet. Raises Refused."""
        now, witness = self._dispatch.clock(), self._dispatch.witness
        if witness is not None:
            witness.entering(call, exclude, front=front)
        call.class_name = self._control.rules.classes.known(call.class_name)
        try:
            return self._admitted(call, exclude, now, front=front)
        except Refused as refused:
            if witness is not None:
                witness.refused(call, refused)
            raise

    def _admitted(self, call: Call, exclude: frozenset[str], now: float, *, front: bool) -> Ticket:
        """Obey the decision whether the call may wait: it gets its ticket, or a refusal and a booking."""
        control = self._control
        known = control.traffic.get(call.model)
        if known is not None:
            known.advance(now)
        control.outages.look(call.model, now)
        decision = control.to_wait(call, now, exclude, front=front)
        if decision.predicted is not None:
            call.predicted_wait = decision.predicted
        if decision.newcomer:
            control.workload.open(call.model, now)[1].offered(call, now)
        if decision.booking is not None:
            control.traffic[call.model].bookings[call.class_name].claim(call)
        if decision.outlook is not None:
            control.sidecars.wanted(decision.outlook, now)
        if isinstance(decision, Refuse):
            if decision.reason is Reason.NOT_READY:
                self.for_models.wake(call.model, decision.foretold.ready)  # it is told when to come back
            raise self._refusal(call, decision, now)
        control.workload.open(call.model, now)
        if decision.victim is not None:
            self.refuse(decision.victim, Refuse(reason=Reason.DISPLACED, words=call.class_name), now)
        if decision.outlook is not None:
            self.for_models.begin(decision.ticket, decision.outlook, now, front=front)
        elif decision.held:
            self.for_models.since[decision.ticket] = now
        return decision.ticket

    def _refusal(self, call: Call, why: Refuse, now: float) -> Refused:
        """Return the call's refusal, with a booking if its reason has one."""
        due_in = None
        if why.reason in WANT_OF_ROOM and self._control.workload.may_run(call.class_name):
            self._control.workload.open(call.model, now)[1].scaling.refused += call.cost
        if why.reason in KEPT:
            queues, traffic = self._control.workload.open(call.model, now)
            ready_in = 0.0 if why.outlook is None else why.outlook.ready_in or 0.0
            due_in = traffic.book(queues, call, now, ready_in)
            traffic.turned_away(call.class_name, HORIZON if due_in is None else due_in, now)
        return refusals.refused(why, call, now, due_in)

    def _push(self, place: QueuePlace, *, front: bool = False) -> None:
        """Put the place's call into its queue."""
        ticket, witness = place.ticket, self._dispatch.witness
        model = ticket.call.model
        self.turns[ticket] = place
        queues = self._control.queues[model]
        if witness is not None:
            witness.pushing(queues, ticket, front=front)
        queues.push(ticket, front=front)
        self.expiries.add(ticket)
        self.pump(model, queues)

    # -- the pump -----------------------------------------------------------------------------------------------

    def _pump_model(self, model: str) -> None:
        self.pump(model, self._control.queues[model])

    def pump(self, model: str, queues: Queues, *, once: bool = False) -> bool:
        """Grant, in order, the calls of a model that may go now (`once`: one of them), and refuse those that are too
        late. Return whether any was granted."""
        dispatch = self._dispatch
        if dispatch.successor is not None:
            return False
        now, rng, witness = dispatch.clock(), dispatch.rng, dispatch.witness
        choices: list[Choice] = []
        aside: list[Ticket] = []
        granted = False
        late, decide = self._late, self._control.decide_waiting
        self.for_models.forget_look(model)

        def fits(ticket: Ticket) -> bool:
            choice = decide(ticket, queues, now, rng)
            ticket.aside = isinstance(choice, Aside)
            if isinstance(choice, Aside):
                aside.append(ticket)
            elif isinstance(choice, Refuse):
                late.append((ticket, choice))
            else:
                if choice is None or choice.others_full:
                    dispatch.press(ticket.call)
                if choice is not None:
                    choices.append(choice)
                    return True
            return False

        while queues and now < dispatch.lease_until and not (once and granted):
            paused = self._control.workload.paused()
            if witness is not None:
                witness.popping(model, queues, now, paused)
            ticket = queues.pop(fits, now, paused)
            if witness is not None:
                witness.popped(model, ticket)
            if ticket is not None:
                self._grant(ticket, choices.pop(), now)
                granted = True
            elif not late:
                if not dispatch.fleet.serves(model):
                    self.refuse_unserved(self.for_models.unservable(model, queues, now), now)
                break
            while late:
                ticket, why = late.pop()
                self.refuse(ticket, why, now)
        if aside and queues:
            self.for_models.look_again(model, now + LOOK_AGAIN)
        self.expiries.arm(len(self.turns))
        return granted

    def _grant(self, ticket: Ticket, choice: Choice, now: float) -> None:
        """Grant a ticket that has left its queue, and count the grant as its model's turn."""
        turn, call, engine = self.turns.pop(ticket).turn, ticket.call, choice.engine
        if self.for_models.since:
            self.for_models.end(ticket, now)
        if not turn.done():  # else its task is cancelled and has not run yet
            turn.set_result(self._dispatch.grant(call, choice, now, ticket, ticket.exclude))
        if len(engine.models) > 1:
            weight = self._control.rules.policy.classes[call.class_name].weight
            engine.model_turns.take(call.model, ticket.cost / weight)

    def pump_each(self, engines: Collection[Engine]) -> None:
        """Pump the queues of these engines' models. Where calls of several wait for one engine (adapters, other names),
        these take turns, one call at a time: else the first to be pumped takes all the room that there is."""
        known = self._control.queues
        waiting = {model: queues for each in engines for model in each.models if (queues := known.get(model))}
        for engine in engines if len(waiting) > 1 else ():
            turns, paused, now = engine.model_turns, self._control.workload.paused(), self._dispatch.clock()
            while len(models := [model for model in engine.models if waiting.get(model)]) > 1:
                for model in sorted(models, key=lambda name: (*waiting[name].rank(now, paused), turns.counter(name))):
                    if self.pump(model, waiting[model], once=True):
                        break
                    del waiting[model]  # nor does any other engine have room for it
        for model, queues in waiting.items():
            self.pump(model, queues)

    def pump_unserved(self) -> None:
        """Pump the queues of models that no engine has any more: their calls are refused, or a sidecar is asked."""
        if self.turns:
            for model, queues in list(self._control.queues.items()):  # a call may go to a model that nobody waited for
                if queues and not self._dispatch.fleet.serving(model):
                    self.pump(model, queues)

    def reconsider(self, model: str) -> None:
        """The prediction of when a model is ready has moved: refuse the calls for which that is too late."""
        queues = self._control.queues.get(model)
        if not queues:
            return
        now = self._dispatch.clock()
        self.refuse_unserved(self.for_models.too_late(model, queues, now), now)
        self.pump(model, queues)

    # -- leaving ------------------------------------------------------------------------------------------------

    def leave(self, place: QueuePlace) -> None:
        """The call does not want its turn any more."""
        ticket, turn = place.ticket, place.turn
        if ticket.waiting:
            self._withdraw(ticket)
            self._pump_model(ticket.call.model)
        elif not turn.cancelled() and turn.exception() is None:
            turn.result().discard()  # granted in the very moment it was given up

    def _withdraw(self, ticket: Ticket) -> None:
        model, now = ticket.call.model, self._dispatch.clock()
        queues = self._control.queues[model]
        queues.remove(ticket)
        del self.turns[ticket]
        if self.for_models.since:
            self.for_models.end(ticket, now)
        if not queues:
            self.for_models.forget_look(model)
        self.expiries.arm(len(self.turns))

    def refuse(self, ticket: Ticket, why: Refuse, now: float) -> None:
        """Remove a waiting call from its queue. It is refused, unless another of its route's models can serve it.

        A call that has left meanwhile stays as it is: one that was refused before it may have had its queue pumped.
        """
        if not ticket.waiting or self.gives(ticket, now):
            return
        call, place = ticket.call, self.turns[ticket]
        refused = self._refusal(call, why, now)
        self._withdraw(ticket)
        if not place.turn.done():
            place.turn.set_exception(refused)

    def gives(self, ticket: Ticket, now: float, among: Container[str] | None = None) -> bool:
        """Give a waiting call to another of its route's models, if one (`among` these) can serve it in time; whether
        one could."""
        call, place, routes = ticket.call, self.turns[ticket], self._dispatch.routes
        other = routes.other(call, now, among=among) if call.others and not place.turn.done() else None
        if other is None:
            return False
        self._withdraw(ticket)
        routes.give(call, other, now)
        self._wait_again(place, ticket.exclude)
        return True

    def moves(self, tickets: Sequence[Ticket], other: str, now: float) -> bool:
        """Give waiting calls of one model to another, and their room to those behind; whether all could be moved."""
        model = tickets[0].call.model
        moved = all(ticket.waiting and self.gives(ticket, now, (other,)) for ticket in tickets)
        self._pump_model(model)
        return moved

    def _wait_again(self, place: QueuePlace, exclude: frozenset[str]) -> None:
        """Give the place's call, which has another model now, a grant or a ticket there."""
        call = place.ticket.call
        grant = self._dispatch.at_once(call, exclude)
        if grant is not None:
            place.turn.set_result(grant)
            return
        try:
            place.ticket = self._ticket(call, exclude, front=False)
        except Refused as refused:
            place.turn.set_exception(refused)
            return
        self._push(place)

    def refuse_unserved(self, tickets: Iterable[Ticket], now: float) -> None:
        """Refuse calls that wait for a model of which no engine may be given calls."""
        for ticket in tickets:
            self.refuse(ticket, self._control.unserved(ticket, now), now)

    def _expire(self) -> None:
        now = self._dispatch.clock()
        for ticket in self.expiries.due(now):
            expires = self._control.expires(ticket.call)
            if now >= expires:
                self.refuse(ticket, self._control.overdue(ticket, now), now)
            elif now >= self._dispatch.lease_until or not self.gives(ticket, now, self._control.rules.outside):
                ticket.expires = expires
                self.expiries.add(ticket)
        self.expiries.arm(len(self.turns))
        self._dispatch.pump()

    def hand_over(self, successor: Successor) -> None:
        """Have the successor asked for all that waits, in the order of arrival."""
        for ticket in sorted(self.turns, key=lambda ticket: ticket.call.arrived):
            turn = self.turns[ticket].turn
            if not turn.done():  # else its task is cancelled and has not run yet
                self._withdraw(ticket)
                turn.set_exception(HandedOver(successor))

    def left_over(self) -> dict[str, object]:
        """Return what is kept for calls that wait, by name."""
        self.expiries.arm(len(self.turns))
        return {"turns": self.turns, "a timer": self.expiries.armed, **self.for_models.left_over()}


# -- expiries ---------------------------------------------------------------------------------------------------------

FEW = 64  # tickets of calls that wait no more, which need not be removed


class Expiries:
    """Expiries of the calls that wait, and one timer for the earliest of them. `ring` is called when that has come;
    whoever is called takes what is due, and arms the timer."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self.tickets: list[tuple[float, int, Ticket]] = []  # a heap, by expiry
        self._ring = ring
        self._sequence = count()
        self._timer: asyncio.Handle | None = None
        self._rings_at = 0.0  # what it is set to: for a time that has passed, uvloop's handle does not say

    @property
    def armed(self) -> bool:
        """Whether the timer is set."""
        return self._timer is not None

    def add(self, ticket: Ticket) -> None:
        """Note when the ticket expires."""
        heapq.heappush(self.tickets, (ticket.expires, next(self._sequence), ticket))

    def due(self, now: float) -> Iterator[Ticket]:
        """Take the tickets that have expired and still wait."""
        tickets = self.tickets
        while tickets and (tickets[0][0] <= now or not tickets[0][2].waiting):
            ticket = heapq.heappop(tickets)[2]
            if ticket.waiting:
                yield ticket

    def arm(self, waiting: int) -> None:
        """Set the timer on the earliest expiry of a call that still waits. `waiting`: how many do."""
        tickets = self.tickets
        if len(tickets) > FEW and len(tickets) > 2 * waiting:  # else granted calls stay until then
            tickets[:] = [entry for entry in tickets if entry[2].waiting]
            heapq.heapify(tickets)
        while tickets and not tickets[0][2].waiting:
            heapq.heappop(tickets)
        if not tickets:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        elif self._timer is None or self._rings_at > tickets[0][0]:
            if self._timer is not None:
                self._timer.cancel()
            self._rings_at = tickets[0][0]
            self._timer = asyncio.get_running_loop().call_at(self._rings_at, self._rung)

    def _rung(self) -> None:
        self._timer = None
        self._ring()
