"""Election of a cluster's leader, as one member sees it: TRANSITIONS is all there is. Pure: no clock, no store.

The leader is the member whose decider grants for all machines; its term is the epoch of its election, which is the
fencing token (`fencing.py`). Every RENEW seconds a member asks the store: `turn` is the question, `answered` takes the
answer, `failed` its absence. The store keeps the leader for TTL seconds after the leader's last turn.

- **Lease.** The leader's lease begins when it sends a turn, and ends MARGIN before the store's: nobody else can have
  been elected while it grants. A new leader grants once every member that may hold something has reported it, or is
  gone from the store (`awaited`).
- **Votes.** When the store answers nobody, the leader asks every member that could be elected for its vote. A member
  votes if it has lost the store too, and then is no candidate for TTL seconds. With all votes the lease goes on. A
  leader that knows no other member has no votes, so its lease ends. A member stays in the roster until it has left in
  good order, or for FORGOTTEN seconds.
- **Late turns.** A store that was stopped may carry out a turn late, when the leader's time in the store has passed and
  its lease, by votes, has not. So a turn carries the store's clock of the last answer, and elects nobody if that is
  STALE.
- **Replica.** A replica of the store that is promoted may have lost the leader's last turns. So nobody is elected
  before the time is over that the store has given the last leader, unless that one has resigned.
- **Slow store.** A store may be slow for the leader alone: the leader's turns would renew its term there, although its
  lease has ended, and nobody could grant or be elected. So a leader whose lease ended without an answer only looks,
  which renews nothing. If such a turn is answered and nobody else leads, the term goes on. If the store was emptied
  meanwhile, a leader whose lease has ended steps down, because another may have led in between.
- **Emptied store.** A store that was lost or emptied names neither a leader nor members until these have asked again.
  For TTL seconds members keep to the leader they knew, and the leader takes nobody for gone (`blind`).
  One elected then grants only after that.

`now` is monotonic seconds of this member; clocks of two members are never compared.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import Literal

import msgspec

from gateway.core.cluster.fencing import FencingToken

TTL = 2.0  # seconds that the store remembers a turn
RENEW = 0.5  # seconds between two turns
STALE = TTL - RENEW  # seconds by the store's clock from an answer until the turn after it elects nobody
MARGIN = 0.2  # seconds by which a lease ends before the store's, for clocks that do not run alike
NEWCOMER_WAITS = 10.0  # seconds without a leader until a member that no leader has known may be elected
FORGOTTEN = 600.0  # seconds after its last turn until a member that has not left is no member any more

Candidacy = Literal[0, 1, 2]  # no candidate; a candidate if the last leader knew this member; a candidate in any case


class MemberState(Enum):
    """Part of one member. A leader may have no lease: then it does not grant."""

    LEADERLESS = "leaderless"
    FOLLOWER = "follower"
    LEADER = "leader"


LEADERLESS, FOLLOWER, LEADER = MemberState

Event = Literal["none", "forgotten", "other", "elected", "renewed", "looked", "emptied", "vote", "step_down"]

TRANSITIONS: dict[MemberState, dict[Event, MemberState]] = {
    LEADERLESS: {
        "none": LEADERLESS,
        "other": FOLLOWER,
        "elected": LEADER,
        "vote": FOLLOWER,
        "step_down": LEADERLESS,
    },
    FOLLOWER: {
        "none": LEADERLESS,
        "forgotten": FOLLOWER,
        "other": FOLLOWER,
        "elected": LEADER,
        "vote": FOLLOWER,
        "step_down": LEADERLESS,
    },
    LEADER: {
        "none": LEADERLESS,
        "forgotten": LEADER,
        "other": FOLLOWER,
        "elected": LEADER,
        "renewed": LEADER,
        "looked": LEADER,
        "emptied": LEADERLESS,
        "step_down": LEADERLESS,
    },
}
KEEPS: frozenset[Event] = frozenset({"forgotten", "looked"})  # events that say nothing against the known leader


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """Question to the store."""

    number: int  # higher each turn, so that a late one changes nothing
    known: int  # the member's fencing token
    candidacy: Candidacy
    term: int  # that this member leads in; 0: it does not lead, or only looks
    seen: frozenset[str] = frozenset()  # other members that it knows: a leader would ask them for their votes
    after: float | None = None  # the store's clock at the last answer; None: there was none
    # Others wait for what this member holds. False if it has not heard the store for TTL: a late turn may be carried
    # out while the member does not hear whom to report that to.
    present: bool = True
    waits: bool = False  # for a leader that the store has named: its time is not over, unless it has resigned


class Leader(msgspec.Struct, frozen=True):
    """Member that leads, and the epoch of its election."""

    name: str
    epoch: int


class StoreView(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of the store to a turn."""

    leader: Leader | None
    members: frozenset[str]  # of now, this one included
    roster: frozenset[str]  # these, and those that are past their TTL and have not left
    clock: float  # the store's, seconds
    left: float = 0.0  # seconds that the store remembers the leader
    # The store knew no epoch, or a lower one than was met, less than TTL seconds ago: it may have forgotten a leader
    # whose lease goes on.
    emptied: bool = False


