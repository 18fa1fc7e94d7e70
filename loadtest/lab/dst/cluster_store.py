"""Store of a cluster in virtual time: what the script of `gateway/serve/cluster/store.py` does to the keys of a Valkey.

A turn that was carried out may still have no answer: that is for whoever carries it.
"""

from __future__ import annotations

from gateway.core.cluster.election import FORGOTTEN, STALE, TTL, Ruler, StoreView, Turn


class SimulatedStore:
    """`now` of each method is the store's own clock, seconds. `epoch`: the highest that it knows; 0: it is empty."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """All is forgotten, as by FLUSHALL or a restart without a file."""
        self.epoch = 0
        self._ruler: Ruler | None = None
        self._rules_until = 0.0
        self._emptied_until = 0.0  # those who have ruled before it was emptied may have a lease
        self._number = 0  # of the ruler's last turn
        self._seen: frozenset[str] = frozenset()
        self._members: dict[str, float] = {}  # until when

    def leave(self, name: str) -> None:
        """A member ends in good order."""
        self._members.pop(name, None)
        self._seen -= {name}
        if self._ruler is not None and self._ruler.name == name:
            self._ruler = None

    def _trusts(self, name: str, turn: Turn) -> bool:
        """Whether no ruler that this member's word is nothing to can be there."""
        return name in self._seen or (not self._seen and self.epoch >= turn.known)

    def turn(self, name: str, turn: Turn, now: float) -> StoreView:
        """Carry out a member's turn."""
        epoch = max(self.epoch, turn.known)
        emptied = self.epoch < epoch or not self.epoch
        if emptied:
            self._members = dict.fromkeys(turn.seen, now) | self._members
        self._members[name] = now + TTL if turn.present else self._members.get(name, now)
        self._members = {each: until for each, until in self._members.items() if until + FORGOTTEN > now}
        ruler = self._ruler if now < self._rules_until else None
        stand = 0 if turn.after is not None and abs(now - turn.after) > STALE else turn.stand
        earlier = ruler is not None and ruler.name == name and ruler.epoch != turn.reign  # its process before this
        if ruler is None or ruler.epoch < epoch or earlier:
            ruler = None
            if turn.reign and turn.reign == epoch:
                ruler = Ruler(name, epoch)
            elif stand == 2 or (stand == 1 and self._trusts(name, turn)):
                ruler, self._seen = Ruler(name, max(epoch + 1, round(now * 1e6))), self._seen | {name}
        if ruler is not None and ruler.name == name:
            if turn.reign != ruler.epoch or self.epoch < ruler.epoch:
                self._number = 0
            if emptied:
                self._emptied_until = now + TTL
            self._ruler, self._rules_until, self.epoch = ruler, now + TTL, ruler.epoch
            if turn.reign and turn.number > self._number:
                self._number, self._seen = turn.number, turn.seen | {name}
        members = frozenset([each for each, until in self._members.items() if until > now])
        emptied = emptied or now < self._emptied_until
        return StoreView(ruler=ruler, members=members, roster=frozenset(self._members), clock=now, emptied=emptied)
