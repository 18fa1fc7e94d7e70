"""Admission control: may this call go now, must it wait, or is it refused.

    decide = at_once, else to_wait          of a call that comes
    decide_waiting, overdue                 of a call that waits

Every method that decides is pure: it reads the state and changes nothing, so anybody may ask, a thousand times. Whoever
obeys a decision moves the state: it takes holds and bookings, and pushes tickets. `decision.Reason` lists the reasons
in the order in which they are weighed. Ties between engines are broken by the `rng` that is given; who only asks brings
one of his own.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import msgspec

from gateway.core.admission.admission_rules import AdmissionRules
from gateway.core.admission.bookings import Booking
from gateway.core.admission.deadline import MARGIN, breaks_a_promise, too_late
from gateway.core.admission.decision import Decision, Foretold, Reason, Refuse, Wait
from gateway.core.admission.model_traffic import Outages
from gateway.core.admission.queues import Queues, Ticket
from gateway.core.admission.quotas import Calendar
from gateway.core.admission.workload import Workload
from gateway.core.engines.choice import (
    ASIDE,
    LOOKED_AT,
    SCAN_AT_MOST,
    Aside,
    Choice,
    any_idle,
    choose,
    choose_by_role,
    foreseen_ttft,
    least_ttft,
    usable_of,
    worth_waiting,
)
from gateway.core.engines.engine import Engine
from gateway.core.engines.fleet import Fleet
from gateway.core.engines.ledger import ceiling
from gateway.core.engines.transfer import Prefill, where
from gateway.core.money.book import MoneyBook
from gateway.core.policy.policy import Policy
from gateway.core.request.call import Call
from gateway.core.sidecars.sidecar import Outlook
from gateway.core.sidecars.sidecars import Registry

NO_ENGINES: frozenset[str] = frozenset()
FIRSTS = 0.95  # of a provider's first tokens come as soon as is expected of it
LARGE = 1 / 8  # of what an engine can hold: to keep more than that free for one call would idle too much


class AdmissionControl:
    """The decisions, and the state that they read: the fleet, the sidecars, what waits and runs, and outages."""

    def __init__(self, fleet: Fleet, policy: Policy, money: MoneyBook | None = None) -> None:
        self.fleet = fleet
        self.money = MoneyBook(policy, Calendar()) if money is None else money
        self.rules = AdmissionRules(policy)
        self.sidecars = Registry()
        self.workload = Workload(self.rules)
        self.queues = self.workload.queues
        self.traffic = self.workload.traffic
        self.outages = Outages(fleet)
        self.draining = False

    def apply(self, policy: Policy) -> None:
        """Go by `policy` from now on. Waiting calls keep their place, under the new weights; running calls go on."""
        self.rules = AdmissionRules(policy)
        self.workload.apply(self.rules)

    # -- a call that comes --------------------------------------------------------------------------------------

    def decide(
        self, call: Call, now: float, rng: random.Random, exclude: frozenset[str] = NO_ENGINES, *, less: int = 0
    ) -> Decision:
        """Whether the call may go now, waits or is refused. Engines in `exclude` have failed it."""
        return self.at_once(call, now, rng, exclude) or self.to_wait(call, now, exclude, less=less)

    def at_once(self, call: Call, now: float, rng: random.Random, exclude: frozenset[str]) -> Choice | None:
        """The engine that the call may go to now. None: it may not, and `to_wait` says why."""
        model, name = call.model, call.class_name
        if self.queues.get(model) or self.draining or now >= call.deadline:
            return None
        rules = self.rules
        if name not in rules.rank:
            return None  # it has to be put into another class, see `known`
        traffic = self.traffic.get(model)
        if traffic is not None and traffic.level and traffic.refuses(call):
            return None
        if rules.limited and not self.workload.may_run(name):
            return None
        choice = self._choose(call, now, rng, exclude, 0.0)
        return None if isinstance(choice, Aside) else choice

    def _choose(
        self, call: Call, now: float, rng: random.Random, exclude: frozenset[str], waited: float
    ) -> Choice | Aside | None:
        """The engine that the call may go to now; the call has waited for `waited` seconds."""
        engines, rules = self.candidates(call), self.rules
        if engines and engines[0].provider:
            engines = self._affordable(engines, call, now)
        likely = self.fleet.likely(call.prefix) if len(engines) > SCAN_AT_MOST else ()
        find = choose_by_role if self.fleet.reads_apart else choose
        choice = find(engines, call, now, routing=rules.policy.routing, rng=rng, exclude=exclude, likely=likely)
        if choice is not None and choice.others_full and worth_waiting(call, choice, now, waited):
            return ASIDE
        return choice

    def _affordable(self, engines: Sequence[Engine], call: Call, now: float) -> Sequence[Engine]:
        """Providers that may have the call, and whose budgets have room for what it may cost. Every call to a provider
        comes by here."""
        may_leave = self.may_leave(call, call.model)
        return [engine for engine in engines if may_leave and self.money.may_spend(engine.provider, call, now)]

    def read_where(self, call: Call, choice: Choice, now: float) -> Prefill | None:
        """Decide where the prompt of a call for `choice` is read; None: no other engine could read it."""
        readers = self.fleet.readers(call.model)
        plan = where(call, choice, readers, self.rules.tpots, now) if readers else None
        if plan is not None and plan.engine is not None and plan.engine.priorities:
            return msgspec.structs.replace(plan, priority=self.rules.rank.get(call.class_name, 0))
        return plan

    def to_wait(
        self, call: Call, now: float, exclude: frozenset[str] = NO_ENGINES, *, front: bool = False, less: int = 0
    ) -> Wait | Refuse:
        """The call's place in the queue, or why it is refused. A call that had been granted (`front`) has its place
        already. `less`: tokens of its class that wait before it and will have left."""
        if self.draining and not front:
            return Refuse(reason=Reason.DRAINING)
        if now >= call.deadline and not front:
            return Refuse(reason=Reason.OVERDUE, waited=now - call.arrived)
        engines = self.candidates(call)
        usable = usable_of(engines, now)
        if not usable:
            return self._to_wait_for_model(call, now, exclude, engines, front=front)
        largest = max([engine.ledger.largest for engine in engines])
        why = self._too_much(usable, largest, call, now)
        if why is not None:
            return why
        large = call.cost > LARGE * largest
        if front:
            return Wait(ticket=Ticket(call, now, exclude, large=large))
        queues, traffic = self.workload.of(call.model, now)
        words = traffic.refuses(call) if traffic.level else None
        if words is not None:
            return Refuse(reason=Reason.MODE, words=words, wait=self.workload.wait_estimate(call.model, now))
        booking = traffic.bookings[call.class_name].due(call, now)
        wait: float | None = None
        if booking is None:
            spare = max([engine.ledger.budget - engine.ledger.load for engine in usable[:LOOKED_AT]])
            wait = traffic.wait(queues, call, now, until=call.ttft_by, spare=spare, less=less)
            if self.rules.predict and not any_idle(usable, call):
                times = least_ttft(usable, call, now)
                if breaks_a_promise(call, now + wait, *times):
                    foretold = Foretold(wait=wait, ttft=times[0], tpot=times[2])
                    return Refuse(reason=Reason.TOO_LATE, predicted=wait, foretold=foretold, newcomer=True)
        victim = None
        full = queues.room(call, promised=booking is not None)
        if full is not None:
            victim = queues.victim(call)
            if victim is None:
                newcomer = booking is None
                return Refuse(reason=Reason.QUEUE_FULL, words=full, predicted=wait, booking=booking, newcomer=newcomer)
        ticket = self._ticket(call, now, exclude, booking, large=large)
        if booking is None:
            return Wait(ticket=ticket, predicted=wait, victim=victim, newcomer=True)
        wait = traffic.wait(queues, call, now, ticket, less=less)
        return Wait(ticket=ticket, predicted=wait, victim=victim, booking=booking)

    def _too_much(self, usable: Sequence[Engine], largest: int, call: Call, now: float) -> Refuse | None:
        """Refuse a call that no engine can hold, or that no provider's budget has room for."""
        if call.cost > largest:
            return Refuse(reason=Reason.TOO_LARGE, largest=largest)
        provider = usable[0].provider
        if provider and not self._affordable(usable, call, now):
            frees_in = self.money.spent_until(provider, call, now)
            return Refuse(reason=Reason.UNAFFORDABLE, words=provider, retry_in=frees_in)
        return None

    def _to_wait_for_model(
        self, call: Call, now: float, exclude: frozenset[str], engines: Sequence[Engine], *, front: bool
    ) -> Wait | Refuse:
        """Queue or refuse a call for whose model no engine may be given calls now; a sidecar may have it made ready."""
        if call.subset is not None:
            return self._unserved(call, now, None, 0.0)  # what a sidecar makes ready is not in it
        outlook = self.sidecars.outlook(call.model, now)
        if outlook is None and not engines and not self.sidecars.models.knows(call.model):
            return self.unknown(call.model, now)
        held = outlook is None and self.held_until(call.model, now) > now
        if not held and (outlook is None or outlook.ready_in is None):
            return self._unserved(call, now, outlook, 0.0)
        largest = self._largest(call.model, engines)
        if call.cost > largest:
            return Refuse(reason=Reason.TOO_LARGE, largest=largest)
        large = call.cost > LARGE * largest
        if front:
            return Wait(ticket=Ticket(call, now, exclude, large=large), outlook=outlook, held=held)
        queues, traffic = self.workload.of(call.model, now)
        wait: float | None = None  # of an engine that is gone nobody knows when it is back
        if outlook is not None and outlook.ready_in is not None:
            ready_in = outlook.ready_in
            wait = ready_in + traffic.wait(queues, call, now, until=call.ttft_by, spare=largest)
            times = foreseen_ttft(engines, call, now)
            if self.rules.predict and breaks_a_promise(call, now + wait, *times):
                foretold = Foretold(ready=ready_in, wait=wait - ready_in, ttft=times[0], tpot=times[2])
                return Refuse(reason=Reason.NOT_READY, predicted=wait, foretold=foretold, outlook=outlook)
        booking = traffic.bookings[call.class_name].due(call, now)
        full = queues.room(call, promised=booking is not None)
        victim = None if full is None else queues.victim(call)
        if full is not None and victim is None:
            return Refuse(reason=Reason.QUEUE_FULL, words=full, predicted=wait, booking=booking, outlook=outlook)
        ticket = self._ticket(call, now, exclude, booking, large=large)
        return Wait(ticket=ticket, predicted=wait, booking=booking, victim=victim, outlook=outlook, held=held)

    def _ticket(
        self, call: Call, now: float, exclude: frozenset[str], booking: Booking | None, *, large: bool
    ) -> Ticket:
        """The place of a newcomer, or of a call that returns for its `booking`."""
        if booking is None:
            return Ticket(call, now, exclude, self._looked_at(call), large=large)
        expires, since, turn = self._looked_at(call), booking.since, booking.deadline
        return Ticket(call, now, exclude, expires, since, turn, large=large, promised=True)

    def unknown(self, model: str, now: float) -> Refuse:
        """Refuse a call of a model that no known engine or sidecar has."""
        awaited = self.sidecars.awaited(now)
        away = self.sidecars.models.away(model)
        return Refuse(reason=Reason.UNKNOWN_MODEL, engines=tuple(self.fleet), reports_awaited=awaited, away=away)

    def expires(self, call: Call) -> float:
        """Time when a call that waits is given up."""
        return min(call.deadline, call.ttft_by) if self.rules.shed_late else call.deadline

    def _looked_at(self, call: Call) -> float:
        """Time when a call that waits is given up, or sooner: when a provider could still answer it in time."""
        target, by = call.ttft_by - call.arrived, self.expires(call)
        for model in call.others if target < math.inf else ():
            provider = self.rules.outside.get(model)
            if provider is not None and provider.spill == "late":
                for engine in self.fleet.serving(model):
                    first = engine.firsts.value(FIRSTS)
                    first = target / 2 if first is None or first > target / 2 else first
                    by = min(by, call.ttft_by - first - MARGIN * target)
        return by

    def _largest(self, model: str, engines: Sequence[Engine]) -> int:
        """Tokens of the largest call that an engine of the model will take, as far as anybody knows."""
        budget = self.rules.policy.budget
        told = self.sidecars.models.kv_tokens(model)
        if told is None and not engines:
            told = budget.capacity
        return max([round((told or 0) * ceiling(budget.kv_target)), *(engine.ledger.largest for engine in engines)])

    # -- a call that waits --------------------------------------------------------------------------------------

    def decide_waiting(
        self, ticket: Ticket, queues: Queues, now: float, rng: random.Random
    ) -> Choice | Refuse | Aside | None:
        """The engine that the call whose turn it is may go to, or why it is refused now; None: it goes on waiting;
        Aside: so it does for the full engine that has its prompt, and others may pass it."""
        call, rules = ticket.call, self.rules
        if not self.workload.may_run(call.class_name):
            return None
        waited = math.inf if ticket.paid or queues.starving(ticket, now) else now - ticket.since
        choice = self._choose(call, now, rng, ticket.exclude, waited)
        if isinstance(choice, Aside) and queues.owed(ticket) > self._fit_at_a_time(call.model):
            choice = self._choose(call, now, rng, ticket.exclude, math.inf)
        if choice is None:
            return without_room(self.candidates(call), ticket, queues, now)
        if isinstance(choice, Aside):
            return choice
        if now >= call.deadline:
            return Refuse(reason=Reason.EXPIRED, waited=now - ticket.pushed_at)
        # One that was granted before has only its deadline to keep: it is late for its engine's fault. A late one
        # takes an idle engine from nobody, if nobody else can have it now.
        engine = choice.engine
        if rules.shed_late and not ticket.paid and (engine.ledger.in_flight or self.workload.contended(queues)):
            spread = engine.speed.ttft_spread  # a promise is kept by those that are slower than usual too
            ttft, tpot = spread * choice.ttft, engine.speed.tpot
            if too_late(call, now, ttft, spread * choice.prefill / engine.speed.prefill_rate, tpot):
                foretold = Foretold(waited=now - ticket.pushed_at, ttft=ttft, tpot=tpot)
                return Refuse(reason=Reason.SHED_LATE, foretold=foretold)
        return choice

    def _fit_at_a_time(self, model: str) -> int:
        """Tokens that fit the engines of a model: by so much tenants' shares may differ anyway (`fairness.py`)."""
        return sum([engine.ledger.largest for engine in self.fleet.serving(model)])

    def overdue(self, ticket: Ticket, now: float) -> Refuse:
        """The refusal of a call whose time in the queue is up: for want of an engine, its deadline, or a target."""
        call, waited = ticket.call, now - ticket.pushed_at
        if not self.fleet.serves(call.model):
            return self.unserved(ticket, now)
        if now >= call.deadline:
            return Refuse(reason=Reason.EXPIRED, waited=waited)
        ttft, _, tpot = least_ttft(self.fleet.serving(call.model), call, now)
        return Refuse(reason=Reason.SHED_LATE, foretold=Foretold(waited=waited, ttft=ttft, tpot=tpot))

    def unserved(self, ticket: Ticket, now: float) -> Refuse:
        """The refusal of a call that waits for a model that no engine may be given calls for."""
        outlook = self.sidecars.outlook(ticket.call.model, now)
        return self._unserved(ticket.call, now, outlook, now - ticket.pushed_at)

    def _unserved(self, call: Call, now: float, outlook: Outlook | None, waited: float) -> Refuse:
        engines = self.candidates(call)
        if outlook is None:
            return Refuse(reason=Reason.NO_ENGINE, engines=engines, waited=waited)
        if outlook.ready_in is None:
            return Refuse(
                reason=Reason.UNAVAILABLE,
                words=outlook.message,
                retry_in=outlook.retry_in,
                why=outlook.why,
            )
        ttft, _, tpot = foreseen_ttft(engines, call, now)
        foretold = Foretold(waited=waited, ready=outlook.ready_in, ttft=ttft, tpot=tpot)
        return Refuse(reason=Reason.NOT_READY, outlook=outlook, foretold=foretold)

    def too_late_for_model(self, ticket: Ticket, ready_at: float, now: float) -> bool:
        """Whether a call that waits for its model breaks a promise if that is ready at `ready_at`."""
        times = foreseen_ttft(self.fleet.serving(ticket.call.model), ticket.call, now)
        return not ticket.paid and too_late(ticket.call, ready_at, *times)

    # -- facts --------------------------------------------------------------------------------------------------

    def candidates(self, call: Call) -> Sequence[Engine]:
        """Engines that serve the call's model, up or not, and that it may go to."""
        engines, subset = self.fleet.serving(call.model), call.subset
        return engines if subset is None else tuple(engine for engine in engines if engine.id in subset)

    def may_leave(self, call: Call, model: str) -> bool:
        """Whether the provider of the model may have the call. Fails closed: tenant and class must be named."""
        provider = self.rules.outside.get(model)
        return provider is not None and (
            call.leaves > 0 and call.tenant in provider.tenants and call.class_name in provider.classes
        )

    def model_of(self, name: str) -> str:
        """Return the model that a name means: a name that no engine serves may be another name of a sidecar's model."""
        return name if self.fleet.serving(name) else self.sidecars.models.aliases.get(name, name)

    def held_until(self, model: str, now: float) -> float:
        """Time when calls that wait for an engine of the model to come back are given up, as in `Outages`."""
        return self.outages.held_until(model, now, self.rules.policy.routing.hold_unserved)


def without_room(engines: Sequence[Engine], ticket: Ticket, queues: Queues, now: float) -> Refuse | Aside | None:
    """Whether a call that none of its model's engines has room for goes on waiting, and whether others pass it. An
    engine that could hold it may be gone, or back with a smaller KV cache, since it came."""
    call, waited, usable = ticket.call, now - ticket.pushed_at, usable_of(engines, now)
    if call.subset is not None:  # others may go to the engines that it must not have
        return ASIDE if usable else Refuse(reason=Reason.NO_ENGINE, waited=waited)
    if not usable or any(call.cost <= engine.ledger.largest for engine in usable):
        return None
    largest = max([engine.ledger.largest for engine in engines])
    if call.cost > largest:
        return Refuse(reason=Reason.TOO_LARGE, largest=largest)
    if queues.starving(ticket, now):  # nobody would pass it any more
        return Refuse(reason=Reason.NO_ENGINE, engines=engines, waited=waited)
    return ASIDE
