"""Members of a cluster in a simulation: they elect by a store who decides, and each relay is led to who does.

Elections and deciders are the code that runs as processes, the store is `cluster_store.py`. What passes between them
is in memory here: late, lost, carried out without an answer, or cut off. A process that is stopped does nothing until
it goes on, and then does all that came meanwhile.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Literal

from gateway.core.cluster.election import RENEW, TTL, Election, Leader, StoreView
from gateway.core.policy.policy import Policy
from gateway.decider.loading import Configuration
from gateway.serve.assembly import Gateway
from loadtest.lab.dst.case import DeciderFault, MemberFault
from loadtest.lab.dst.relays.cluster_store import SimulatedStore
from loadtest.lab.dst.relays.parts import Decider, Relay, closed
from loadtest.simulate.inprocess import GatewayTarget
from loadtest.simulate.memory_frames import FrameLink
from loadtest.simulate.relays import hub_of

if TYPE_CHECKING:
    from loadtest.lab.dst.relays.several_processes import SeveralProcesses

TICK = 0.05  # seconds between two looks at whether every relay has told what it holds
GIVEN_UP = 0.4  # seconds for the store to answer
STORE = "the store"
FOUND_AGAIN = 5.0  # seconds after a fault by which its member is one as before


class Member:
    """Gateway of one machine. `term`: what it decides with while it leads."""

    def __init__(self, cluster: Members, name: str, gateway: Gateway, before: Election | None) -> None:
        self.name = name
        self.gateway = gateway
        self.term: Decider | None = None
        self.alive = True
        self.stopped = False
        self._cluster = cluster
        self._processes = cluster.processes
        self._later: list[Callable[[], None]] = []  # what came while it was stopped
        self._followed = ""  # whom its relays were led to
        self.election = Election(name)
        if before is not None:
            self.election = Election(name, before.known, before.voted_until, before.roster)
        gateway.dispatch.set_lease(-math.inf)
        self._do(self._turn)
        self._do(self._watch)

    def _do(self, what: Callable[[], None]) -> None:
        """Now, or once it goes on."""
        if self.alive and self.stopped:
            self._later.append(what)
        elif self.alive:
            what()

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        self._processes.loop.call_later(seconds, self._do, what)

    # -- the store, and votes -----------------------------------------------------------------------------------

    def _turn(self) -> None:
        cluster, election, sent = self._cluster, self.election, self._processes.loop.time()
        turn = election.turn(sent)
        answered: list[StoreView | None] = []

        def carried_out() -> None:
            view = cluster.store.turn(self.name, turn, self._processes.loop.time())
            if cluster.reach(self.name, STORE):
                self.after(cluster.delay(), partial(answer, view))

        def answer(view: StoreView | None) -> None:
            if answered:
                return
            answered.append(view)
            now = self._processes.loop.time()
            if view is None:
                election.failed()
                cluster.unanswered(self.name)
                self._ask_for_votes(sent)
            else:
                election.answered(sent, now, turn, view)
            self._changed()
            self.after(RENEW, self._turn)

        if cluster.reach(self.name, STORE):
            self._processes.loop.call_later(cluster.delay(), carried_out)
        self.after(cluster.delay() / 10 if cluster.refusing else GIVEN_UP, partial(answer, None))

    def _ask_for_votes(self, sent: float) -> None:
        leader = self.election.leader
        for name in sorted(self.election.voters):
            other = self._cluster.members.get(name)
            if leader is not None and other is not None and self._cluster.reach(self.name, name):
                other.after(self._cluster.delay(), partial(other.vote_for, leader, self, sent))

    def vote_for(self, leader: Leader, by: Member, sent: float) -> None:
        voted = self.election.vote(leader, self._processes.loop.time())
        if voted and self._cluster.reach(self.name, by.name):
            by.after(self._cluster.delay(), partial(by.count_vote, self.name, leader.epoch, sent))

    def count_vote(self, name: str, epoch: int, sent: float) -> None:
        self.election.record_vote(name, epoch, sent)
        self._changed()

    # -- the leader, as gateway/serve/cluster/port.py has it ------------------------------------------------------

    def _changed(self) -> None:
        epoch = 0 if self.term is None else self.term.hub.epoch
        if self.election.term != epoch:
            old, self.term = self.term, None
            if old is not None:
                self._processes.soon(old.ends())
            if self.election.term:
                self._leads(self.election.term)
        line = repr(self.election.leader)
        if line != self._followed:
            self._followed = line
            self._processes.tell(f"{self.name}: {line}")
            for relay in self._cluster.relays_of(self.name):
                if relay.link is not None:
                    relay.link.closed_by(relay.link.decider)
        if self.term is not None:
            self.term.owed &= {
                relay.pid for relay in self._processes.relays if relay.machine in self.election.members | {self.name}
            }
        self._set_lease()

    def _leads(self, epoch: int) -> None:
        processes, election = self._processes, self.election
        known = election.awaited | {self.name}
        owed = {relay.number: relay.pid for relay in processes.relays if relay.dead_at < 0.0 and relay.machine in known}
        hub = hub_of(self.gateway, epoch, owed, lives=self._lives, deposed=self._deposed)
        self.term = Decider(self.gateway, hub, self.name)
        self.term.owed = {
            relay.pid
            for relay in processes.relays
            if relay.dead_at < 0.0 and relay.machine in election.members | {self.name}
        }
        self._cluster.deciders.append(self.term)
        processes.laws.begins(self.term)
        processes.tell(f"{self.name} leads in epoch {epoch}")

    def _deposed(self, epoch: int) -> None:
        self.election.observe(epoch, self._processes.loop.time())
        self._processes.loop.call_soon(self._do, self._changed)

    def _lives(self, pid: int) -> bool:
        relay = next(each for each in self._processes.relays if each.pid == pid)
        if relay.machine == self.name:
            return relay.dead_at < 0.0
        return self.election.blind(self._processes.loop.time()) or relay.machine in self.election.members

    def _set_lease(self) -> None:
        if self.term is not None and self.term.hub.complete:
            for name in list(self.election.awaited):
                self.election.synced(name)
        self.gateway.dispatch.set_lease(self.election.lease_until(self._processes.loop.time()))

    def _watch(self) -> None:
        self._set_lease()
        self.after(TICK, self._watch)

    # -- what befalls it ----------------------------------------------------------------------------------------

    def stop(self) -> None:
        """SIGSTOP, or a machine that is paused."""
        self.stopped = True
        for link in self._links():
            link.hold()

    def resume(self) -> None:
        """SIGCONT: its clock says by now that its lease is over, if it is."""
        if not self.alive:
            return
        self.stopped = False
        later, self._later = self._later, []
        for what in later:
            self._do(what)
        for link in self._links():
            link.release()

    def _links(self) -> list[FrameLink]:
        """Connections of its own relays, which go through it, and of all relays for which it decides."""
        own = [relay.link for relay in self._cluster.relays_of(self.name)]
        there = [] if self.term is None else list(self.term.links.values())
        return [link for link in dict.fromkeys([*own, *there]) if link is not None and link.up]

    def kill(self) -> None:
        """SIGKILL of its decider: its relays live on."""
        self.alive = False
        for link in self._links():
            link.closed_by(link.decider)
        term, self.term = self.term, None
        self._processes.soon(_ended(term, self.gateway))


async def _ended(term: Decider | None, gateway: Gateway) -> None:
    if term is not None:
        await term.ends()
    await closed(gateway)


class Members:
    """Members of a cluster and the network between them, with the decider that each relay reaches, as `OneDecider` has
    it for one machine."""

    def __init__(self, processes: SeveralProcesses) -> None:
        self.processes = processes
        self.store = SimulatedStore()
        self.members: dict[str, Member] = {}
        self.deciders: list[Decider] = []  # one for each term
        self._troubled: dict[str, float] = {}  # until when what befell a member may keep it from others
        self._away_until = 0.0  # nobody reaches the store
        self.refusing = 0  # what stands before the store refuses, for so many faults
        self._cuts: list[frozenset[str]] = []
        self._rng = random.Random(f"members {processes.case.seed}")  # noqa: S311 # a simulation

    def begin(self) -> GatewayTarget:
        """All members, in the beginning; one of their targets."""
        targets = [self._begin(f"member-{number}", None) for number in range(self.processes.case.members)]
        return targets[0]

    def _begin(self, name: str, before: Election | None) -> GatewayTarget:
        target = self.processes.target()
        self.members[name] = Member(self, name, target.gateway, before)
        return target

    def _again(self, name: str, before: Election) -> None:
        if not self.processes.world.wrong:
            self._begin(name, before)

    def machine(self, relay: int) -> str:
        """Machine of a relay of this number."""
        return f"member-{relay % self.processes.case.members}"

    def relays_of(self, name: str) -> list[Relay]:
        """Relays that live on this machine."""
        return [relay for relay in self.processes.relays if relay.dead_at < 0.0 and relay.machine == name]

    def reach(self, one: str, other: str) -> bool:
        """Whether anything passes between these."""
        return one == other or frozenset((one, other)) not in self._cuts

    def unanswered(self, name: str) -> None:
        """A turn of this member has had no answer; where others have theirs, it may be taken for gone by them."""
        now = self.processes.loop.time()
        if now > self._away_until + TTL:
            self._troubled[name] = max(now + FOUND_AGAIN, self._troubled.get(name, 0.0))

    def untroubled(self, one: str, other: str) -> bool:
        """Whether these two are members as ever, whatever befell the store, and have been for a while."""
        now = self.processes.loop.time()
        return all(now > self._troubled.get(name, FOUND_AGAIN) for name in (one, other))

    def delay(self) -> float:
        """Draw the seconds that a message takes between members or to the store."""
        return self._rng.choice((0.001, 0.001, 0.05, self._rng.uniform(0.0, 0.6)))

    # -- as OneDecider ------------------------------------------------------------------------------------------

    def reached(self, relay: Relay) -> Decider | None:
        """The decider that a relay is led to by that of its own machine; None: there is none."""
        own = self.members[relay.machine]
        leader = own.election.leader
        if not own.alive or own.stopped or leader is None:
            return None
        other = self.members[leader.name]
        if not other.alive or other.stopped or not self.reach(relay.machine, leader.name):
            return None
        return other.term

    def look(self) -> None:
        """Nothing is saved: what is learned is not looked at here."""

    def apply(self, policy: Policy) -> None:
        """A reload, on every machine."""
        for member in self.members.values():
            if member.alive:
                member.gateway.apply(Configuration(policy, {}))
                if member.term is not None:
                    member.term.hub.apply(member.gateway.current.snapshot, b"a secret of cache salts")

    def befalls(self, event: DeciderFault) -> None:
        """The leader dies, or stops."""
        what: Literal["kill", "stop"] = "kill" if event.what == "kill" else "stop"
        self.befalls_member(MemberFault(at=event.at, what=what, member=-1, seconds=event.seconds))

    def befalls_member(self, event: MemberFault) -> None:
        """See MemberFault."""
        loop, member = self.processes.loop, self.members.get(f"member-{event.member}", self._leader())
        if event.what == "emptied":
            self.store.clear()
            return
        if event.what == "refused":
            self._away_until = max(self._away_until, loop.time() + event.seconds)
            self.refusing += 1
            loop.call_later(event.seconds, self._accepts)
            return
        if event.what in {"kill", "reboot", "stop", "cut", "parted"}:
            until = loop.time() + event.seconds + FOUND_AGAIN
            self._troubled[member.name] = max(until, self._troubled.get(member.name, 0.0))
        else:
            self._away_until = max(self._away_until, loop.time() + event.seconds)
        if event.what in {"cut", "parted", "lost", "began_anew"}:
            self._cut(event, member.name)
        elif not member.alive or member.stopped:
            return
        elif event.what == "stop":
            member.stop()
            loop.call_later(event.seconds, member.resume)
        else:
            member.kill()
            if event.what == "reboot":
                for relay in self.relays_of(member.name):
                    self.processes.kill_relay(relay, event.seconds)
            loop.call_later(event.seconds, self._again, member.name, member.election)

    def _accepts(self) -> None:
        self.refusing -= 1

    def _leader(self) -> Member:
        """The leader; any, where nobody does."""
        return next((each for each in self.members.values() if each.alive and each.term), self.members["member-0"])

    def _cut(self, event: MemberFault, name: str) -> None:
        others = [other for other in self.members if other != name]
        pairs = {
            "cut": [frozenset((name, STORE))],
            "parted": [frozenset((name, other)) for other in others],
            "lost": [frozenset((each, STORE)) for each in self.members],
        }["lost" if event.what == "began_anew" else event.what]
        if event.what == "began_anew":
            self.processes.loop.call_later(event.seconds, self.store.clear)
        self._cuts += pairs
        links = [link for pair in pairs for link in self._links_between(pair)]
        for link in links:
            link.hold()
        self.processes.loop.call_later(event.seconds, self._heal, pairs, links)

    def _links_between(self, pair: frozenset[str]) -> list[FrameLink]:
        """Connections of relays of either member of a pair for which the other member decides."""
        return [
            relay.link
            for relay in self.processes.relays
            if relay.link is not None and relay.link.up
            for member in self.members.values()
            if member.term is not None and relay.link is member.term.links.get(relay.pid)
            if {relay.machine, member.name} == pair
        ]

    def _heal(self, pairs: list[frozenset[str]], links: list[FrameLink]) -> None:
        for pair in pairs:
            self._cuts.remove(pair)
        for link in links:
            if self._rng.random() < 0.5:
                link.release()
            else:
                link.cut(ConnectionResetError("it was lost in between"))

    async def aclose(self) -> None:
        """End all members."""
        for member in self.members.values():
            if member.alive:
                member.kill()
