"""Model routes of one decider: each call for a route gets its member, or a fallback, before it is charged."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from itertools import islice

import msgspec
from msgspec import UNSET

from gateway.core.admission import refusals
from gateway.core.admission.admission import AdmissionControl
from gateway.core.admission.queues import Ticket
from gateway.core.checkpoint import SavedVerdict
from gateway.core.engines.choice import usable_of
from gateway.core.policy.routes import ModelRoute
from gateway.core.request.call import Call
from gateway.core.request.outcome import Outcome
from gateway.core.request.record import COPY, Record
from gateway.core.request.tenants import Account
from gateway.core.routes.canary import Answers, CanaryTrial
from gateway.core.routes.prospect import Prospect, prospect_of
from gateway.core.routes.resolution import Resolved, resolve
from gateway.shared.notice import Notice


def _models(route: ModelRoute, call: Call) -> Sequence[str]:
    """Models of a route that may take a call's place later: canaries do not."""
    members = [member.model for member in route.members if member.until is None]
    return members if call.no_fallback else [*members, *route.fallback]


def _stuck(_: Sequence[Ticket], __: str, ___: float) -> bool:
    """Move no call: the default if nobody waits."""
    return False


def _decides(_: float) -> bool:
    """Decide at any time: the default without a lease."""
    return True


def _unheard(_: str) -> None:
    """Do nothing: the default if nothing listens."""


LOOKED_AT = 128  # calls that wait first
MOST_LEAVE = 4  # of them in place of one newcomer
# Values of a provider's `spill` by which a call may still go there after it was given a model.
SPILLS = {"late": ("late",), "failed": ("late", "errors")}


class Exchange(msgspec.Struct, frozen=True):
    """Waiting calls that are to leave for the provider's model `outside`, so that a newcomer is in time at its own."""

    leaving: Sequence[Ticket]
    outside: str


