"""Election of the decider that rules a cluster, and its fencing, as one member sees them. Pure: no clock, no store.

Every RENEW seconds a member asks the store: `turn` says what for, `seen` takes the answer, `failed` its absence. The
store keeps who rules for TTL seconds after the ruler's last turn. The ruler's lease began when it *sent* that turn, and
ends MARGIN before the store's: no other can have been elected while it grants. A new ruler grants only when every
member that may hold something has told what that is, or is gone from the store.

When the store answers nobody, the ruler asks all members that could be elected for their word (`vouch`): who has the
store no longer either, and gives its word, stands for no election for TTL seconds. With the word of all of them the
ruler's lease goes on; a ruler that knows no other member has nobody's. One that still has the store gives no word: it
will be elected, and the ruler stops. A member that has not left in good order could be elected until the store forgets
it, after FORGOTTEN seconds.

A turn may lie in a store that has stopped, and be carried out when it goes on: by then the ruler's time in the store
has passed, though its lease, by words, has not. So a turn says what the store's clock was at the answer before it, and
elects nobody where that is STALE.

A store may be slow for the ruler alone. Its turns come too late to be answered, and would renew its time for ever, in
which it may not grant and nobody else is elected. So a ruler whose lease is over without an answer only looks: such a
turn renews nothing. Once one is answered in time, and nobody else rules, it goes on in its reign. Where the store was
emptied, another may have ruled since: it is elected anew.

A store that was lost or emptied names no ruler, and no members, until these have been there again. For TTL seconds
members obey the ruler still, and the ruler takes nobody for gone (`blind`): nobody leaves anybody whom a store forgot.

`now` is monotonic seconds of this member; no two members' clocks are ever compared.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

TTL = 2.0  # seconds that the store remembers a turn
RENEW = 0.5  # seconds between two turns
STALE = TTL - RENEW  # seconds by the store's clock from an answer until the turn after it elects nobody
MARGIN = 0.2  # seconds by which a lease ends before the store's, for clocks that do not run alike
NEWCOMER_WAITS = 10.0  # seconds without a ruler until a member that no ruler has known may be elected
FORGOTTEN = 600.0  # seconds after its last turn until a member that has not left is no member any more

Stand = Literal[0, 1, 2]  # for election: no; where the last ruler knew this member; in any case


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """A question to the store. `known`: the highest epoch that was met. `reign`: the epoch that this member rules in,
    0: it does not rule. `seen`: the members that it knows of; a ruler would ask them for their word. `number`: higher
    each turn, so that a late one changes nothing. `after`: the store's clock at the last answer; None: there was
    none. `present`: others wait for what this member holds; not where it has not heard the store for TTL, as a late
    turn may be carried out while it does not hear whom to tell that."""

    number: int
    known: int
    stand: Stand
    reign: int
    seen: frozenset[str] = frozenset()
    after: float | None = None
    present: bool = True


class Ruler(msgspec.Struct, frozen=True):
    """Who rules, and in which epoch."""

    name: str
    epoch: int


class StoreView(msgspec.Struct, frozen=True, kw_only=True):
    """The store's answer to a turn. `members`: those of now, this one included. `roster`: these, and those that are
    past their TTL and have not left. `emptied`: the store knew no epoch, or a lower one than was met, less than TTL
    seconds ago: it may have forgotten a ruler whose lease goes on. `clock`: the store's, seconds."""

    ruler: Ruler | None
    members: frozenset[str]
    roster: frozenset[str]
    clock: float
    emptied: bool = False


