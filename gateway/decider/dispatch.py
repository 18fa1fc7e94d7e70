"""Dispatch: the only place a call waits. `ask(call)` gives a grant, at once or when its turn comes.

`AdmissionControl` decides, and Dispatch obeys: it takes holds and bookings, pushes tickets, sets timers, wakes waiters.
`pump()` is the single writer of queues and holds. It is synchronous, hence atomic in one event loop: no locks, no
sweepers. It runs on push, settle, a new sample, an engine's coming or going, a reload, and the earliest expiry; where a
class has `headroom`, on an engine's last unread prompt too.
Leaving the grant, by any path, gives the hold back; so does leaving the queue, cancelled, refused or expired.

A call for a model that no engine serves now waits in its queue like any other while a sidecar has the model made
ready, if that will be in time for it. `wake` asks for it; `reconsider` is called when the prediction has moved. So it
does while an engine is expected back, for `routing.hold_unserved` from the beginning of the outage on.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Iterable

import msgspec

from gateway.core.admission import refusals
from gateway.core.admission.admission import NO_ENGINES, AdmissionControl
from gateway.core.admission.decision import Reason, Refuse
from gateway.core.admission.model_traffic import ModelTraffic
from gateway.core.admission.queues import Queues, Ticket
from gateway.core.admission.retries import RetryBudget
from gateway.core.admission.witness import DispatchWitness
from gateway.core.engines.choice import SCAN_AT_MOST, Aside, Choice
from gateway.core.engines.engine import Engine
from gateway.core.engines.fleet import Fleet
from gateway.core.engines.hold import Hold
from gateway.core.money.book import MoneyBook
from gateway.core.policy.policy import Policy
from gateway.core.request.call import Call
from gateway.core.request.outcome import Refused
from gateway.core.request.tenants import MIRROR
from gateway.decider.entering import Entering
from gateway.decider.estimates import Estimates
from gateway.decider.expiries import Expiries
from gateway.decider.grant import LocalGrant
from gateway.decider.model_routes import ModelRoutes
from gateway.decider.model_waits import ModelWaits
from gateway.decider.successor import HandedOver, Successor

NOBODY = NO_ENGINES


def _ignored(_: str, __: float) -> None:
    """Do nothing: the default if nothing listens."""


class QueuePlace:
    """A waiting call's place: `turn` is its grant, or the refusal. `ticket` is another once the call has got another of
    its route's models."""

    __slots__ = ("_dispatch", "ticket", "turn")

    def __init__(self, dispatch: Dispatch, ticket: Ticket, turn: asyncio.Future[LocalGrant]) -> None:
        self._dispatch = dispatch
        self.ticket = ticket
        self.turn = turn

    def leave(self) -> None:
        """Give it up, also in the very moment of its grant."""
        self._dispatch.leave(self)


