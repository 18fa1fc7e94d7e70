"""The only place a call waits: `ask(call)` gives a grant, at once or when its turn comes.

`pump()` is the single writer of queues and holds. It is synchronous, hence atomic in one event loop: no locks, no
sweepers. It runs on push, settle, a new sample, an engine's coming or going, a reload, and the earliest expiry.
Leaving the grant, by any path, gives the hold back; so does leaving the queue, cancelled, refused or expired.

A call for a model that no engine serves now is held in its queue like any other while a sidecar has the model made
ready, if that will be in time for it. `wake` asks for it, `reconsider` is told when the prediction has moved.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import random
from collections.abc import Callable, Sequence
from itertools import count

from gateway.core.admission import refusals
from gateway.core.admission.deadline import too_late
from gateway.core.admission.model_traffic import ModelTraffic
from gateway.core.admission.queues import Queues, Ticket
from gateway.core.admission.refusals import Foretold
from gateway.core.admission.retries import RetryBudget
from gateway.core.admission.rules import AdmissionRules
from gateway.core.engines.choice import LOOKED_AT, Choice, any_idle, choose, foreseen_ttft, least_ttft, usable_of
from gateway.core.engines.fleet import Engine, Fleet, Hold
from gateway.core.policy.policy import Policy
from gateway.core.request.call import Call
from gateway.core.request.outcome import Refused
from gateway.core.sidecars.sidecar import Outlook
from gateway.core.sidecars.sidecars import Registry
from gateway.decider.grant import LocalGrant
from gateway.decider.witness import DispatchWitness

NOBODY: frozenset[str] = frozenset()
LARGE = 1 / 8  # of what an engine can hold: to keep more than that free for one call would idle too much
MOVED = 0.25  # seconds that a prediction must move for calls that are held to be looked at again


class Dispatch:
    """Queues per model over one fleet. `clock` gives monotonic seconds."""

    def __init__(
        self,
        fleet: Fleet,
        policy: Policy,
        rng: random.Random,
        clock: Callable[[], float],
        retries: RetryBudget,
        witness: DispatchWitness | None = None,
    ) -> None:
        self.fleet = fleet
        self.policy = policy
        self.rng = rng
        self.clock = clock
        self.retries = retries
        self.witness = witness
        self.leaving = False  # balancers are told to go elsewhere; calls are still taken
        self.draining = False
        self.queues: dict[str, Queues] = {}
        self.traffic: dict[str, ModelTraffic] = {}
        self.running = dict.fromkeys(policy.classes, 0)
        self._rules = AdmissionRules(policy)
        self._turns: dict[Ticket, asyncio.Future[LocalGrant]] = {}
        self._expiries: list[tuple[float, int, Ticket]] = []
        self._sequence = count()
        self._timer: asyncio.Handle | None = None
        self._rings_at = 0.0  # what it is set to: for a time that has passed, uvloop's handle does not say
        self._late: list[tuple[Ticket, Choice]] = []  # met by the pump, to be shed
        self.sidecars = Registry()
        self.wake: Callable[[str, float], None] = _ignored  # have a model made ready; for so long though nobody waits
        self.woken: Callable[[str, float], None] = _ignored  # told of each call that was held: its class, and how long
        self._awaiting_model: dict[Ticket, float] = {}  # those that wait for a model to be made ready, and since when
        self._foreseen: dict[str, float] = {}  # model -> when it will be ready, as calls that are held were told

    def apply(self, policy: Policy) -> None:
        """Go by `policy` from now on: what waits keeps its place under the new weights, what runs goes on."""
        self.policy = policy
        self._rules = AdmissionRules(policy)
        for queues in self.queues.values():
            queues.apply(policy.classes, self._rules.weights)
        for traffic in self.traffic.values():
            traffic.apply(policy)
        for name in policy.classes:
            self.running.setdefault(name, 0)
        for name in [name for name, calls in self.running.items() if not calls and name not in policy.classes]:
            del self.running[name]
        self.pump()

    async def ask(self, call: Call) -> LocalGrant:
        """Raises Refused: not found, no engine, too large, queue full, hopeless, shed, expired, draining."""
        grant = self.at_once(call) or await self.enter(call, NOBODY)
        self.retries.call(self.clock())
        return grant

    # -- entering -----------------------------------------------------------------------------------------------

    def at_once(self, call: Call, exclude: frozenset[str] = NOBODY) -> LocalGrant | None:
        """A grant without waiting: nobody waits for this model, and an engine has room."""
        if self.queues.get(call.model) or self.draining or call.class_name not in self.policy.classes:
            return None
        traffic = self.traffic.get(call.model)
        if traffic is None:  # the first of its model
            if not self.fleet.serving(call.model):
                return None
            traffic = self._state(call.model)[1]
        if traffic.level and traffic.refuses(call):
            return None  # enter() says why
        now = self.clock()
        if now >= call.deadline:
            return None  # its body took so long: enter() says so
        choice = self._choose(call, now, exclude)
        return None if choice is None else self._grant(call, choice, now, None)

    async def enter(self, call: Call, exclude: frozenset[str], *, front: bool = False) -> LocalGrant:
        """Wait in the class's line for a grant. Raises Refused; cancellation withdraws the call."""
        now = self.clock()
        if call.class_name not in self.policy.classes:
            call.class_name = "default"  # a reload has done away with its class
        ticket = self._ticket(call, exclude, now, front=front)
        turn: asyncio.Future[LocalGrant] = asyncio.get_running_loop().create_future()
        self._turns[ticket] = turn
        queues = self.queues[call.model]
        queues.push(ticket, front=front)
        heapq.heappush(self._expiries, (ticket.expires, next(self._sequence), ticket))
        self._pump(call.model, queues)
        try:
            return await turn
        except asyncio.CancelledError:
            if ticket.waiting:
                self._withdraw(ticket)
                self._pump(call.model, queues)
            elif not turn.cancelled() and turn.exception() is None:
                turn.result().close()  # granted in the very moment it was cancelled
            raise

    def _ticket(self, call: Call, exclude: frozenset[str], now: float, *, front: bool) -> Ticket:
        """The call's place in the queue, or Refused. A call that had been granted (`front`) has its place already."""
        if self.draining and not front:
            raise refusals.draining()
        if now >= call.deadline and not front:
            raise refusals.too_slow(call, now - call.arrived)
        engines = self.fleet.serving(call.model)
        usable = usable_of(engines, now)
        if not usable:
            return self._await_model(call, exclude, engines, now, front=front)
        largest = max(engine.largest for engine in engines)
        if call.cost > largest:
            raise refusals.too_large(call, largest)
        large = call.cost > LARGE * largest
        queues, traffic = self._state(call.model)
        if front:
            return Ticket(call, now, exclude, large=large)
        traffic.advance(now)
        why = traffic.refuses(call) if traffic.level else None
        if why is not None:
            raise refusals.refused_by_mode(call, why, self.wait_estimate(call.model))
        booking = traffic.bookings[call.class_name].claim(call, now)
        if booking is None:
            self._in_time(call, queues, traffic, usable, now)
        bound = queues.room(call)
        if bound is not None:
            self._make_room(call, queues, traffic, bound)
        expires = min(call.deadline, call.ttft_by) if self.policy.deadlines.shed_late else call.deadline
        if booking is None:
            return Ticket(call, now, exclude, expires, large=large)
        ticket = Ticket(call, now, exclude, expires, booking.since, booking.deadline, large=large)
        call.predicted_wait = traffic.wait(queues, call, now, ticket)
        return ticket

    def _await_model(
        self, call: Call, exclude: frozenset[str], engines: Sequence[Engine], now: float, *, front: bool
    ) -> Ticket:
        """A place in the queue of a model that no engine serves now, while a sidecar has it made ready; or Refused.

        A call that cannot wait so long still has it made ready, since it is told when to come back.
        """
        outlook = self.sidecars.outlook(call.model, now)
        if outlook is None or outlook.ready_in is None:
            if outlook is None and not engines and not self.sidecars.knows(call.model):
                raise self.unknown(call.model)
            raise _unserved(call, outlook, engines, now)
        largest = self._largest(call.model, engines)
        if call.cost > largest:
            raise refusals.too_large(call, largest)
        large = call.cost > LARGE * largest
        self.sidecars.wanted(outlook, now)
        queues, traffic = self._state(call.model)
        if front:
            self.wake(call.model, 0.0)
            return Ticket(call, now, exclude, large=large)
        traffic.advance(now)
        ready_in = outlook.ready_in
        call.predicted_wait = wait = ready_in + traffic.wait(queues, call, now, until=call.ttft_by, spare=largest)
        times = foreseen_ttft(engines, call, now)
        late = now + wait > call.ttft_by or too_late(call, now + wait, *times)
        if late and self.policy.deadlines.predict:
            self.wake(call.model, ready_in)
            foretold = Foretold(ready=ready_in, wait=wait - ready_in, ttft=times[0], tpot=times[2])
            raise refusals.not_ready(call, now, foretold)
        bound = queues.room(call)
        if bound is not None:
            self._make_room(call, queues, traffic, bound)
        self.wake(call.model, 0.0)
        self._foreseen[call.model] = min(now + ready_in, self._foreseen.get(call.model, math.inf))
        expires = min(call.deadline, call.ttft_by) if self.policy.deadlines.shed_late else call.deadline
        ticket = Ticket(call, now, exclude, expires, large=large)
        self._awaiting_model[ticket] = now
        return ticket

    def unknown(self, model: str) -> Refused:
        """What is told of a model that neither an engine nor a sidecar has, as far as is known."""
        return refusals.unknown_model(model, self.fleet, awaited=self.sidecars.awaited(self.clock()))

    def _largest(self, model: str, engines: Sequence[Engine]) -> int:
        """Tokens of the largest call that an engine of the model will take, as far as anybody knows."""
        told = self.sidecars.kv_tokens(model)
        if told is None and not engines:
            told = self.policy.budget.capacity
        return max([int((told or 0) * self.policy.budget.kv_target), *(engine.largest for engine in engines)])

    def _state(self, model: str) -> tuple[Queues, ModelTraffic]:
        queues = self.queues.get(model)
        if queues is None:
            queues = self.queues[model] = Queues(self.policy.classes, self._rules.weights)
            self.traffic[model] = ModelTraffic(self.policy, self.clock())
        return queues, self.traffic[model]

    def _in_time(self, call: Call, queues: Queues, traffic: ModelTraffic, usable: Sequence[Engine], now: float) -> None:
        """Raises Refused if the call's turn will come too late. Fills in `predicted_wait`."""
        traffic.offered(call, now)
        spare = max(engine.budget - engine.load for engine in usable[:LOOKED_AT])
        call.predicted_wait = wait = traffic.wait(queues, call, now, until=call.ttft_by, spare=spare)
        if not self.policy.deadlines.predict or any_idle(usable, call):
            return
        ttft, reading, tpot = least_ttft(usable, call, now)
        if now + wait > call.ttft_by or too_late(call, now + wait, ttft, reading, tpot):
            foretold = Foretold(wait=wait, ttft=ttft, tpot=tpot)
            raise refusals.hopeless(call, now, foretold, traffic.book(queues, call, now))

    def _make_room(self, call: Call, queues: Queues, traffic: ModelTraffic, bound: str) -> None:
        """A full queue refuses the newcomer, unless it outranks a call that waits."""
        now = self.clock()
        victim = queues.victim(call)
        if victim is None:
            raise refusals.queue_full(call, bound, traffic.book(queues, call, now))
        self._refuse(victim, refusals.displaced(victim.call, call, traffic.book(queues, victim.call, now)))

    # -- the pump -----------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """LocalGrant whatever may go now, everywhere."""
        for engine in self.fleet:
            self.changed(engine)
        self._pump_unserved()

    def changed(self, engine: Engine) -> None:
        """There is news of an engine: grant whatever of its models may go now."""
        now = self.clock()
        engine.advance(now)
        for model in engine.models:
            traffic = self.traffic.get(model)
            if traffic is not None:
                traffic.step(self.fleet.serving(model), now)
                if self.queues[model]:
                    self._pump(model, self.queues[model])
        self._pump_unserved()

    def _pump_unserved(self) -> None:
        """What nobody has any more: those who wait for it are told."""
        if self._turns:
            for model, queues in self.queues.items():
                if queues and not self.fleet.serving(model):
                    self._pump(model, queues)

    def awaited(self, model: str) -> bool:
        """Whether calls wait for a model that no engine may be given them for."""
        return bool(self.queues.get(model)) and not usable_of(self.fleet.serving(model), self.clock())

    def waiting(self, model: str) -> int:
        """Calls that wait for a model."""
        return len(self.queues.get(model, ()))

    def reconsider(self, model: str) -> None:
        """There is news of when a model can be had: what can no longer wait for it is told, and goes or stays."""
        queues = self.queues.get(model)
        if not queues:
            return
        now = self.clock()
        outlook = None if self._served(model) else self.sidecars.outlook(model, now)
        if outlook is not None and outlook.ready_in is not None and self.policy.deadlines.shed_late:
            ready_at = now + outlook.ready_in
            if ready_at > self._foreseen.get(model, -math.inf) + MOVED:
                self._foreseen[model] = ready_at
                engines = self.fleet.serving(model)
                for ticket in list(queues):
                    if not ticket.paid and too_late(ticket.call, ready_at, *foreseen_ttft(engines, ticket.call, now)):
                        self._refuse(ticket, _unserved(ticket.call, outlook, engines, now, now - ticket.pushed_at))
        self._pump(model, queues)

    def _served(self, model: str) -> bool:
        """Whether an engine may be given calls for the model, if its breaker allows."""
        return any(engine.up and not engine.draining for engine in self.fleet.serving(model))

    def released(self, call: Call, hold: Hold, now: float) -> None:
        """A hold came back: account the drain and let the next calls of that engine's models go."""
        self.running[call.class_name] -= 1
        self.traffic[call.model].drain.returned(call.class_name, hold.tokens, now - hold.taken_at, now)
        if not self._turns:
            return  # nobody waits
        # A class's own limit may bind a model that another engine serves.
        for model in self.queues if call.class_name in self._rules.limited else hold.engine.models:
            queues = self.queues.get(model)
            if queues:
                self._pump(model, queues)

    def _pump(self, model: str, queues: Queues) -> None:
        now = self.clock()
        choices: list[Choice] = []
        late, shed_late = self._late, self.policy.deadlines.shed_late

        def fits(ticket: Ticket) -> bool:
            choice = self._choose(ticket.call, now, ticket.exclude)
            if choice is None:
                return False
            # One that was granted before has only its deadline to keep: it is late for its engine's fault. A late one
            # takes an idle engine from nobody, if nobody else can have it now.
            weighed = shed_late and not ticket.paid and (choice.engine.in_flight or self._contended(queues))
            if (weighed and self._is_late(ticket.call, choice, now)) or now >= ticket.call.deadline:
                late.append((ticket, choice))
                return False
            choices.append(choice)
            return True

        while queues:
            ticket = queues.pop(fits, now, self._paused())
            if ticket is not None:
                turn = self._turns.pop(ticket)
                if self._awaiting_model:
                    self._let_go(ticket, now)
                choice = choices.pop()
                if not turn.done():  # else its task is cancelled and has not run yet
                    turn.set_result(self._grant(ticket.call, choice, now, ticket))
            elif not late:
                if not self._served(model):
                    self._wait_for(model, queues, now)
                break
            while late:
                ticket, choice = late.pop()
                self._shed(ticket, now, choice)
        self._arm()

    def _wait_for(self, model: str, queues: Queues, now: float) -> None:
        """No engine may be given these calls: a sidecar has the model made ready for them, or they are told."""
        outlook = self.sidecars.outlook(model, now)
        if outlook is not None and outlook.ready_in is not None:
            self.wake(model, 0.0)
            return
        engines = self.fleet.serving(model)
        for waiting in list(queues):
            self._refuse(waiting, _unserved(waiting.call, outlook, engines, now, now - waiting.pushed_at))

    def _choose(self, call: Call, now: float, exclude: frozenset[str]) -> Choice | None:
        limit = self._rules.limited.get(call.class_name)
        if limit is not None and self.running[call.class_name] >= limit:
            return None
        engines = self.fleet.serving(call.model)
        choice = choose(engines, call, now, routing=self.policy.routing, rng=self.rng, exclude=exclude)
        if choice is None or choice.others_full:
            for engine in engines:
                if engine.up and not engine.draining:
                    engine.press(call.cost)
        return choice

    def _paused(self) -> list[str]:
        """Classes that run as many calls as they may."""
        return [name for name, limit in self._rules.limited.items() if self.running[name] >= limit]

    def _contended(self, queues: Queues) -> bool:
        """Whether several wait whose classes may start a call now."""
        return len(queues) - sum([queues.length(name) for name in self._paused()]) > 1

    def _is_late(self, call: Call, choice: Choice, now: float) -> bool:
        engine = choice.engine
        spread = engine.ttft_spread  # a promise is kept by those that are slower than usual too
        reading = spread * choice.prefill / engine.prefill_rate
        return too_late(call, now, spread * choice.ttft, reading, engine.tpot)

    def _grant(self, call: Call, choice: Choice, now: float, ticket: Ticket | None) -> LocalGrant:
        watermark, traffic, shaping = choice.engine.watermark(), self.traffic[call.model], self._rules.shaping
        if (watermark > shaping.above or traffic.level >= shaping.level) and call.route.generates:
            given = shaping.given(call.asked, call.class_name, watermark, traffic.mode)
            if given < call.asked:
                call.shaped = given
                call.output_tokens = min(call.output_tokens, call.shaped * call.n)
                call.expected_tokens = min(call.expected_tokens, call.shaped)
        grant = LocalGrant(self, call, choice, now, ticket)
        if self._turns and call.class_name in self._rules.limited:
            self._pauses(call)
        return grant

    def _pauses(self, call: Call) -> None:
        """If its class has now all it may have, its heads hold up nobody any more, for other models either."""
        name = call.class_name
        if self.running[name] >= self._rules.limited[name]:
            for model, queues in self.queues.items():
                if model != call.model and queues.length(name):
                    asyncio.get_running_loop().call_soon(self._pump, model, queues)

    # -- leaving ------------------------------------------------------------------------------------------------

    def _withdraw(self, ticket: Ticket) -> None:
        self.queues[ticket.call.model].remove(ticket)
        del self._turns[ticket]
        if self._awaiting_model:
            self._let_go(ticket, self.clock())
        self._arm()

    def _let_go(self, ticket: Ticket, now: float) -> None:
        since = self._awaiting_model.pop(ticket, None)
        if since is not None:
            self.woken(ticket.call.class_name, now - since)

    def _refuse(self, ticket: Ticket, refused: Refused) -> None:
        turn = self._turns[ticket]
        self._withdraw(ticket)
        if not turn.done():
            turn.set_exception(refused)

    def _shed(self, ticket: Ticket, now: float, choice: Choice | None = None) -> None:
        """Refuse what waited too long: for its deadline, or for a target, on the engine that it could have now."""
        call, waited = ticket.call, now - ticket.pushed_at
        if now >= call.deadline:
            self._refuse(ticket, refusals.expired(call, waited))
        elif not self._served(call.model):
            outlook = self.sidecars.outlook(call.model, now)
            self._refuse(ticket, _unserved(call, outlook, self.fleet.serving(call.model), now, waited))
        else:
            if choice is None:
                ttft, _, tpot = least_ttft(self.fleet.serving(call.model), call, now)
            else:
                ttft, tpot = choice.engine.ttft_spread * choice.ttft, choice.engine.tpot  # as in _is_late
            foretold = Foretold(waited=waited, ttft=ttft, tpot=tpot)
            booking = self.traffic[call.model].book(self.queues[call.model], call, now)
            self._refuse(ticket, refusals.shed_late(call, now, foretold, booking))

    def _arm(self) -> None:
        """One timer, on the earliest expiry of a call that still waits."""
        expiries = self._expiries
        if len(expiries) > 64 and len(expiries) > 2 * len(self._turns):  # else granted calls stay until then
            expiries[:] = [entry for entry in expiries if entry[2].waiting]
            heapq.heapify(expiries)
        while expiries and not expiries[0][2].waiting:
            heapq.heappop(expiries)
        if not expiries:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        elif self._timer is None or self._rings_at > expiries[0][0]:
            if self._timer is not None:
                self._timer.cancel()
            self._rings_at = expiries[0][0]
            self._timer = asyncio.get_running_loop().call_at(self._rings_at, self._expire)

    def _expire(self) -> None:
        self._timer = None
        now = self.clock()
        expiries = self._expiries
        while expiries and (expiries[0][0] <= now or not expiries[0][2].waiting):
            ticket = heapq.heappop(expiries)[2]
            if ticket.waiting:
                self._shed(ticket, now)
        self._arm()
        self.pump()

    def refuse_waiting(self) -> None:
        """Drain: what waits is refused, what runs goes on."""
        self.leaving = self.draining = True
        for queues in self.queues.values():
            for ticket in list(queues):
                self._refuse(ticket, refusals.draining())

    # -- estimates ----------------------------------------------------------------------------------------------

    def wait_estimate(self, model: str) -> float:
        """Seconds until what waits now has been served: queued tokens over the measured drain rate (Little's law)."""
        return self.traffic[model].drain.wait(self.queues[model].total_tokens, self.clock()) or refusals.SOON


def _unserved(
    call: Call, outlook: Outlook | None, engines: Sequence[Engine], now: float, waited: float = 0.0
) -> Refused:
    """What a call is told that no engine can be had for, or not in time. `engines` serve its model."""
    if outlook is None:
        return refusals.no_engine(call.model, engines)
    if outlook.ready_in is None:
        return refusals.unavailable(call.model, outlook)
    ttft, _, tpot = foreseen_ttft(engines, call, now)
    return refusals.not_ready(call, now, Foretold(waited=waited, ready=outlook.ready_in, ttft=ttft, tpot=tpot))


def _ignored(_: str, __: float) -> None:
    """Nobody is to be told."""
