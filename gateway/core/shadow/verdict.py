"""Verdict of a shadow policy on one call, beside the decision of the enforced policy; see shadow.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from typing import TYPE_CHECKING

import msgspec

from gateway.core.admission.deadline import breaks_a_promise
from gateway.core.admission.decision import SERVED, Reason
from gateway.core.admission.limits import Charge
from gateway.core.admission.mode import ModelMode
from gateway.core.admission.model_traffic import ModelTraffic
from gateway.core.admission.queues import Queues
from gateway.core.admission.ticket import Ticket, turn_by
from gateway.core.agent_hints import NO_HINTS, hints_of
from gateway.core.engines.choice import any_idle, least_ttft, usable_of
from gateway.core.engines.fleet import Engine, Hold
from gateway.core.policy.snapshot import Snapshot
from gateway.core.policy.traffic import LengthPolicy
from gateway.core.request.call import Call
from gateway.core.request.classes import classify
from gateway.core.request.cost import CostModel
from gateway.core.request.outcome import STATUS, Outcome, Refused
from gateway.core.request.tenants import Account

if TYPE_CHECKING:
    from gateway.core.shadow.shadow import Arrival, Shadow

NOBODY_WAITS = Queues({})
ACCOUNT, CLASS, MODEL, LIMIT, MODE, WAIT, ROOM, NONE = range(8)  # where a policy refused a call; NONE: it did not
STEPS = ("account", "class", "model", "limit", "mode", "wait", "room")
OUTCOMES = (
    Outcome.UNAUTHORIZED,
    Outcome.BAD_REQUEST,  # a class that the policy does not have
    Outcome.FORBIDDEN,
    Outcome.RATE_LIMITED,
    Outcome.SHED,
    Outcome.HOPELESS,
    Outcome.QUEUE_FULL,
)
REFUSED_AT = {
    Outcome.FORBIDDEN: MODEL,
    Outcome.RATE_LIMITED: LIMIT,
    Outcome.HOPELESS: WAIT,
    Outcome.QUEUE_FULL: ROOM,
}
# Refusals that are no policy's decision: what comes after them is not compared.
NOT_OF_POLICY = frozenset({
    Outcome.NOT_FOUND, Outcome.NO_ENGINE, Outcome.TOO_LARGE, Outcome.DRAINING, Outcome.MODEL_UNAVAILABLE, Outcome.BUG,
})  # fmt: skip
# What the client did: its request is not given back, as in Charge.
OF_THE_CLIENT = frozenset({outcome for outcome, advice in STATUS.items() if advice.status < 500} | {Outcome.EXPIRED})
LEFT_WAITING = frozenset({Outcome.CLIENT_GONE, Outcome.SLOW_CLIENT, Outcome.EXPIRED, Outcome.SHED})
ADMITTED, PASSED, REFUSED, HELD = "admitted", "passed", "refused", "held"
COMPARED = (("equal", "equal"), ("less", "more"), ("more", "less"))  # by the sign of what the shadow has more

# How a call was decided: the shadow's account in words, both classes, the sign of how much later the shadow's deadline
# is, where each refused it, the last decision that both were asked for, and the enforced outcome.
Compared = tuple[str, str, str, int, int, int, int, str]


class _Tier(msgspec.Struct, gc=False):
    service_tier: str | None = None


_decode_tier = msgspec.json.Decoder(_Tier).decode


class Verdict:
    """What the shadow thinks of one call, from its judgement to its end. `charge` is what it has taken from the
    shadow's buckets, if anything: it is settled with the enforced one, and what is left of it ends with the call."""

    __slots__ = (
        "_account", "_at", "_behind", "_call", "_decided", "_engines", "_full", "_idle", "_mode", "_own", "_refused",
        "_rules", "_shadow", "_shed", "_snapshot", "_ttft", "charge",
    )  # fmt: skip

    def __init__(self, shadow: Shadow, call: Call, mode: ModelMode, engines: Sequence[Engine], now: float) -> None:
        self.charge: Charge | None = None
        self._shadow = shadow
        self._rules = shadow.rules
        self._snapshot = shadow.snapshot  # a call goes by one policy, whatever is reloaded meanwhile
        self._call = call
        self._own = copy(call)  # to be given the shadow's class and deadlines
        self._mode = mode
        self._engines = engines
        self._at = now
        self._account = PASSED
        self._refused = NONE
        self._shed = False  # by the enforced policy's mode
        self._behind = False  # others wait already
        self._idle = False  # so does an engine, for calls
        self._full = False
        self._ttft: tuple[float, float, float] | None = None  # None: nobody waits, so it is asked when this call does
        self._decided = False

    def granted(self, engine: Engine, hold: Hold, ticket: Ticket | None) -> None:
        """The enforced policy has given the call this engine and hold; `ticket` is what it waited with, if it did."""
        self._shadow.safely(self._granted, engine, hold, ticket)

    def ended(self, outcome: Outcome) -> None:
        """The call is over. What was not granted is judged now."""
        self._shadow.safely(self._ended, outcome)

    # -- the shadow's own decisions -----------------------------------------------------------------------------

    def judge(
        self,
        snapshot: Snapshot,
        account: Account,
        headers: Mapping[bytes, bytes],
        peer: str,
        arrival: Arrival | None = None,
    ) -> None:
        """All that is known before the call has to wait, and before its tokens are charged by the enforced policy."""
        self._refused = self._judge(snapshot, account, headers, peer, arrival)
        if self._refused == MODE:
            self._refund()

    def _judge(
        self,
        snapshot: Snapshot,
        account: Account,
        headers: Mapping[bytes, bytes],
        peer: str,
        arrival: Arrival | None,
    ) -> int:
        rules, own = self._snapshot, self._own
        try:
            theirs = rules.tenants.identify(headers, peer)
        except Refused:
            return ACCOUNT
        if theirs.name != account.name:
            self._account = "another"
        own.asked_class = _asked_class(own, headers, snapshot, rules)
        if own.asked_class and own.asked_class not in rules.classes.rank:
            return CLASS
        classify(own, rules.classes, theirs.default_class, theirs.best)
        if theirs.hinted != account.hinted:
            _hint(own, theirs)
        foresees = theirs.hinted != account.hinted or rules.policy.lengths != snapshot.policy.lengths
        if foresees and own.asked and self._shadow.cost is not None:
            self._foresee_length(rules.policy.lengths, self._shadow.cost)
        if not theirs.allows_model(own.model):
            return MODEL
        arrived = None if arrival is None else arrival.charge
        if arrival is not None and arrived is None:
            return LIMIT
        if not self._engines:
            return NONE  # no tokens are charged for a model that nobody has
        limits = self._shadow.limits
        try:
            self.charge = limits.charge(theirs.name, own.class_name, own.model, own.cost, own.arrived, arrived)
        except Refused:
            return LIMIT
        return NONE if self._mode.refuses(own.class_name, own.prompt_tokens, rules.order) is None else MODE

    def _foresee_length(self, policy: LengthPolicy, cost: CostModel) -> None:
        """The tokens that the shadow would book, and where the call would stand in its tenant's order."""
        call, own = self._call, self._own
        cost.expect_by(own, policy)
        for decision, ours, theirs in (
            ("booked", own.output_tokens, call.output_tokens),
            ("turn", turn_by(own) - own.hinted_ahead, turn_by(call) - call.hinted_ahead),
        ):
            self._shadow.count(decision, *COMPARED[(ours > theirs) - (ours < theirs)])

    def foresee(self, queues: Queues | None, traffic: ModelTraffic | None) -> None:
        """What the call meets as it comes: the queues' room by the shadow's measure, the engines' speed, and whether
        the enforced policy's mode refuses it."""
        if traffic is not None and traffic.level:
            self._shed = traffic.refuses(self._call) is not None
        if self._refused == NONE:
            own, bounds, waiting = self._own, self._rules.bounds, queues or NOBODY_WAITS
            self._full = waiting.room(own, bounds) is not None and waiting.victim(own, bounds) is None
            if queues:
                self._behind = True
                self._idle = any_idle(usable_of(self._engines, self._at), own)
                self._ttft = self._least_ttft()

    def hold(self, snapshot: Snapshot, outage: float) -> None:
        """Whether each of the two lets the call wait for an engine to come back. `outage`: seconds so far."""
        if self._refused == NONE:
            theirs, own = [
                HELD if outage < each.policy.routing.hold_unserved else REFUSED for each in (snapshot, self._snapshot)
            ]
            self._shadow.count("hold", theirs, own)

    def _hopeless(self) -> bool:
        if not self._snapshot.policy.deadlines.predict or self._idle:
            return False
        start = self._at + self._call.predicted_wait
        return breaks_a_promise(self._own, start, *(self._ttft or self._least_ttft()))

    def _refused_a_place(self, predicted: bool) -> int:
        """Where a call that has to wait is refused, in the order of AdmissionControl."""
        for reason in SERVED:
            if reason is Reason.TOO_LATE and predicted and self._hopeless():
                return WAIT
            if reason is Reason.QUEUE_FULL and self._full:
                return ROOM
        return NONE

    def _least_ttft(self) -> tuple[float, float, float]:
        usable = usable_of(self._engines, self._at)
        return least_ttft(usable, self._own, self._at) if usable else (0.0, 0.0, 0.0)

    def _refund(self) -> None:
        if self.charge is not None:
            self.charge.refund()

    # -- beside the enforced ones -------------------------------------------------------------------------------

    def _granted(self, engine: Engine, hold: Hold, ticket: Ticket | None) -> None:
        booked = ticket is not None and ticket.since < ticket.pushed_at  # its place was promised: no wait is predicted
        self._compare(NONE, NONE, ADMITTED, waits=ticket is not None, predicted=not booked)
        call, own, rules = self._call, self._own, self._rules
        order = engine.policy.classes
        if engine.priorities and self._refused == NONE and call.class_name in order:  # no reload ended its class
            theirs, ours = list(order).index(call.class_name), rules.rank[own.class_name]
            self._shadow.count("priority", *COMPARED[(ours > theirs) - (ours < theirs)])
        if self._refused != NONE or not call.route.generates:
            return
        given = own.asked
        if rules.policy.shaping:
            watermark = engine.watermark(without=hold.tokens)
            given = rules.shaping.given(given, own.class_name, watermark, self._mode.mode)
        taken = call.shaped or call.asked
        self._shadow.count("max_tokens", *COMPARED[(given > taken) - (given < taken)])

    def _ended(self, outcome: Outcome) -> None:
        if not self._decided:
            self._refusal(outcome)
        if self.charge is not None:  # what was neither settled nor kept
            if outcome in OF_THE_CLIENT:
                self.charge.forgo()
            else:
                self.charge.refund()

    def _refusal(self, outcome: Outcome) -> None:
        """Compare what ended without a grant."""
        at = REFUSED_AT.get(outcome, NONE)
        if outcome is Outcome.SHED and self._shed:
            at = MODE
        until = NONE
        if outcome in NOT_OF_POLICY:
            until = MODE if self._engines else LIMIT
        early = at < WAIT  # it was never asked to wait; where others do, it would have been
        waits = at in (WAIT, ROOM) or (early and self._behind) or outcome in LEFT_WAITING
        enforced = ADMITTED if at == until == NONE else outcome.value
        self._compare(at, until, enforced, waits=waits, predicted=not early)
        if at != NONE and self._refused == NONE and self.charge is not None:
            self.charge.keep()  # the shadow would have let it run; what it would have used is not known

    def _compare(self, at: int, until: int, enforced: str, *, waits: bool, predicted: bool) -> None:
        """Count every decision that both have taken. `at`: where the enforced policy refused. `until`: before which
        decision something else ended the call. `waits`: it cannot start at once. `predicted`: how long was asked."""
        self._decided = True
        if self._refused == until == NONE and waits:
            self._refused = self._refused_a_place(predicted)
            if self._refused != NONE:
                self._refund()
        last = min(until - 1, ROOM if waits else MODE)
        theirs, own = self._call, self._own
        later = (own.deadline > theirs.deadline) - (own.deadline < theirs.deadline)
        self._shadow.compared(
            (self._account, theirs.class_name, own.class_name, later, at, self._refused, last, enforced)
        )