class Dispatch:
    """Obeys the decisions of `control` over one fleet. `clock` gives monotonic seconds.

    `wake` and `woken`: see ModelWaits. `estimates` says how long what waits will wait.
    """

    def __init__(
        self,
        fleet: Fleet,
        policy: Policy,
        rng: random.Random,
        clock: Callable[[], float],
        retries: RetryBudget,
        witness: DispatchWitness | None = None,
        *,
        money: MoneyBook | None = None,
        wake: Callable[[str, float], None] = _ignored,
        woken: Callable[[str, float], None] = _ignored,
    ) -> None:
        self.control = control = AdmissionControl(fleet, policy, money)
        self.fleet = fleet
        self.rng = rng
        self.clock = clock
        self.retries = retries
        self.witness = witness
        self.lease_until = math.inf
        self.leaving = False  # balancers are told to go elsewhere; calls are still taken
        self.queues = control.queues
        self.traffic = control.traffic
        self.running = control.workload.running
        self.sidecars = control.sidecars
        self._turns: dict[Ticket, QueuePlace] = {}
        self.expiries = Expiries(self._expire)
        self._late: list[tuple[Ticket, Refuse]] = []  # met by the pump, to be shed
        self.waits = ModelWaits(control, clock, self._pump_model, wake, woken)
        self.entering = Entering(control, self.waits, self._refuse)
        self.estimates = Estimates(control, fleet, clock)
        self.routes = ModelRoutes(control, clock)
        self.holds: dict[Hold, Call] = {}  # of all grants
        self.successor: Successor | None = None  # who decides in this one's place

    @property
    def policy(self) -> Policy:
        return self.control.rules.policy

    @property
    def draining(self) -> bool:
        return self.control.draining

    def apply(self, policy: Policy) -> None:
        """Go by `policy` from now on. Waiting calls keep their place, under the new weights; running calls go on."""
        if self.witness is not None:
            self.witness.applying(policy)
        self.control.apply(policy)
        self.waits.forget_outages()
        self.pump()

    async def ask(self, call: Call) -> LocalGrant:
        """Raises Refused: not found, no engine, too large, queue full, too late, shed, expired, draining."""
        return self.first_at_once(call) or await self.wait(call)

    def first_at_once(self, call: Call) -> LocalGrant | None:
        """`at_once`, of a call that has had no engine before: it counts for the retry budget."""
        grant = self.at_once(call)
        if grant is not None:
            self.retries.call(self.clock())
        return grant

    async def wait(self, call: Call) -> LocalGrant:
        """`ask`, where `first_at_once` has given nothing."""
        grant = await self.enter(call, NOBODY)
        self.retries.call(self.clock())
        return grant

    # -- entering -----------------------------------------------------------------------------------------------

    def at_once(self, call: Call, exclude: frozenset[str] = NOBODY) -> LocalGrant | None:
        """A grant without waiting: nobody waits for this model, and an engine has room."""
        if self.successor is not None:
            return None
        now = self.clock()
        choice = self.control.at_once(call, now, self.rng, exclude) if now < self.lease_until else None
        if choice is None:
            if not self.queues.get(call.model):
                self._press(call)
            return None
        if choice.others_full:
            self._press(call)
        if call.model not in self.traffic:
            self._state(call.model)
        return self._grant(call, choice, now, None, exclude)

    def _press(self, call: Call) -> None:
        """Engines learn that a call wanted more than they had room for."""
        if self.control.workload.may_run(call.class_name) and call.tenant != MIRROR:
            cost, engines = call.cost, self.control.candidates(call)
            if len(engines) > SCAN_AT_MOST:
                engines = self.rng.sample(engines, SCAN_AT_MOST)
            for engine in engines:
                if engine.health.up and not engine.draining:
                    engine.ledger.press(cost)

    async def enter(self, call: Call, exclude: frozenset[str], *, front: bool = False) -> LocalGrant:
        """Wait in the class's queue for a grant. Raises Refused; cancellation withdraws the call."""
        if self.successor is not None and call.tenant != MIRROR:
            return await self.successor.grant(call, exclude, front=front)
        place = self.queue(call, exclude, front=front)
        try:
            return await place.turn
        except asyncio.CancelledError:
            place.leave()
            raise
        except HandedOver as handed:
            return await handed.successor.grant(call, exclude, front=front)

    def queue(self, call: Call, exclude: frozenset[str], *, front: bool = False) -> QueuePlace:
        """A place in the class's queue, which is to be left if nobody waits for its turn any more. Raises Refused."""
        if call.tenant == MIRROR:
            raise refusals.no_room_for_copy()
        turn: asyncio.Future[LocalGrant] = asyncio.get_running_loop().create_future()
        place = QueuePlace(self, self._ticket(call, exclude, front=front), turn)
        self._push(place, front=front)
        return place

    def _push(self, place: QueuePlace, *, front: bool = False) -> None:
        """Put the place's call into its queue."""
        ticket = place.ticket
        call = ticket.call
        self._turns[ticket] = place
        queues = self.queues[call.model]
        if self.witness is not None:
            self.witness.pushing(queues, ticket, front=front)
        queues.push(ticket, front=front)
        self.expiries.add(ticket)
        self._pump(call.model, queues)

    def leave(self, place: QueuePlace) -> None:
        """The call does not want its turn any more."""
        ticket, turn = place.ticket, place.turn
        if ticket.waiting:
            self._withdraw(ticket)
            self._pump(ticket.call.model, self.queues[ticket.call.model])
        elif not turn.cancelled() and turn.exception() is None:
            turn.result().discard()  # granted in the very moment it was given up

    def _ticket(self, call: Call, exclude: frozenset[str], *, front: bool) -> Ticket:
        """The call's place in the queue. Raises Refused."""
        now, witness = self.clock(), self.witness
        if witness is not None:
            witness.entering(call, exclude, front=front)
        call.class_name = self.control.rules.classes.known(call.class_name)
        try:
            return self.entering.ticket(call, exclude, now, front=front)
        except Refused as refused:
            if witness is not None:
                witness.refused(call, refused)
            raise

    def _state(self, model: str) -> tuple[Queues, ModelTraffic]:
        return self.control.workload.open(model, self.clock())

    # -- the pump -----------------------------------------------------------------------------------------------

    def set_lease(self, until: float) -> None:
        """Grant until then, by the clock, and no longer; -inf: not at all. What waited for that is granted now."""
        before, self.lease_until = self.lease_until, until
        if before <= self.clock() < until:
            self.pump()

    def pump(self) -> None:
        """Grant whatever may go now, everywhere."""
        now = self.clock()
        for engine in self.fleet:
            engine.advance(now)
        self._changed(dict.fromkeys([model for engine in self.fleet for model in engine.models]), now)

    def changed(self, engine: Engine) -> None:
        """Grant the calls of the engine's models that may go now, after a change of the engine."""
        now = self.clock()
        engine.advance(now)
        self._changed(engine.models, now)

    def _changed(self, models: Iterable[str], now: float) -> None:
        """Grant the calls of these models that may go now, after a change of their engines."""
        for model in models:
            self.control.outages.look(model, now)
            traffic = self.traffic.get(model)
            if traffic is not None:
                engines = self.fleet.serving(model)
                traffic.step(engines, now)
                traffic.scale(engines, self.queues[model].total_tokens, now)
                if self.queues[model]:
                    self._pump(model, self.queues[model])
        self._pump_unserved()

    def _pump_unserved(self) -> None:
        """Pump the queues of models that no engine has any more: their calls are refused, or a sidecar is asked."""
        if self._turns:
            for model, queues in list(self.queues.items()):  # a call may go to a model that nobody has waited for
                if queues and not self.fleet.serving(model):
                    self._pump(model, queues)

    def reconsider(self, model: str) -> None:
        """The prediction of when a model is ready has moved: refuse the calls for which that is too late."""
        queues = self.queues.get(model)
        if not queues:
            return
        now = self.clock()
        self._refuse_unserved(self.waits.too_late(model, queues, now), now)
        self._pump(model, queues)

    def released(self, call: Call, hold: Hold, now: float) -> None:
        """A hold came back: account the drain and let the next calls of that engine's models go."""
        self.holds.pop(hold, None)
        if self.successor is not None:
            self.successor.released(hold)
        self.running[call.class_name] -= 1
        self.traffic[call.model].drain.returned(call.class_name, hold.tokens, now - hold.taken_at, now)
        if not self._turns:
            return  # nobody waits
        # A class's own limit may bind a model that another engine serves.
        for model in list(self.queues) if call.class_name in self.control.rules.limited else hold.engine.models:
            queues = self.queues.get(model)
            if queues:
                self._pump(model, queues)

    def read(self, engine: Engine) -> None:
        """An engine has read a prompt: calls that waited for that may start on it."""
        if self._turns:
            for model in engine.models:
                queues = self.queues.get(model)
                if queues:
                    self._pump(model, queues)

    def _pump_model(self, model: str) -> None:
        self._pump(model, self.queues[model])

    def _pump(self, model: str, queues: Queues) -> None:
        if self.successor is not None:
            return
        now = self.clock()
        choices: list[Choice] = []
        aside: list[Ticket] = []
        late, decide, rng = self._late, self.control.decide_waiting, self.rng

        def fits(ticket: Ticket) -> bool:
            choice = decide(ticket, queues, now, rng)
            ticket.aside = isinstance(choice, Aside)
            if isinstance(choice, Aside):
                aside.append(ticket)
                return False
            if isinstance(choice, Refuse):
                late.append((ticket, choice))
                return False
            if choice is None or choice.others_full:
                self._press(ticket.call)
            if choice is None:
                return False
            choices.append(choice)
            return True

        while queues and now < self.lease_until:
            paused = self.control.workload.paused()
            if self.witness is not None:
                self.witness.popping(model, queues, now, paused)
            ticket = queues.pop(fits, now, paused)
            if self.witness is not None:
                self.witness.popped(model, ticket)
            if ticket is not None:
                turn = self._turns.pop(ticket).turn
                if self.waits.since:
                    self.waits.end(ticket, now)
                choice = choices.pop()
                if not turn.done():  # else its task is cancelled and has not run yet
                    turn.set_result(self._grant(ticket.call, choice, now, ticket, ticket.exclude))
            elif not late:
                if not self.fleet.serves(model):
                    self._refuse_unserved(self.waits.deadline_unreachable(model, queues, now), now)
                break
            while late:
                ticket, why = late.pop()
                self._refuse(ticket, why, now)
        if aside:
            self.waits.look_again(model)
        if self.waits.timed:
            self.waits.keep_timers(model, queues)
        self.expiries.arm(len(self._turns))

    def _grant(
        self, call: Call, choice: Choice, now: float, ticket: Ticket | None, exclude: frozenset[str]
    ) -> LocalGrant:
        witness = self.witness
        if witness is not None:
            witness.granting(call, choice, now, ticket)
        shaping = self.control.rules.shaping
        watermark = choice.engine.ledger.watermark()
        if watermark > shaping.above and call.route.generates:
            given = shaping.given(call.asked, call.class_name, watermark)
            if given < call.asked:
                call.shaped = given
                call.output_tokens = min(call.output_tokens, call.shaped * call.n)
                call.expected_tokens = min(call.expected_tokens, call.shaped)
        plan = self.control.read_where(call, choice, now) if self.fleet.reads_apart and not exclude else None
        if plan is not None and plan.engine is not None:
            choice = msgspec.structs.replace(choice, prefill=1, ttft=plan.there)
        grant = LocalGrant(self, call, choice, now, ticket)
        if plan is not None:
            grant.split(plan, now)
        if choice.engine.provider:
            grant.spend(choice.engine.provider, now)
        if witness is not None:
            witness.granted(call, grant.hold)
        if self._turns and call.class_name in self.control.rules.limited:
            self._pauses(call)
        return grant

    def _pauses(self, call: Call) -> None:
        """Look at other models' queues again if the call's class now has all it may run: its heads no longer hold up
        others."""
        name = call.class_name
        if not self.control.workload.may_run(name):
            for model, queues in self.queues.items():
                if model != call.model and queues.length(name):
                    asyncio.get_running_loop().call_soon(self._pump, model, queues)

    def restored(self, call: Call, choice: Choice, taken_at: float, first_byte: float) -> LocalGrant:
        """A grant that another decider gave and that is still held. `first_byte`: when its engine had read the prompt;
        0: not yet."""
        self._state(call.model)
        self.running.setdefault(call.class_name, 0)
        grant = LocalGrant(self, call, choice, taken_at, None)
        if first_byte:
            grant.began(first_byte)
        return grant

    def hand_over(self) -> None:
        """Tell the successor of all that is held, and have it asked for what waits, in the order of arrival."""
        successor = self.successor
        assert successor is not None  # noqa: S101 # it was set before
        for hold, call in self.holds.items():
            successor.holds(call, hold)
        for ticket in sorted(self._turns, key=lambda ticket: ticket.call.arrived):
            turn = self._turns[ticket].turn
            if not turn.done():  # else its task is cancelled and has not run yet
                self._withdraw(ticket)
                turn.set_exception(HandedOver(successor))

    # -- leaving ------------------------------------------------------------------------------------------------

    def _withdraw(self, ticket: Ticket) -> None:
        self.queues[ticket.call.model].remove(ticket)
        del self._turns[ticket]
        if self.waits.since:
            self.waits.end(ticket, self.clock())
        if self.waits.timed:
            self.waits.keep_timers(ticket.call.model, self.queues[ticket.call.model])
        self.expiries.arm(len(self._turns))

    def _refuse(self, ticket: Ticket, why: Refuse, now: float) -> None:
        """Remove a waiting call from its queue. It is refused, unless another of its route's models can serve it."""
        call, place = ticket.call, self._turns[ticket]
        other = self.routes.other(call, now) if call.others and not place.turn.done() else None
        if other is not None:
            self._withdraw(ticket)
            self.routes.give(call, other, now)
            self._wait_again(place, ticket.exclude)
            return
        refused = self.entering.refused(call, why, now)
        self._withdraw(ticket)
        if not place.turn.done():
            place.turn.set_exception(refused)

    def _wait_again(self, place: QueuePlace, exclude: frozenset[str]) -> None:
        """Give the place's call, which has another model now, a grant or a ticket there."""
        call = place.ticket.call
        grant = self.at_once(call, exclude)
        if grant is not None:
            place.turn.set_result(grant)
            return
        try:
            place.ticket = self._ticket(call, exclude, front=False)
        except Refused as refused:
            place.turn.set_exception(refused)
            return
        self._push(place)

    def _refuse_unserved(self, tickets: Iterable[Ticket], now: float) -> None:
        for ticket in tickets:
            self._refuse(ticket, self.control.unserved(ticket, now), now)

    def _expire(self) -> None:
        now = self.clock()
        for ticket in self.expiries.due(now):
            self._refuse(ticket, self.control.overdue(ticket, now), now)
        self.expiries.arm(len(self._turns))
        self.pump()

    def left_over(self) -> dict[str, object]:
        """Return what is kept for calls that wait, by name. A gateway without calls has nothing left."""
        self.expiries.arm(len(self._turns))
        return {
            "turns": self._turns,
            "a timer": self.expiries.armed,
            **self.waits.left_over(),
        }

    def refuse_waiting(self) -> None:
        """Drain: refuse the waiting calls; running calls go on."""
        self.leaving = self.control.draining = True
        now = self.clock()
        for queues in self.queues.values():
            for ticket in list(queues):
                self._refuse(ticket, Refuse(reason=Reason.DRAINING), now)
