"""Decider in the relay's own process: the interface's questions are answered by direct calls.

An admission takes a call through limits, estimates and classes to the dispatch. A call is judged by the snapshot
that it arrived with, also when a reload comes in between.
"""

from __future__ import annotations

import math
import random
from collections.abc import Awaitable, Callable, Iterator
from types import TracebackType

import msgspec

from gateway.core.admission import refusals
from gateway.core.admission.limits import Charge, LimitBook
from gateway.core.admission.mode import Mode
from gateway.core.admission.refusals import own_words
from gateway.core.engines.fleet import Fleet
from gateway.core.engines.models import model_list
from gateway.core.policy.snapshot import Snapshot
from gateway.core.request.call import Call
from gateway.core.request.classes import classify
from gateway.core.request.cost import CostModel
from gateway.core.request.outcome import Outcome, Refused
from gateway.core.request.record import Record
from gateway.core.request.tenants import MIRROR, Account
from gateway.decider.dispatch import Dispatch
from gateway.decider.grant import LocalGrant

UNREAD = "-"  # a class or a model, to a tenant that is refused before its body is read
LIST_WITHIN = 10.0  # seconds for engines to be asked what they have, before whoever asks for models
# Waits until every engine was asked for its models, or its argument is true; for so many seconds at most.
Asked = Callable[[Callable[[], object], float], Awaitable[None]]


async def _at_once(_: Callable[[], object], __: float) -> None:
    """Return at once, without sidecars to wait for."""


class LocalDecider(msgspec.Struct, eq=False):
    """Decider in this process. `asked` waits until every engine was asked for its models."""

    fleet: Fleet
    dispatch: Dispatch
    limits: LimitBook
    cost: CostModel
    asked: Asked
    clock: Callable[[], float]
    rng: random.Random
    reported: Asked = _at_once  # waits for sidecars' reports, where there are any

    @property
    def up(self) -> bool:
        fleet = self.fleet
        able = fleet.expected or any(
            engine.health.up
            and not engine.provider
            and (engine.transfers.answers or any(map(fleet.serving, engine.models)))
            for engine in fleet
        )
        return bool(able) and not self.dispatch.leaving

    def arrive(self, snapshot: Snapshot, account: Account, record: Record, now: float, body: bytes) -> LocalAdmission:
        admission = LocalAdmission(self, snapshot, account, record)
        if self.limits.limited and account.name != MIRROR:
            admission.arrive(now, body)
        return admission

    def ask(self, call: Call) -> Awaitable[LocalGrant]:
        return self.dispatch.ask(call)

    def learn(self, call: Call, prompt_tokens: int, completion_tokens: int) -> None:
        self.cost.learn(call, prompt_tokens, completion_tokens)

    def metered(self, tenant: str) -> bool:
        return self.limits.limited and self.limits.counts_tokens(tenant)

    def context(self, model: str) -> int | None:
        return self.fleet.context(model)

    def window(self, model: str) -> float:
        """Factor for the micro-batching window: 0.0 from brownout on, else 1.0."""
        traffic = self.dispatch.traffic.get(model)
        return 1.0 if traffic is None or traffic.level < Mode.BROWNOUT.value else 0.0

    async def models(self, path: bytes, account: Account, given_up: Callable[[], bool]) -> tuple[int, bytes]:
        if self.fleet.unasked:
            await self.asked(lambda: given_up() or self.dispatch.draining, LIST_WITHIN)
        had = self.dispatch.sidecars.models
        if not had.remembered <= had.names:
            await self.reported(
                lambda: had.remembered <= had.names or given_up() or self.dispatch.draining, LIST_WITHIN
            )
        providers = self.dispatch.policy.providers.values()
        hidden = {model for each in providers if account.name not in each.tenants for model in each.models}
        aliases, routes = self.dispatch.sidecars.models.aliases, self.dispatch.policy.models
        return model_list(self.fleet, path, account.models, aliases, routes, hidden)

    @property
    def uncertain(self) -> bool:
        """Whether a model may be had of which nobody has told yet."""
        return bool(self.fleet.unasked or self.dispatch.sidecars.models.remembered)

    async def known(self, call: Call, snapshot: Snapshot) -> None:
        """Wait until some engine has the model, or all were asked for theirs, and until a sidecar that had it before
        has reported; as long as the call's class waits."""
        route = snapshot.policy.models.get(call.asked_model) if call.asked_model else None
        names = (call.model,) if route is None else tuple([member.model for member in route.members])
        sidecars, dispatch = self.dispatch.sidecars, self.dispatch

        def known() -> bool:
            return any(self._up(name) or sidecars.models.knows(name) for name in names)

        if known():
            return
        each = snapshot.policy.classes[call.class_name]
        within = min(call.deadline - self.clock(), math.inf if each.ttft is None else each.ttft)
        until = self.clock() + within
        await self.asked(lambda: known() or dispatch.draining, within)

        def recalled() -> bool:
            return not any(self._up(name) for name in names) and any(map(sidecars.models.recalls, names))

        if recalled():
            await self.reported(lambda: not recalled() or dispatch.draining, until - self.clock())

    def _up(self, model: str) -> bool:
        """Whether an engine that is up has the model: one that is being asked may have told its models alone."""
        return any(engine.health.up for engine in self.fleet.serving(model))


