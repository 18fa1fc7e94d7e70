"""Dispatch: `ask(call)` gives a grant, at once or when its turn comes.

`AdmissionControl` decides, and Dispatch obeys: it takes holds, and has `WaitingCalls` grant what waits when that may
go: on a settlement, a new sample, an engine's coming or going, a reload; where a class has `headroom`, on an engine's
last unread prompt too. Leaving the grant, by any path, gives the hold back.

A call for a model that no engine serves now waits in its queue like any other while a sidecar has the model made
ready, if that will be in time for it. `wake` asks for it. A call also waits while an engine is expected back, for
`routing.hold_unserved` from the beginning of the outage on.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Collection

import msgspec

from gateway.core.admission.admission import NO_ENGINES, AdmissionControl
from gateway.core.admission.decision import Reason, Refuse
from gateway.core.admission.queues import Ticket
from gateway.core.admission.retries import RetryBudget
from gateway.core.admission.witness import DispatchWitness
from gateway.core.engines.choice import SCAN_AT_MOST, Choice, usable_of
from gateway.core.engines.engine import Engine
from gateway.core.engines.fleet import Fleet
from gateway.core.engines.hold import Hold
from gateway.core.money.book import MoneyBook
from gateway.core.policy.policy import Policy
from gateway.core.request.call import Call
from gateway.core.request.tenants import MIRROR
from gateway.core.sidecars.copies import LongWait
from gateway.decider.grant import LocalGrant
from gateway.decider.model_routes import ModelRoutes
from gateway.decider.successor import HandedOver, Successor
from gateway.decider.waiting import WaitingCalls

NOBODY = NO_ENGINES


def _ignored(_: str, __: float) -> None:
    """Do nothing: the default if nothing listens."""


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
        self.waiting = WaitingCalls(self, wake, woken)
        self._turns = self.waiting.turns  # empty: nobody waits
        self.estimates = Estimates(control, clock)
        self.routes = ModelRoutes(control, clock)
        self.routes.moves = self.waiting.moves
        self.routes.decides = lambda now: now < self.lease_until
        self.holds: dict[Hold, LocalGrant] = {}  # of all grants
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
                self.press(call)
            return None
        if choice.others_full:
            self.press(call)
        if call.model not in self.traffic:
            self.control.workload.open(call.model, now)
        return self.grant(call, choice, now, None, exclude)

    def press(self, call: Call) -> None:
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
        place = self.waiting.queue(call, exclude, front=front)
        try:
            return await place.turn
        except asyncio.CancelledError:
            place.leave()
            raise
        except HandedOver as handed:
            return await handed.successor.grant(call, exclude, front=front)

    # -- changes ------------------------------------------------------------------------------------------------

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
        self._changed(list(self.fleet), now)

    def changed(self, engine: Engine) -> None:
        """Grant the calls of the engine's models that may go now, after a change of the engine."""
        now = self.clock()
        engine.advance(now)
        self._changed((engine,), now)

    def _changed(self, engines: Collection[Engine], now: float) -> None:
        """Grant the calls of these engines' models that may go now, after a change of the engines."""
        for model in dict.fromkeys([model for engine in engines for model in engine.models]):
            self.control.outages.look(model, now)
            traffic = self.traffic.get(model)
            if traffic is not None:
                answering = self.fleet.answering(model)
                traffic.step(answering, now)
                traffic.scale(answering, self.queues[model].tokens_for_room, now)
        self.waiting.pump_each(engines)
        self.waiting.pump_unserved()

    def released(self, call: Call, hold: Hold, now: float) -> None:
        """A hold came back: account the drain and let the next calls of that engine's models go."""
        self.holds.pop(hold, None)
        if self.successor is not None:
            self.successor.released(hold)
        self.running[call.class_name] -= 1
        self.traffic[call.model].drain.returned(call.class_name, hold.tokens, now - hold.taken_at, now)
        if not self._turns:
            return
        # A class's own limit may bind a model that another engine serves.
        limited = call.class_name in self.control.rules.limited
        self.waiting.pump_each(list(self.fleet) if limited else (hold.engine,))

    def read(self, engine: Engine) -> None:
        """An engine has read a prompt: calls that waited for that may start on it."""
        if self._turns:
            self.waiting.pump_each((engine,))

    # -- grants -------------------------------------------------------------------------------------------------

    def grant(
        self, call: Call, choice: Choice, now: float, ticket: Ticket | None, exclude: frozenset[str]
    ) -> LocalGrant:
        """Give the call the engine that was chosen, with a hold for its cost."""
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
        elif self.control.money.meters.price is not None:
            grant.share(now)
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
                    asyncio.get_running_loop().call_soon(self.waiting.pump, model, queues)

    def restored(self, call: Call, choice: Choice, taken_at: float, first_byte: float) -> LocalGrant:
        """A grant that another decider gave and that is still held. `first_byte`: when its engine had read the prompt;
        0: not yet."""
        self.control.workload.open(call.model, self.clock())
        self.running.setdefault(call.class_name, 0)
        grant = LocalGrant(self, call, choice, taken_at, None)
        priced = self.control.money.meters.price is not None and not choice.engine.provider
        if priced and self.successor is None:  # else it is paid for there
            grant.share(self.clock())
        if first_byte:
            grant.began(first_byte)
        return grant

    def hand_over(self) -> None:
        """Tell the successor of all that is held, and have it asked for what waits, in the order of arrival. What calls
        have cost so far is counted here, the rest there."""
        successor = self.successor
        assert successor is not None  # noqa: S101 # it was set before
        now = self.clock()
        for grant in self.holds.values():
            successor.holds(grant)
            if grant.spending is not None:
                grant.spending.end(now)
        self.waiting.hand_over(successor)

    def left_over(self) -> dict[str, object]:
        """Return what is kept for calls, by name. A gateway without calls has nothing left."""
        return {"tokens that pay for engines": self.control.money.meters.held, **self.waiting.left_over()}

    def refuse_waiting(self) -> None:
        """Drain: refuse the waiting calls; running calls go on."""
        self.leaving = self.control.draining = True
        now = self.clock()
        for queues in self.queues.values():
            for ticket in list(queues):
                self.waiting.refuse(ticket, Refuse(reason=Reason.DRAINING), now)