def _asked_class(call: Call, headers: Mapping[bytes, bytes], enforced: Snapshot, shadow: Snapshot) -> str:
    """The class a call asks for: by the header, which is the same for both, or by its tier, which may mean another."""
    if b"x-weir-class" in headers or shadow.calls.service_tiers == enforced.calls.service_tiers:
        return call.asked_class
    if b'"service_tier"' not in call.body or call.route.form:
        return ""
    return shadow.calls.service_tiers.get(_decode_tier(call.body).service_tier or "", "")


def _hint(call: Call, account: Account) -> None:
    """Give the call the agent hints that count in this account's calls. A body that stayed with a relay has none."""
    hints = NO_HINTS
    if account.hinted and not call.route.form:
        with suppress(Refused):  # for its form, which is not compared
            hints = hints_of(call.body)
    hints.given(call)


def told(compared: Compared) -> Iterator[tuple[str, str, str]]:
    """The decisions of such a call, each with what was enforced and what the shadow would have done."""
    account, enforced_class, shadow_class, later, at, ours, last, enforced = compared
    yield "account", PASSED, REFUSED if ours == ACCOUNT else account
    if ours > ACCOUNT:
        yield "class", enforced_class, REFUSED if ours == CLASS else shadow_class
    if ours > CLASS:
        yield "deadline", *COMPARED[later]
        for step in range(MODEL, min(at, ours, last) + 1):
            yield STEPS[step], REFUSED if at == step else PASSED, REFUSED if ours == step else PASSED
    of_policy = enforced == ADMITTED or at != NONE
    yield "outcome", enforced, OUTCOMES[ours].value if ours != NONE else ADMITTED if of_policy else enforced
