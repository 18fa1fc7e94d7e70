"""Bugs planted in relays, frames and their decider's side."""

from __future__ import annotations

from gateway.core.cluster.election import Election
from gateway.core.engines.speed import Speed
from gateway.decider.grant import LocalGrant
from gateway.decider.local import LocalAdmission
from gateway.decider.relays.driver import CallDriver
from gateway.decider.relays.hub import RelayHub
from gateway.decider.relays.resync import Resync
from gateway.decider.relays.served import ServedCall
from gateway.decider.relays.session import RelaySession
from gateway.relay.mirror import Mirrors
from gateway.relay.remote.asked import AskedCall
from gateway.relay.remote.link import Link
from loadtest.lab.dst.relays.cluster_store import SimulatedStore
from tests.simulation.mutants import Mutant

# The end of a call that comes twice, with its question before it, is settled twice.
SETTLED_TWICE = Mutant(
    RelaySession, "_call_ended", "self.calls.pop(end.number, None)", "self.calls.get(end.number)"
)  # fmt: skip

# A question of an earlier connection opens its call anew, which nobody will end.
OPENED_ANEW = Mutant(Resync, "is_over", "return self.done and number <= self.last", "return False")

# What a dead relay's calls hold does not come back.
HELD_BY_THE_DEAD = Mutant(RelayHub, "_watch", "if kept.hello and not self._lives(kept.hello.pid)", "if False")

# What a prompt holds at the engine that reads it for another does not come back.
PROMPT_KEPT = Mutant(LocalGrant, "close", "self.half.close()", "pass")

# What a relay's calls hold comes back when its connection breaks, though they run on.
GIVEN_AWAY = Mutant(
    RelayHub,
    "leaves",
    "if session.calls:",
    "for served in session.calls.values():\n            served.lost()\n        if False:",
)

# A new decider grants as soon as one relay has told what it holds.
GRANTS_UNTOLD = Mutant(RelayHub, "release", "if self._expected:", "if False:")

# A call whose engine has failed is granted another before all have told.
MOVES_UNTOLD = Mutant(CallDriver, "_move", "await self._hub.until_synced()", "pass")

# A call keeps a class that the next decider's policy has not.
CLASS_GONE = Mutant(ServedCall, "go_by", "snapshot.classes.known(call.asked_class)", 'call.asked_class or "default"')

# A relay does not tell of the grants that it has.
HELD_UNTOLD = Mutant(AskedCall, "held", "for terms in (self.terms, self.second):", "for terms in (self.second,):")

# Whatever answer comes is the answer, also an earlier decider's.
OLD_ANSWER = Mutant(
    AskedCall, "take", "if self.question is None or message.turn != self.question.turn:", "if self.question is None:"
)

# Calls that waited are asked for again in any order.
OUT_OF_ORDER = Mutant(RelayHub, "release", "in sorted(asked, key=lambda each: each[:2])", "in asked")

# A decider does not hear that a client has left.
CANCEL_LOST = Mutant(AskedCall, "finish", "self.link.send(end)", "(left == 'cancelled' or self.link.send(end))")

# A new decider takes one of an engine's rates for another.
LEARNED_WRONG = Mutant(Speed, "restore", "= saved.tpot, saved.pace", "= saved.pace, saved.tpot")

# The leader grants beyond its lease.
NO_FENCE = Mutant(Election, "lease_until", "return self._lease if synced", "return math.inf if synced")

# Who is elected waits for nobody.
WAITS_FOR_NOBODY = Mutant(Election, "answered", "self.awaited = set(view.members)", "self.awaited = set()")

# Who is elected by a store that was emptied grants at once.
TRUSTS_EMPTIED = Mutant(Election, "_renew", "if forgot and now >= self._lease:", "if False:")

# A store that was emptied begins its epochs anew.
EPOCHS_ANEW = Mutant(SimulatedStore, "turn", "max(epoch + 1, round(now * 1e6))", "epoch + 1")

# A copy of a call for a mirror is its caller's.
COPY_OF_THE_CALLERS = Mutant(
    Mirrors, "drawn", "snapshot.tenants.mirror, record)", "snapshot.tenants.accounts[call.tenant], record)"
)

# A copy of a call for a mirror is charged.
COPY_CHARGED = Mutant(LocalAdmission, "_judge", " and account.name != MIRROR", "")

# What waited is not asked for again.
FORGOTTEN = Mutant(Link, "_welcome", "if question is not None:", "if False:")

# Calls wait for a decider beyond their deadline.
NEVER_LATE = Mutant(Link, "refuse_late", "now >= call.deadline", "False")

# A store that was lost or emptied is believed when it does not name a member.
TAKEN_FOR_GONE = Mutant(
    Election, "blind", "return self.lost_store or now < self._blind_until", "return self.lost_store"
)