# -- estimates over the queues ----------------------------------------------------------------------------------------


class Estimates(msgspec.Struct, eq=False):
    """Estimates over the queues of `control`. `clock` gives monotonic seconds."""

    _control: AdmissionControl
    _clock: Callable[[], float]

    def unserved(self, model: str) -> bool:
        """Whether calls wait for a model that no engine may be given for."""
        return bool(self._control.queues.get(model)) and not usable_of(
            self._control.fleet.serving(model), self._clock()
        )

    def waiting(self, model: str) -> int:
        """Return the number of calls that wait for a model."""
        return len(self._control.queues.get(model, ()))

    def longest_wait(self, model: str) -> LongWait | None:
        """Return the class of a model whose calls wait longest, as predicted now; None: none waits, or no engine serves
        it."""
        now, known = self._clock(), self._control.traffic.get(model)
        if known is None:
            return None
        known.advance(now)
        return self._control.workload.longest_wait(model, self._control.fleet.serving(model), now)

    def wait(self, model: str) -> float:
        """Return the seconds until all calls that wait now have been served."""
        return self._control.workload.wait_estimate(model, self._clock())

    def engines_wanted(self) -> dict[str, int]:
        """Return the scaling signal of each model of the house that calls have come for."""
        now, fleet, queues = self._clock(), self._control.fleet, self._control.queues
        outside = self._control.rules.outside
        return {
            model: traffic.scale(fleet.answering(model), queues[model].tokens_for_room, now)
            for model, traffic in self._control.traffic.items()
            if model not in outside
        }