class Election:
    """Part of one member. `known`, `voted_until` and `roster` are what an earlier process of the member has left."""

    def __init__(
        self, name: str, known: int = 0, voted_until: float = -math.inf, roster: frozenset[str] = frozenset()
    ) -> None:
        self.name = name
        self.token = FencingToken(known)
        self.state = LEADERLESS
        self.leader: Leader | None = None  # None: this member knows of none
        self.since = 0.0  # when this member first knew of that leader
        self.eligible = True  # False: it is about to leave
        self.voted_until = voted_until  # no candidate before
        self._led_until = -math.inf  # until when the store remembers another member as the leader
        self.members: frozenset[str] = frozenset()  # of the last answer
        self.roster = roster  # of the last answer
        self.candidates: frozenset[str] = frozenset()  # members that the store takes for known to this leader
        self.awaited: set[str] = set()  # members that have yet to report what they hold
        self.lost_store = False  # the last turn failed
        self._blind_until = -math.inf
        self._number = 0  # of the last turn
        self._clock: float | None = None  # the store's, at the last answer
        self._heard = 0.0  # when that was, by this member's
        self._lease = -math.inf
        self._grants_from = -math.inf
        self._leaderless: float | None = None  # since when the store has named no leader
        self._asked: frozenset[str] = frozenset()  # members that the store may take for known to this leader
        self._votes: dict[str, float] = {}  # until when a member's vote holds

    # -- what may be done now -----------------------------------------------------------------------------------

    @property
    def known(self) -> int:
        """Epoch of the fencing token."""
        return self.token.epoch

    @property
    def term(self) -> int:
        """Epoch that this member leads in; 0: another leads, or nobody."""
        return self.leader.epoch if self.state is LEADER and self.leader is not None else 0

    def lease_until(self, now: float) -> float:
        """Return until when this member may grant; in the past if it may not."""
        synced = self.term and not self.awaited and now >= self._grants_from
        return self._lease if synced else -math.inf

    def may_grant(self, now: float) -> bool:
        """Whether this member leads, has heard all members, and has a lease."""
        return now < self.lease_until(now)

    def blind(self, now: float) -> bool:
        """Whether a leader or member that the store does not name proves nothing: the store was lost or emptied a
        moment ago, and members may not have asked since."""
        return self.lost_store or now < self._blind_until

    @property
    def voters(self) -> frozenset[str]:
        """Members whose votes this leader needs to go on without the store."""
        return self._asked | self.roster - {self.name} if self.term and self.lost_store else frozenset()

    # -- turns --------------------------------------------------------------------------------------------------

    def turn(self, now: float) -> Turn:
        """Return the question to ask the store now."""
        candidacy: Candidacy = 0
        if self.eligible and not self.term and now >= self.voted_until:
            candidacy = 2 if self._leaderless is not None and now >= self._leaderless + NEWCOMER_WAITS else 1
        self._number += 1
        turn = Turn(
            number=self._number,
            known=self.known,
            candidacy=candidacy,
            term=self.term,
            seen=self.roster - {self.name},
            present=not (self.lost_store and now > self._heard + TTL),
            waits=now < self._led_until,
        )
        if not self.term or (self.lost_store and now >= self._lease):
            return msgspec.structs.replace(turn, term=0, after=self._clock)
        self._asked |= turn.seen
        return turn

    def answered(self, sent: float, now: float, turn: Turn, view: StoreView) -> None:
        """Take the answer to a turn that was sent at `sent`. One that contradicts what is known since is left out."""
        if self.lost_store or view.emptied:
            self._blind_until = now + TTL
        self.lost_store = False
        self._votes.clear()
        if view.leader is not None:
            self._led_until = now + view.left if view.leader.name != self.name else -math.inf
        self.members, self.roster, self._clock, self._heard = view.members, view.roster, view.clock, now
        if turn.term and turn.term == self.term:
            self._asked = self.candidates = turn.seen
        if view.emptied and not self.known:
            self.voted_until = -math.inf  # of a new cluster: nobody can have asked for a vote
        event = self._event(turn, view, now)
        self._follow(event, view.leader, now)
        if event == "elected":
            self.awaited = set(view.members)
            self._asked = frozenset()
        if event in ("elected", "renewed"):
            self._renew(sent, now, view, view.emptied or (event == "elected" and self.blind(now)))

    def _event(self, turn: Turn, view: StoreView, now: float) -> Event:
        """Return the event that an answer of the store is."""
        leader = view.leader
        if leader is not None and self.token.fences(leader.epoch):
            leader = None  # its term is over, as it will hear
        if self.term and view.emptied and now >= self._lease and (leader is None or leader.name == self.name):
            self._leaderless = now - NEWCOMER_WAITS  # another may have led since; the turn after is a candidate's
            return "emptied"
        if self.term and not turn.term and leader is None:
            return "looked"  # the turn after says that it leads
        since = now if self._leaderless is None else self._leaderless
        self._leaderless = since if leader is None else None
        if view.leader is None and self.leader is not None and self.blind(now) and now < since + TTL:
            return "forgotten"  # the leader has not asked since, and may have a lease
        if leader is None:
            return "none"
        if leader.name != self.name:
            return "other"
        if leader.epoch == self.term:
            return "renewed"
        # It may have voted, or given up, while the turn was under way.
        return "elected" if self.eligible and now >= self.voted_until else "none"

    def _renew(self, sent: float, now: float, view: StoreView, forgot: bool) -> None:
        """Begin the lease anew, from the moment that the turn was sent. `forgot`: the store may have forgotten members
        and leases."""
        if forgot and now >= self._lease:
            self.awaited |= view.roster  # wait for the longest of those
            self._grants_from = sent + TTL + MARGIN
        self._lease = sent + TTL - MARGIN
        if now >= self._grants_from:
            self.awaited &= view.members

    def failed(self) -> None:
        """A turn has had no answer."""
        self.lost_store = True
        self._extend()

    def _follow(self, event: Event, leader: Leader | None, now: float) -> None:
        """Enter the state that the table has for the event. Raises KeyError for one that it does not have."""
        self.state = TRANSITIONS[self.state][event]
        if event in KEEPS:
            return
        leader = None if self.state is LEADERLESS else leader
        if leader != self.leader:
            self.leader, self.since = leader, now
            self._lease = self._grants_from = -math.inf
            self.candidates = frozenset()
            self.awaited.clear()
        if leader is not None:
            self.token.raise_to(leader.epoch)

    def resign(self, now: float) -> None:
        """Lead no longer, and be no candidate: this member is about to leave."""
        self.eligible = False
        self.step_down(now)

    def step_down(self, now: float) -> None:
        """Lead no longer, nor know who does."""
        self._follow("step_down", None, now)

    def observe(self, epoch: int, now: float) -> None:
        """A relay or member has met this epoch: a leader of a lower one steps down."""
        if self.token.raise_to(epoch):
            self.step_down(now)

    # -- votes --------------------------------------------------------------------------------------------------

    def vote(self, leader: Leader, now: float) -> bool:
        """Whether this member votes for that leader: it is no candidate for TTL seconds then. A member that knew no
        leader knows this one from now on."""
        if not self.lost_store or self.term or self.token.fences(leader.epoch):
            return False
        if self.leader is not None and self.leader != leader:
            return False
        self._follow("vote", leader, now)
        self.voted_until = now + TTL
        return True

    def record_vote(self, name: str, epoch: int, sent: float) -> None:
        """Count a member's vote, which was asked for at `sent`."""
        if epoch == self.term and name in self.voters:
            self._votes[name] = sent + TTL - MARGIN
            self._extend()

    def _extend(self) -> None:
        """Extend the lease without the store, with the votes of all who could be elected."""
        voters = self.voters
        if self.term and self._lease > -math.inf and voters and all(name in self._votes for name in voters):
            self._lease = max(self._lease, min(self._votes[name] for name in voters))

    # -- reports of relays --------------------------------------------------------------------------------------

    def synced(self, name: str) -> None:
        """All relays of a member have reported what they hold."""
        self.awaited.discard(name)