class LocalAdmission:
    """Admission of one call, from its arrival to its end."""

    __slots__ = ("_account", "_arrived", "_charge", "_decider", "_record", "_snapshot")

    def __init__(self, decider: LocalDecider, snapshot: Snapshot, account: Account, record: Record) -> None:
        self._decider = decider
        self._snapshot = snapshot
        self._account = account
        self._record = record
        self._arrived: Charge | None = None  # what was taken from limits before the call was parsed
        self._charge: Charge | None = None  # what was taken for the call; it takes the other's place

    def arrive(self, now: float, body: bytes) -> None:
        """Count the request. Raises Refused."""
        try:
            self._arrived = self._decider.limits.arrive(self._account.name, now, body)
        except Refused as refused:
            self._in_own_words(refused, UNREAD, UNREAD)
            raise

    async def counted(self) -> None:
        """`arrive` has done it."""

    def judge(self, call: Call) -> Awaitable[None] | None:
        if self._decider.uncertain:
            return self._judge_known(call)
        self._judge(call)
        return None

    async def _judge_known(self, call: Call) -> None:
        await self._decider.known(call, self._snapshot)
        self._judge(call)

    def _judge(self, call: Call) -> None:
        """Judge by the engines that are known now."""
        decider, account, snapshot, record = self._decider, self._account, self._snapshot, self._record
        route = snapshot.policy.models.get(call.asked_model) if call.asked_model else None
        routes, exchange = decider.dispatch.routes, None
        if route is not None:
            exchange = routes.resolve(call, route, account, self._appraise)
        served = decider.fleet.serving(call.model)
        if not served:
            call.model = decider.dispatch.control.model_of(call.model)
            served = decider.fleet.serving(call.model)
        self._appraise(call)
        record.note(call)
        outside = decider.dispatch.control.rules.outside
        if outside and call.model in outside and not decider.dispatch.control.may_leave(call, call.model):
            raise self._unknown(call)
        if route is None and account.models and call.model not in account.models:
            raise refusals.forbidden_model(call)
        if not served and not decider.dispatch.sidecars.models.knows(call.model):
            raise self._unknown(call)  # before tokens are charged for it
        if decider.limits.limited and account.name != MIRROR:
            self._take(call)
        if exchange is not None:
            routes.exchange(call, exchange)

    def _take(self, call: Call) -> None:
        """Charge the call to its tenant's limits. Raises Refused."""
        try:
            self._charge = self._decider.limits.charge(
                self._account.name, call.class_name, call.model, call.cost, call.arrived, self._arrived, call.body
            )
        except Refused as refused:
            self._in_own_words(refused, call.class_name, call.model)
            raise

    def _unknown(self, call: Call) -> Refused:
        """The refusal of a call for a model that neither an engine nor a sidecar is known to have."""
        now = self._decider.clock()
        return refusals.refused(self._decider.dispatch.control.unknown(call.model, now), call, now)

    def _appraise(self, call: Call) -> None:
        """Estimate the call's tokens with its model, and find its class."""
        decider, account, rules = self._decider, self._account, self._snapshot.classes
        decider.cost.estimate_prompt(call)
        classify(call, rules, account.default_class, account.best)
        decider.cost.estimate_output(call, decider.fleet.context(call.model))

    def _in_own_words(self, refused: Refused, class_name: str, model: str) -> None:
        """A limit's refusal, as the tenant has it where it has words of its own."""
        account = self._account
        refused.jitter(self._decider.rng)
        if account.refusal is not None:
            body = own_words(
                account.refusal,
                refused,
                tenant=account.name,
                class_name=class_name,
                model=model,
                request_id=self._record.request_id,
            )
            refused.replace(account.refusal.status, body)

    def at_once(self, call: Call) -> LocalGrant | None:
        return self._decider.dispatch.first_at_once(call)

    def ask(self, call: Call) -> Awaitable[LocalGrant]:
        return self._decider.dispatch.wait(call)

    @property
    def charges(self) -> Iterator[Charge]:
        """Charges that the call has taken from limits."""
        return (charge for charge in (self._arrived, self._charge) if charge is not None)

    def settle(self, tokens: int, now: float) -> None:
        if self._charge is not None:
            self._charge.settle(tokens, now)

    def headers(self, now: float) -> bytes:
        return b"" if self._charge is None else self._charge.headers(now)

    def ended(self, outcome: Outcome) -> None:
        """Here the decider has heard all of it before."""

    def __enter__(self) -> LocalAdmission:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._charge is not None:
            self._charge.__exit__(kind, error, trace)
        if error is not None and self._arrived is not None and isinstance(error, Refused) and error.ours:
            self._arrived.refund()  # unless the charge has taken its place
