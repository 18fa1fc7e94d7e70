"""Laws of relays and their decider, at every moment and whatever befalls them.

- Nothing is promised over an engine's budget: no decider grants what does not fit beside all that living relays have,
  and its ledger has at least that.
- A prompt that another engine reads is held there once, and nowhere once its grant is given back.
- Nothing is settled twice: a decider hears the end of a call once, and no call is charged as two, unless the first
  grant was on its way when its decider died.
- A relay obeys one decider: each grant is of the epoch that it has met last, and no two deciders share an epoch.
- No decider grants once one of a later epoch has.
- A decider grants nothing before it has been told, and asks in the order of arrival.
- No call is forgotten: what a relay waits for, its decider knows of.
- All that a dead relay's calls held comes back within a second.
- A decider that begins has what the one before had learned, no fuller limits, and no holds.

That every call is answered or refused, and by its deadline, is looked at where clients are (`several_processes.py`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from gateway.core.admission.queues import Ticket
from gateway.core.checkpoint import decoded
from gateway.core.engines.choice import Choice
from gateway.core.engines.hold import Hold
from gateway.core.request.call import Call
from gateway.decider.grant import LocalGrant
from gateway.decider.relays.session import RelaySession
from gateway.frames.messages import GrantTerms, MoveAsk
from gateway.serve.assembly import Gateway
from loadtest.lab.dst.relays.members import Members
from loadtest.lab.dst.relays.one_decider import OneDecider
from loadtest.lab.dst.relays.parts import Decider, Relay

if TYPE_CHECKING:
    from loadtest.lab.dst.world import World

ARRIVES = 3.0  # seconds that a question may be held back, and a little more
WITHIN = 1.0  # seconds after a relay's death by which all it held is back


class RelayLaws:
    """`rule` has all deciders that there have been, and `relays` are all relays."""

    def __init__(self, world: World, rule: OneDecider | Members, relays: Sequence[Relay]) -> None:
        self.tell, self.wrong = world.tell, world.found
        self._rule, self._relays, self._untroubled = rule, relays, rule.untroubled
        self._loop = asyncio.get_running_loop()
        self._obeyed: dict[int, GrantTerms] = {}  # by identity: terms that were looked at, kept alive
        self._unknown: dict[tuple[int, int], float] = {}  # a relay's process and a call's number -> since when
        self._epochs: set[int] = set()
        self._granted = 0  # the highest epoch in which was granted
        self._granters: dict[str, Decider] = {}  # who has granted a call last, by its id
        self._lost: set[tuple[str, int]] = set()  # calls that are asked for again as their grants were lost, and epochs

    def restored(self, gateway: Gateway, state: bytes) -> None:
        """A decider has begun with a checkpoint: it has what was learned, no limit is fuller, and nothing is held."""
        before, after = decoded(state), decoded(gateway.checkpoints.take())
        levels = {each.key: each.level for each in before.limits.buckets}
        for bucket in after.limits.buckets:
            if bucket.level > levels.get(bucket.key, 0.0):
                self.wrong(f"{bucket.key} was at {levels.get(bucket.key)}, and is restored at {bucket.level}")
        for engine in gateway.fleet:
            if engine.ledger.held or engine.ledger.in_flight:
                self.wrong(f"{engine!r} begins with calls that no relay has told of")
        rates = {each.id: (each.prefill_rate, each.tpot, each.trim) for each in before.engines}
        for each in after.engines:
            if each.id in rates and rates[each.id] != (each.prefill_rate, each.tpot, each.trim):
                self.wrong(f"{each.id} had {rates[each.id]}, and is restored as {each}")

    def begins(self, decider: Decider) -> None:
        """Look at this decider from now on."""
        if decider.hub.epoch in self._epochs:
            self.wrong(f"two deciders have the epoch {decider.hub.epoch}")
        self._epochs.add(decider.hub.epoch)
        decider.gateway.dispatch.witness = DispatchLaws(decider, self)

    # -- at rest ------------------------------------------------------------------------------------------------

    def at_rest(self) -> None:
        """Nothing is left to be done at this moment."""
        now = self._loop.time()
        living = {relay.pid: relay for relay in self._relays if relay.dead_at < 0.0}
        asking = [relay for relay in living.values() if relay.side.link.calls]  # at most moments there is none
        for decider in self._rule.deciders:
            if decider.dead:
                continue
            if decider.hub.complete and decider.complete_at < 0.0:
                decider.complete_at = now
            if decider.owed:
                decider.owed -= decider.known()
            self._compare(decider, asking, now)
            self._given_back(decider, now)
            if asking:
                self._known(decider, living, now)
        self._one_decider(asking)

    def _known(self, decider: Decider, living: Mapping[int, Relay], now: float) -> None:
        """Compare what a relay asks for with what its decider knows, once that has had time to arrive."""
        for session in decider.hub.sessions:
            relay = living.get(session.hello.pid) if session.resync.done and session.hello else None
            if relay is None or relay.link is not decider.links.get(relay.pid):
                continue
            for number, asked in relay.side.link.calls.items():
                known = asked.question is None or number in session.calls or number in session.waiting
                if known or (relay.link is not None and relay.link.held):
                    self._unknown.pop((relay.pid, number), None)
                elif now > self._unknown.setdefault((relay.pid, number), now) + ARRIVES:
                    self.wrong(f"relay {relay.number} asks for call {number}, and its decider does not know of it")

    def _compare(self, decider: Decider, asking: Iterable[Relay], now: float) -> None:
        """Compare a decider's ledgers with what it keeps of calls and with what relays have."""
        held: dict[str, int] = {}
        for grant in grants(decider):
            for hold in (grant.hold, None if grant.half is None else grant.half.hold):
                if hold is not None and hold.live:
                    held[hold.engine.id] = held.get(hold.engine.id, 0) + hold.tokens
        complete = asking and decider.hub.complete and now < decider.gateway.dispatch.lease_until
        promised = self._promises(decider, asking) if complete else {}
        for engine in decider.gateway.fleet:
            has, theirs = held.get(engine.id, 0), promised.get(engine.id, 0)
            if engine.ledger.held != has:
                self.wrong(f"the ledger of {engine.id} has {engine.ledger.held} tokens, its calls hold {has}")
            if theirs > engine.ledger.held:
                self.wrong(f"relays have {theirs} tokens of {engine.id}, its ledger has {engine.ledger.held}")

    def promised(self, decider: Decider, engine: str) -> int:
        """Tokens of an engine that calls of living relays may use, as far as a decider must know of them."""
        return self._promises(decider, [relay for relay in self._relays if relay.dead_at < 0.0])[engine]

    def _promises(self, decider: Decider, living: Iterable[Relay]) -> Counter[str]:
        """Count the tokens promised on each engine. A cluster's relay that the decider does not know is skipped unless
        the two machines reach each other."""
        known = decider.known() if decider.machine else None
        promised: Counter[str] = Counter()
        for relay in living:
            if known is not None and relay.pid not in known and not self._untroubled(relay.machine, decider.machine):
                continue
            for asked in relay.side.link.calls.values():
                if isinstance(asked.question, MoveAsk):
                    continue  # it has given that back
                for terms in (asked.terms, asked.second):
                    if terms is not None:
                        promised[terms.engine.id] += terms.tokens
        return promised

    def granting(self, decider: Decider, call: Call) -> None:
        """Judge a decider that is about to grant: none of a later epoch has, and all that it waits for was told."""
        epoch = decider.hub.epoch
        if epoch < self._granted:
            self.wrong(f"a decider of epoch {epoch} grants, and another of epoch {self._granted} has")
        self._granted = max(self._granted, epoch)
        self.asked_for(decider, call)
        self._granters[call.request_id] = decider
        missing = decider.owed - decider.known()
        untold = [each.number for each in self._relays if each.dead_at < 0.0 and each.pid in missing]
        if untold:
            self.wrong(f"epoch {epoch} grants, and the relays {untold} have not told it what they hold")

    def asked_for(self, decider: Decider, call: Call) -> None:
        """A call asks for an engine. Where an earlier decider has granted it one, and its relay has not heard of that,
        it is charged anew: a checkpoint may have the first charge, as of a call that runs."""
        if self._granters.get(call.request_id, decider) is not decider:
            asked = [each for relay in self._relays for each in relay.side.link.calls.values()]
            if any(each.terms is None and each.call and each.call.request_id == call.request_id for each in asked):
                self._lost.add((call.request_id, decider.hub.epoch))

    def _given_back(self, decider: Decider, now: float) -> None:
        """Check that the calls of relays dead for WITHIN seconds are given back. Calls of another machine's relay come
        back only with the next relay of its number, so they are not checked here."""
        gone = [each for each in self._relays if 0.0 <= each.dead_at < now - WITHIN]
        dead = {relay.pid for relay in gone if relay.machine == decider.machine}
        left = [list(calls) for pid, calls in orphans(decider) if pid in dead and calls] if dead else []
        if left:
            self.wrong(f"a relay is dead for {WITHIN:g} s, and of its calls there are still {left}")

    def _one_decider(self, living: Iterable[Relay]) -> None:
        for relay in living:
            for asked in relay.side.link.calls.values():
                for terms in (asked.terms, asked.second):
                    if terms is not None and id(terms) not in self._obeyed:
                        self._obeyed[id(terms)] = terms
                        if terms.epoch != relay.side.link.epoch:
                            self.wrong(
                                f"relay {relay.number} obeys a grant of epoch {terms.epoch}, and has met "
                                f"epoch {relay.side.link.epoch}"
                            )

    # -- at the end ---------------------------------------------------------------------------------------------

    def left(self, calls: int) -> Iterator[str]:
        """Nothing is asked any more, of so many `calls` in all: what of them is left, in words."""
        for decider in self._rule.deciders:
            if not decider.dead:
                counted = decider.gateway.limits.level(("requests", "", "", ""))
                if counted > calls + len(self._lost):
                    yield f"{counted:.0f} requests are counted of {calls}"
                dispatch = decider.gateway.dispatch
                known = [list(calls) for _, calls in orphans(decider) if calls]
                queued = [ticket.call.request_id for queues in dispatch.queues.values() for ticket in queues]
                held = {
                    engine.id: engine.ledger.held
                    for engine in dispatch.fleet
                    if engine.ledger.held or engine.ledger.in_flight
                }
                if known or queued or held or any(dispatch.running.values()):
                    yield f"left behind: calls {known}, queues {queued}, ledgers {held}"
        for relay in self._relays:
            if relay.dead_at < 0.0 and relay.side.link.calls:
                yield f"relay {relay.number} still asks: {list(relay.side.link.calls)}"


