"""Shadow policy: a second policy that decides too and is obeyed by nobody, to see what would change.

The shadow is asked about each call with the facts that the enforced policy had: the same headers, the same estimate,
the queues and engines as they are under the enforced policy, its predicted wait, the engine it chose. Its limits and
modes have a state of their own: its buckets are charged and settled as the enforced ones, its modes step on the same
signals. So each decision is right for the traffic that there was. The traffic that the shadow itself would have made
(shorter queues, other engines) is not foreseen. Neither is its answer to calls that the enforced policy refused for
their form, nor what comes later in the queue (shed, displaced, expired).

Decisions, in the order they are taken: account, class, model, limit, mode, wait, room; each is `passed` or `refused`,
the class is its name. They are compared up to the first that either refuses. `outcome` is the whole of it. `deadline`
and `max_tokens` are compared as numbers: `equal`, or which is `less` and which is `more`. Where the two policies
predict lengths differently, or only one reads agent hints, so are `booked`, the tokens that a call books, and `turn`,
its place in its tenant's order. A decider in a process of its own has no bodies, and so no hints that only the shadow
would read. Where they differ in sessions, so are `engine` and `ahead` (sessions.py).
Equal words: no difference.

Nothing here may disturb a call: a bug is counted, the first is reported, and the call goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import ParamSpec, TypeVar

import msgspec

from gateway.core.admission.limits import Charge, LimitBook
from gateway.core.admission.mode import ModelMode, Signals
from gateway.core.admission.model_traffic import ModelTraffic
from gateway.core.admission.queues import Queues
from gateway.core.admission.quotas import Calendar
from gateway.core.admission.rules import AdmissionRules
from gateway.core.admission.witness import LimitWitness
from gateway.core.engines.fleet import Engine
from gateway.core.policy.policy import Policy
from gateway.core.policy.snapshot import Snapshot
from gateway.core.request.call import Call
from gateway.core.request.cost import CostModel
from gateway.core.request.outcome import Outcome, Refused
from gateway.core.request.tenants import Account
from gateway.core.shadow.sessions import SessionShadow
from gateway.core.shadow.verdict import ADMITTED, PASSED, REFUSED, Compared, Verdict, told

P = ParamSpec("P")
T = TypeVar("T")
Counts = dict[tuple[str, str, str], int]  # decision, enforced, shadow -> calls


class Arrival(msgspec.Struct, gc=False):
    """What the shadow does with a request before its body is read. `account`: what it makes of its client, in words;
    `charge` None: it would be refused, for its client where that is `refused`, else by a limit."""

    account: str
    charge: Charge | None


class Shadow:
    """The policy that is only asked. `report` is given the first exception that is a bug here, and must not raise.

    `counts()` is all that comes of it, `bugs` how often it failed.
    """

    def __init__(
        self,
        policy: Policy,
        report: Callable[[Exception], None],
        witness: LimitWitness | None = None,
        calendar: Calendar | None = None,
        cost: CostModel | None = None,
    ) -> None:
        """`cost`: the enforced policy's estimates, which learn for this one too. Raises ValueError for a policy that
        only looks right; see Tenants."""
        self.snapshot = Snapshot(policy)
        self.rules = AdmissionRules(policy)
        self.limits = LimitBook(policy, witness, calendar)
        self._compared: dict[Compared, int] = {}
        self._single: Counts = {}
        self.bugs = 0
        self.cost = cost
        self.sessions: SessionShadow | None = None  # where the two policies differ in sessions
        self._report = report
        self._modes: dict[str, ModelMode] = {}  # of models that some engine has
        self._calm = ModelMode(policy.modes)  # of the others

    def apply(self, policy: Policy, now: float) -> None:
        """Another shadow. Buckets and modes go on from where they are. Raises ValueError, and then nothing changed."""
        self.snapshot = Snapshot(policy)
        self.rules = AdmissionRules(policy)
        self.limits.apply(policy, now)
        for mode in self._modes.values():
            mode.apply(policy.modes)

    def beside(self, enforced: Policy) -> None:
        """The enforced policy is this one from now on; to be called after `apply` too."""
        policy = self.snapshot.policy
        if policy.sessions == enforced.sessions:
            self.sessions = None
        elif self.sessions is None:
            self.sessions = SessionShadow(self, policy)
        else:
            self.sessions.apply(policy)

    def arrive(self, account: Account, headers: Mapping[bytes, bytes], peer: str, now: float) -> Arrival | None:
        """A request of a client that the enforced policy knows as `account`: it is counted by the shadow's limits too.
        None: a bug."""
        return self.safely(self._arrive, account, headers, peer, now)

    def turned_away(self, arrival: Arrival | None, enforced: Outcome) -> None:
        """The enforced policy's limits refused the request, before its body was read."""
        if arrival is None:
            return
        self.count("account", PASSED, arrival.account)
        ours = ADMITTED if arrival.charge is not None else Outcome.RATE_LIMITED.value
        if arrival.account == REFUSED:
            ours = Outcome.UNAUTHORIZED.value
        else:
            self.count("limit", REFUSED, REFUSED if arrival.charge is None else PASSED)
        self.count("outcome", enforced.value, ours)

    def unknown(self, headers: Mapping[bytes, bytes], peer: str) -> None:
        """The enforced policy does not know who sent this."""
        self.safely(self._unknown, headers, peer)

    def judge(
        self,
        call: Call,
        account: Account,
        snapshot: Snapshot,
        headers: Mapping[bytes, bytes],
        peer: str,
        queues: Queues | None,
        traffic: ModelTraffic | None,
        engines: Sequence[Engine],
        now: float,
        arrival: Arrival | None = None,
        outage: float | None = None,
    ) -> Verdict | None:
        """What the shadow thinks of a call that is parsed, estimated and classified by the enforced `snapshot`, and not
        yet charged. `queues`, `traffic` and `engines` are those of its model, `arrival` is what `arrive` said,
        `outage` since how many seconds none of its engines may be given calls. None: a bug."""
        return self.safely(
            self._judge, call, account, snapshot, headers, peer, queues, traffic, engines, now, arrival, outage
        )

    def differences(self) -> dict[str, int]:
        """Decisions that differed, by kind."""
        found: dict[str, int] = {}
        for (decision, enforced, shadow), calls in self.counts().items():
            found[decision] = found.get(decision, 0) + (calls if enforced != shadow else 0)
        return found

    def compared(self, call: Compared) -> None:
        """Count a call with all its decisions: one addition, where each of them would be several microseconds."""
        self._compared[call] = self._compared.get(call, 0) + 1

    def count(self, decision: str, enforced: str, shadow: str) -> None:
        """Count one decision that is not among those."""
        key = decision, enforced, shadow
        self._single[key] = self._single.get(key, 0) + 1

    def counts(self) -> Counts:
        """Calls by decision, what was enforced, and what the shadow would have done. Equal words: no difference."""
        counts = dict(self._single)
        for call, calls in self._compared.items():
            for key in told(call):
                counts[key] = counts.get(key, 0) + calls
        return counts

    def safely(self, do: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """The only way in for whoever serves a call: what raises here is a bug, and no reason to fail the call."""
        try:
            return do(*args, **kwargs)
        except Exception as error:  # a question must not fail a call; it is counted and reported
            self.bugs += 1
            if self.bugs == 1:
                self._report(error)
            return None

    def _read(self, mode: ModelMode, signals: Signals, now: float) -> None:
        self.safely(mode.step, signals, now)

    def _unknown(self, headers: Mapping[bytes, bytes], peer: str) -> None:
        try:
            self.snapshot.tenants.identify(headers, peer)
        except Refused:
            self.count("account", REFUSED, REFUSED)
        else:
            self.count("account", REFUSED, PASSED)

    def _judge(
        self,
        call: Call,
        account: Account,
        snapshot: Snapshot,
        headers: Mapping[bytes, bytes],
        peer: str,
        queues: Queues | None,
        traffic: ModelTraffic | None,
        engines: Sequence[Engine],
        now: float,
        arrival: Arrival | None,
        outage: float | None,
    ) -> Verdict:
        verdict = Verdict(self, call, self._mode_of(call.model, traffic, engines), engines, now)
        verdict.judge(snapshot, account, headers, peer, arrival)
        verdict.foresee(queues, traffic)
        if outage is not None:
            verdict.hold(snapshot, outage)
        return verdict

    def _arrive(self, account: Account, headers: Mapping[bytes, bytes], peer: str, now: float) -> Arrival:
        try:
            theirs = self.snapshot.tenants.identify(headers, peer)
        except Refused:
            return Arrival(REFUSED, None)
        word = PASSED if theirs.name == account.name else "another"
        try:
            return Arrival(word, self.limits.arrive(theirs.name, now))
        except Refused:
            return Arrival(word, None)

    def _mode_of(self, model: str, traffic: ModelTraffic | None, engines: Sequence[Engine]) -> ModelMode:
        if not engines:
            return self._calm
        mode = self._modes.get(model)
        if mode is None:
            mode = self._modes[model] = ModelMode(self.snapshot.policy.modes)
        if traffic is not None and traffic.readings is None:
            traffic.readings = partial(self._read, mode)
        return mode
