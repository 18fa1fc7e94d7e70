"""Store of a cluster in virtual time: what the script of `gateway/serve/cluster/store.py` does to the keys of a Valkey.

A turn that was carried out may still have no answer: that is for whoever carries it.
"""

from __future__ import annotations

from gateway.core.cluster.election import FORGOTTEN, STALE, TTL, Leader, StoreView, Turn


class SimulatedStore:
    """`now` of each method is the store's own clock, seconds. `epoch`: the highest that it knows; 0: it is empty."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """All is forgotten, as by FLUSHALL or a restart without a file."""
        self.epoch = 0
        self._leader: Leader | None = None
        self._leads_until = 0.0
        self._resigned = -1  # epoch of the last leader that did
        self._emptied_until = 0.0  # those who have led before it was emptied may have a lease
        self._number = 0  # of the leader's last turn
        self._seen: frozenset[str] = frozenset()
        self._members: dict[str, float] = {}  # until when

    def leave(self, name: str) -> None:
        """A member ends in good order."""
        self._members.pop(name, None)
        self._seen -= {name}
        if self._leader is not None and self._leader.name == name:
            self._resigned, self._leader = self._leader.epoch, None

    def _trusts(self, name: str, turn: Turn) -> bool:
        """Whether no leader can be there that does not need this member's vote."""
        return name in self._seen or (not self._seen and self.epoch >= turn.known)

    def turn(self, name: str, turn: Turn, now: float) -> StoreView:
        """Carry out a member's turn."""
        epoch = max(self.epoch, turn.known)
        emptied = self.epoch < epoch or not self.epoch
        if emptied:
            self._members = dict.fromkeys(turn.seen, now) | self._members
        self._members[name] = now + TTL if turn.present else self._members.get(name, now)
        self._members = {each: until for each, until in self._members.items() if until + FORGOTTEN > now}
        leader = self._leader if now < self._leads_until else None
        candidacy = 0 if turn.after is not None and abs(now - turn.after) > STALE else turn.candidacy
        if turn.waits and self._resigned != turn.known:
            candidacy = 0
        earlier = leader is not None and leader.name == name and leader.epoch != turn.term  # its process before this
        if leader is None or leader.epoch < epoch or earlier:
            leader = None
            if turn.term and turn.term == epoch:
                leader = Leader(name, epoch)
            elif candidacy == 2 or (candidacy == 1 and self._trusts(name, turn)):
                leader, self._seen = Leader(name, max(epoch + 1, round(now * 1e6))), self._seen | {name}
        if leader is not None and leader.name == name:
            if turn.term != leader.epoch or self.epoch < leader.epoch:
                self._number = 0
            if emptied:
                self._emptied_until = now + TTL
            self._leader, self._leads_until, self.epoch = leader, now + TTL, leader.epoch
            if turn.term and turn.number > self._number:
                self._number, self._seen = turn.number, turn.seen | {name}
        members = frozenset([each for each, until in self._members.items() if until > now])
        emptied = emptied or now < self._emptied_until
        left = 0.0 if leader is None else self._leads_until - now
        roster = frozenset(self._members)
        return StoreView(leader=leader, members=members, roster=roster, clock=now, left=left, emptied=emptied)