class ModelRoutes:
    """Resolves calls by what `control` would decide about them. `clock` gives monotonic seconds. `say` takes lines for
    the operator.

    `moves` gives waiting calls of one model to another, and says whether all could be moved. `decides`: whether this is
    the one that decides, at that time. `resolved` counts calls by route, model, and how they came to it: member, moved,
    fallback or spilled (see `resolve`); failed: the first model failed them; late: they had waited for another, in
    vain, until a provider could just be in time, or until a newcomer got their place.
    """

    def __init__(self, control: AdmissionControl, clock: Callable[[], float]) -> None:
        self._control = control
        self._clock = clock
        self._rng = random.Random(0)  # noqa: S311 # breaks ties of questions, whose answers nobody obeys
        self._trials: dict[str, CanaryTrial] = {}
        self.say: Callable[[str], None] = _unheard
        self.moves: Callable[[Sequence[Ticket], str, float], bool] = _stuck
        self.decides: Callable[[float], bool] = _decides
        self.mirrored: dict[tuple[str, str], Answers] = {}  # by route and side: COPY or MEMBER
        self.resolved: Counter[tuple[str, str, str]] = Counter()

    def resolve(
        self, call: Call, route: ModelRoute, account: Account, appraise: Callable[[Call], None]
    ) -> Exchange | None:
        """Set the call's model. `appraise` fills in the estimates and the class that the call has with a model. Return
        what `exchange` is to carry out once the call is charged.

        Raises Refused if the tenant may use none of the route's models. A tenant with the route among its `models` may
        use all of them.
        """
        control, allowed, now = self._control, account.models, self._clock()

        def asks(model: str, less: int = 0) -> Prospect:
            call.model = control.model_of(model)
            appraise(call)
            return prospect_of(control, call, now, self._rng, less=less)

        def permitted(model: str) -> bool:
            return not allowed or call.asked_model in allowed or model in allowed

        outside = control.rules.outside

        def leaves(model: str) -> bool:
            call.model = model
            appraise(call)
            return outside[model].spill != "never" and control.may_leave(call, model)

        def spills(model: str, members: Sequence[Prospect]) -> bool:
            asked = outside[model].spill == "late" or all(prospect.is_down for prospect in members)
            return asked and leaves(model)

        others = [model for model in _models(route, call) if permitted(model)]
        call.others = tuple([model for model in others if model not in outside or leaves(model)])
        trial = self._trial(call.asked_model)
        out = () if trial is None else trial.out
        resolved = resolve(
            route,
            call.conversation,
            asks,
            permitted=permitted,
            fallback=not call.no_fallback,
            out=out,
            spills=spills if outside else None,
            outside=outside,
        )
        if resolved is None:
            call.model = call.asked_model
            raise refusals.forbidden_model(call)
        return self._apply(call, resolved, asks)

    def _apply(self, call: Call, resolved: Resolved, asks: Callable[[str, int], Prospect]) -> Exchange | None:
        """Set the call's model and the others of its route that may have the call later. Return the exchange that lets
        the call wait in place of calls which leave."""
        exchange = None
        if resolved.instead is not None:
            exchange = self._exchange(call, resolved.instead.model, resolved.model, asks)
            resolved = resolved if exchange is None else resolved.instead
        call.others = tuple([model for model in call.others if model != resolved.model])
        call.model = self._control.model_of(resolved.model)
        self.resolved[call.asked_model, resolved.model, resolved.how] += 1
        return exchange

    def _exchange(self, call: Call, member: str, outside: str, asks: Callable[[str, int], Prospect]) -> Exchange | None:
        """Return the calls that may leave in this one's place, which wait before it for the member: those of the
        cheapest tokens, of its tenant and class alone. None: it would not be in time even so, or the provider could not
        take them all."""
        control, now = self._control, self._clock()
        if control.rules.outside[outside].spill != "late" or not self.decides(now):
            return None
        asks(member, 0)  # its estimates are the member's from here on
        price, found = control.rules.outside[outside].prices.each, list[Ticket]()
        for ticket in islice(control.queues.get(call.model, ()), LOOKED_AT):
            other = ticket.call
            alike = other.tenant == call.tenant and other.class_name == call.class_name
            before = ticket.paid or ticket.deadline <= call.deadline
            may_leave = outside in other.others and control.may_leave(other, outside)
            if alike and before and may_leave and price(other) < price(call):
                found.append(ticket)
        found.sort(key=lambda ticket: price(ticket.call))
        less = 0
        for count, ticket in enumerate(found[:MOST_LEAVE], 1):
            less += ticket.cost
            if asks(member, less).in_time:
                leaving = found[:count]
                fit = self._may_leave_together([each.call for each in leaving], control.model_of(outside), now)
                return Exchange(leaving, outside) if fit else None
        return None

    def _may_leave_together(self, calls: Sequence[Call], model: str, now: float) -> bool:
        """Whether the provider of the model has room and money for all these calls of one tenant at once."""
        control, tokens = self._control, sum([call.cost for call in calls])
        return not control.queues.get(model) and any(
            engine.ledger.in_flight + len(calls) <= engine.ledger.slots
            and engine.ledger.fits(tokens, calls[0].class_name)
            and control.money.may_spend(engine.provider, calls[0], now, calls[1:])
            for engine in usable_of(control.fleet.serving(model), now)
        )

    def exchange(self, call: Call, exchange: Exchange) -> None:
        """Let the others leave in the place of a call that was resolved and charged just now. If they cannot, it leaves
        itself where it would be late."""
        now = self._clock()
        if not self.moves(exchange.leaving, exchange.outside, now):
            other = None if prospect_of(self._control, call, now, self._rng).in_time else self.other(call, now)
            if other is not None:
                self.give(call, other, now)

    def reroute(self, call: Call, exclude: frozenset[str]) -> bool:
        """Give a call another of its route's models if all engines of its own have failed it (`exclude`), and another
        model can serve it in time. Return whether it did. The call stays charged for the first."""
        now, own = self._clock(), call.model
        if any(engine.id not in exclude for engine in usable_of(self._control.fleet.serving(own), now)):
            return False
        other = self.other(call, now, "failed")
        if other is None:
            return False
        self.give(call, other, now, "failed")
        self._observe(call.asked_model, own, Outcome.UPSTREAM, None, now)
        return True

    def other(self, call: Call, now: float, how: str = "late", *, among: Container[str] | None = None) -> str | None:
        """Return another of the route's models that can serve the call in time, `among` these if any are named; None:
        there is none. `how`: why the call leaves its model, as counted in `resolved`."""
        control, own, class_name = self._control, call.model, call.class_name
        call.class_name = control.rules.classes.known(class_name)  # as where it waits
        leaves = None
        try:
            for other in call.others:
                if among is not None and other not in among:
                    continue
                call.model = control.model_of(other)
                provider = control.rules.outside.get(other)
                if provider is not None and (provider.spill not in SPILLS[how] or not control.may_leave(call, other)):
                    continue  # also where a reload has done away with its permission
                prospect = prospect_of(control, call, now, self._rng)
                if prospect.in_time:
                    return other
                leaves = other if prospect.leaves and leaves is None else leaves
        finally:
            call.model, call.class_name = own, class_name
        return leaves

    def give(self, call: Call, other: str, now: float, how: str = "late") -> None:
        """Give the call another of its route's models. It stays charged for the first."""
        call.model = self._control.model_of(other)
        call.others = tuple([model for model in call.others if model != other])
        self._control.workload.open(call.model, now)
        self.resolved[call.asked_model, other, how] += 1

    # -- canaries -----------------------------------------------------------------------------------------------

    def observe(self, record: Record, now: float) -> None:
        """Take a call for a route that has ended, at `now`: it may take its model out."""
        if record.mirrored is not UNSET:
            self.mirrored.setdefault((str(record.asked_model), record.mirrored), Answers()).add(record)
        if record.mirrored != COPY:
            self._observe(str(record.asked_model), record.model, record.outcome, record, now)

    def _observe(self, name: str, model: str, outcome: Outcome, record: Record | None, now: float) -> None:
        trial = self._trial(name)
        if trial is None:
            return
        member = next((each for each in trial.members if self._control.model_of(each) == model), model)
        words = trial.observe(member, outcome, record, now)
        if words is not None:
            line = f"{member} gets no more calls of the model route {name}, whose canary it was: {words}"
            self.say(Notice(line, "canary_out", "warning"))

    def _trial(self, name: str) -> CanaryTrial | None:
        """The trial of a route with canaries, as the policy has it now."""
        route, trial = self._control.rules.policy.models.get(name), self._trials.get(name)
        if route is None or not route.has_canaries:
            return None
        if trial is None or trial.route != route:
            trial = self._trials[name] = CanaryTrial(route)
        return trial

    def checkpoint(self) -> Iterator[SavedVerdict]:
        """The canaries that are out."""
        for name in self._control.rules.policy.models:
            trial = self._trial(name)
            yield from () if trial is None else trial.checkpoint(name)

    def restore(self, verdicts: Iterable[SavedVerdict]) -> None:
        """Keep canaries out that another decider has taken out of the same routes."""
        for saved in verdicts:
            trial = self._trial(saved.name)
            if trial is not None:
                trial.restore(saved)

    def canaries(self) -> Iterator[tuple[str, str, str]]:
        """Return every canary: its route, its model, and why it was taken out; empty: it was not."""
        for name, route in self._control.rules.policy.models.items():
            trial = self._trial(name)
            for member in () if trial is None else route.members:
                if trial is not None and member.until is not None:
                    yield name, member.model, trial.out.get(member.model, "")