class Election:
    """One member's part. `name` is the member's in the cluster. What an earlier process of it has left: `known`, the
    highest epoch that was met, `vouched_until`, until when it has promised to stand for no election, and `roster`."""

    def __init__(
        self, name: str, known: int = 0, vouched_until: float = -math.inf, roster: frozenset[str] = frozenset()
    ) -> None:
        self.name = name
        self.known = known
        self.vouched_until = vouched_until
        self.roster = roster  # of the last answer
        self.ruler: Ruler | None = None  # as this member knows it
        self.since = 0.0  # when this member first knew of that ruler
        self.members: frozenset[str] = frozenset()  # of the last answer
        self.lost_store = False  # the last turn failed
        self._blind_until = -math.inf
        self._number = 0  # of the last turn
        self._clock: float | None = None  # the store's, at the last answer
        self._heard = 0.0  # when that was, by this member's
        self.stands = True  # for election
        self.electable: frozenset[str] = frozenset()  # members that the store takes for known to this ruler
        self.awaited: set[str] = set()  # members that have yet to tell what they hold
        self._lease = -math.inf
        self._grants_from = -math.inf
        self._unruled: float | None = None  # since when nobody has ruled
        self._asked: frozenset[str] = frozenset()  # whom the store may take for known to this ruler
        self._words: dict[str, float] = {}  # until when a member's word holds

    # -- what may be done now -----------------------------------------------------------------------------------

    @property
    def reign(self) -> int:
        """The epoch that this member rules in; 0: another rules, or nobody."""
        return self.ruler.epoch if self.ruler is not None and self.ruler.name == self.name else 0

    def fence(self, now: float) -> float:
        """Until when this member may grant; in the past, where it may not."""
        heard = self.reign and not self.awaited and now >= self._grants_from
        return self._lease if heard else -math.inf

    def may_grant(self, now: float) -> bool:
        """Whether this member rules, has heard all members, and has a lease."""
        return now < self.fence(now)

    def blind(self, now: float) -> bool:
        """Whether it says nothing that the store names no ruler, or not a member: it was lost or emptied a moment ago,
        and whoever is there may not have been there since."""
        return self.lost_store or now < self._blind_until

    @property
    def voters(self) -> frozenset[str]:
        """The members whose word this ruler needs to go on without the store."""
        return self._asked | self.roster - {self.name} if self.reign and self.lost_store else frozenset()

    # -- turns --------------------------------------------------------------------------------------------------

    def turn(self, now: float) -> Turn:
        """What to ask the store now."""
        stand: Stand = 0
        if self.stands and not self.reign and now >= self.vouched_until:
            stand = 2 if self._unruled is not None and now >= self._unruled + NEWCOMER_WAITS else 1
        self._number += 1
        turn = Turn(
            number=self._number,
            known=self.known,
            stand=stand,
            reign=self.reign,
            seen=self.roster - {self.name},
            present=not (self.lost_store and now > self._heard + TTL),
        )
        if not self.reign or (self.lost_store and now >= self._lease):
            return msgspec.structs.replace(turn, reign=0, after=self._clock)
        self._asked |= turn.seen
        return turn

    def seen(self, sent: float, now: float, turn: Turn, view: StoreView) -> None:
        """The answer to a turn that was sent at `sent`. One that contradicts what is known since is left out."""
        if self.lost_store or view.emptied:
            self._blind_until = now + TTL
        self.lost_store = False
        self._words.clear()
        self.members, self.roster, self._clock, self._heard = view.members, view.roster, view.clock, now
        ruler = view.ruler
        if turn.reign and turn.reign == self.reign:
            self._asked = self.electable = turn.seen
        if ruler is not None and ruler.epoch < self.known:
            ruler = None  # its reign is over, as it will hear
        if self.reign and not turn.reign and ruler is None:  # it has only looked
            if view.emptied:  # of a later epoch, perhaps: the turn after stands for election
                self.overthrown(now)
                self._unruled = now - NEWCOMER_WAITS
            return  # else the turn after says that it rules
        if view.emptied and not self.known:
            self.vouched_until = -math.inf  # of a new cluster: nobody can have asked for its word
        unruled = now if self._unruled is None else self._unruled
        self._unruled = unruled if ruler is None else None
        if view.ruler is None and self.ruler is not None and self.blind(now) and now < unruled + TTL:
            return  # who rules has not been there since, and may have a lease
        elected = ruler is not None and ruler.name == self.name and ruler.epoch != self.reign
        if elected and (now < self.vouched_until or not self.stands):
            ruler, elected = None, False  # it has given its word, or given up, while the turn was under way
        self._rules(ruler, now)
        if elected:
            self.awaited = set(view.members)
            self._asked = frozenset()
        if self.reign and view.emptied and now >= self._lease:
            self.awaited |= view.roster  # the store has forgotten members and leases: the longest of them is waited for
            self._grants_from = sent + TTL + MARGIN
        if self.reign:
            self._lease = sent + TTL - MARGIN
            if now >= self._grants_from:
                self.awaited &= view.members

    def failed(self) -> None:
        """A turn has had no answer."""
        self.lost_store = True
        self._extend()

    def _rules(self, ruler: Ruler | None, now: float) -> None:
        if ruler != self.ruler:
            self.ruler, self.since = ruler, now
            self._lease = self._grants_from = -math.inf
            self.electable = frozenset()
            self.awaited.clear()
        if ruler is not None:
            self.known = max(self.known, ruler.epoch)

    def resign(self, now: float) -> None:
        """Rule no longer, and stand for no election: this member is about to leave."""
        self.stands = False
        self.overthrown(now)

    def overthrown(self, now: float) -> None:
        """Rule no longer, nor know who does."""
        self._rules(None, now)

    # -- words --------------------------------------------------------------------------------------------------

    def vouch(self, ruler: Ruler, now: float) -> bool:
        """Whether this member gives its word to that ruler: it stands for no election for TTL seconds. One that knew of
        no ruler knows of this one then."""
        if not self.lost_store or self.reign or ruler.epoch < self.known:
            return False
        if self.ruler is not None and self.ruler != ruler:
            return False
        self._rules(ruler, now)
        self.vouched_until = now + TTL
        return True

    def vouched(self, name: str, epoch: int, sent: float) -> None:
        """A member has given its word, when asked at `sent`."""
        if epoch == self.reign and name in self.voters:
            self._words[name] = sent + TTL - MARGIN
            self._extend()

    def _extend(self) -> None:
        """Go on without the store, with the word of all who could be elected."""
        voters = self.voters
        if self.reign and self._lease > -math.inf and voters and all(name in self._words for name in voters):
            self._lease = max(self._lease, min(self._words[name] for name in voters))

    # -- news from relays ---------------------------------------------------------------------------------------

    def told(self, name: str) -> None:
        """All relays of a member have told what they hold."""
        self.awaited.discard(name)

    def met(self, epoch: int, now: float) -> None:
        """A relay or member knows this epoch. A ruler of a lower one rules no longer."""
        if epoch > self.known:
            self.known = epoch
            self.overthrown(now)