def orphans(decider: Decider) -> Iterator[tuple[int, dict[int, object]]]:
    """The calls that a decider knows of, by their relays' processes."""
    for session in (*decider.hub.sessions, *decider.hub.orphans.values()):
        if session.hello is not None:
            yield session.hello.pid, {**session.known}


def grants(decider: Decider) -> Iterator[LocalGrant]:
    """All that a decider has granted and not had back."""
    for session in (*decider.hub.sessions, *decider.hub.orphans.values()):
        for served in session.known.values():
            if served.grant is not None:
                yield served.grant
            if served.second is not None:
                yield served.second


class DispatchLaws:
    """Witness of one decider's grants."""

    def __init__(self, decider: Decider, laws: RelayLaws) -> None:
        self._decider, self._laws, self._wrong, self._tell = decider, laws, laws.wrong, laws.tell
        self._loop = asyncio.get_running_loop()
        self._corrected: set[Ticket] = set()
        self._prompts: dict[str, Hold] = {}  # holds of prompts that another engine reads, by call
        self._asked = -1.0  # the arrival of the last call that was asked for when all had told
        self._told: list[RelaySession] = []  # by then

    def granting(self, call: Call, choice: Choice, now: float, ticket: Ticket | None) -> None:
        """The call is about to be given this engine."""
        decider, engine = self._decider, choice.engine
        self._tell(f"grant {call.request_id} on {engine.id}, epoch {decider.hub.epoch}")
        if not decider.hub.complete:
            self._wrong(f"call {call.request_id} is granted {engine.id} before all relays have told what they hold")
        if now >= call.deadline:
            self._wrong(f"call {call.request_id} is granted {engine.id} {now - call.deadline:.4f} s past its deadline")
        self._laws.granting(decider, call)
        promised = self._laws.promised(decider, engine.id)
        if engine.ledger.held < promised:
            self._wrong(f"{engine.id} is granted with {engine.ledger.held} tokens held, and relays have {promised}")
        within = engine.ledger.load < engine.ledger.budget and engine.ledger.load + call.cost <= engine.ledger.ceiling
        alone = not promised and not engine.ledger.in_flight and call.cost <= engine.ledger.largest
        if engine.ledger.in_flight >= engine.ledger.slots or not (alone or within):
            self._wrong(f"call {call.request_id} is granted {engine!r}, which has no room for {call.cost} tokens")
        if ticket is None:
            self._in_order(call)

    def entering(self, call: Call, exclude: frozenset[str], *, front: bool) -> None:
        """The call was not granted at once."""
        self._laws.asked_for(self._decider, call)
        if not front:
            self._in_order(call)

    def _in_order(self, call: Call) -> None:
        """In the moment in which all have told, what is asked again is so in the order of the calls' arrival. Those
        that may share an engine's answer are not among them: they have waited for others of their kind first. Nor are
        those of a relay that tells only then: a cluster's leader does not wait for a machine that is past its time in
        the store. Calls for a model route wait until an engine has told that it has one of its models."""
        hub = self._decider.hub
        if self._decider.complete_at >= 0.0 or hub.first or call.route.merges or call.asked_model:
            return
        if self._asked < 0.0:
            self._told = [session for session in hub.sessions if session.resync.done]
        waited = (served.call for session in self._told for served in session.calls.values() if served.ask.turn)
        if call.arrived < self._asked and any(each is call for each in waited):
            self._wrong(f"call {call.request_id} came at {call.arrived:.4f}, and is asked for after a later one")
        self._asked = max(self._asked, call.arrived)

    def correcting(self, ticket: Ticket, prompt_tokens: int, completion_tokens: int) -> None:
        """Note what a call that waited has really used, which is about to be charged to its tenant."""
        if ticket in self._corrected:
            self._wrong(f"call {ticket.call.request_id} is settled for the second time")
        self._corrected.add(ticket)

    def prefilling(self, call: Call, hold: Hold) -> None:
        """A prompt is held on the engine that reads it for another."""
        self._tell(f"prompt of {call.request_id} on {hold.engine.id}")
        last = self._prompts.get(call.request_id)
        if last is not None and last.live:
            self._wrong(f"the prompt of {call.request_id} is held twice")
        self._prompts[call.request_id] = hold

    def prefilled(self, call: Call, hold: Hold) -> None:
        """Note that the prompt is held no longer."""
        self._tell(f"prompt of {call.request_id} is given back on {hold.engine.id}")

    def _ignored(self, *_: object, **__: object) -> None:
        """Ignore every other event."""

    applying = refused = pushing = popping = popped = granted = moved_free = retried = corrected = _ignored
