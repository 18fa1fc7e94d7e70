"""Membership of one gateway in its cluster: turns with the store, votes of members, and news of the leader.

What the next process of this member must know stays in a file beside the processes' sockets: the highest epoch, a word
that was given, and the roster.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import ssl
from collections.abc import Callable
from pathlib import Path

import msgspec

from gateway.control.cluster import ClusterView
from gateway.core.cluster.election import RENEW, TTL, Election, Leader
from gateway.frames.entrance import ClusterToken, Proof, Unwanted, VoteRequest, visit
from gateway.frames.messages import VERSION
from gateway.serve.cluster.store import ClusterConflict, MemberRecord, OtherCluster, Store, StoreError
from gateway.shared.addresses import split_address
from gateway.shared.tasks import lasting

AT_ONCE = 0.05  # seconds until the store hears that a new member is known, and may be elected
UNREACHED = 1.5  # seconds without a way to the leader after which this member is none, so that nobody waits for it


class SavedMembership(msgspec.Struct, frozen=True):
    """For the next process of this member, which may be of another version. `voted_until`: monotonic seconds of this
    machine."""

    known: int
    voted_until: float
    roster: list[str]


def begun(me: str, left: Path, now: float, promised: bytes = b"") -> Election:
    """The part of a member in elections, as its last process has `promised`, or in the file that it has `left`."""
    try:
        kept = msgspec.json.decode(promised or left.read_bytes(), type=SavedMembership)
    except (OSError, ValueError):  # the first process: what an earlier machine's life has promised is not known
        return Election(me, voted_until=now + TTL)
    return Election(me, kept.known, kept.voted_until, frozenset(kept.roster))


class Membership(msgspec.Struct, eq=False):
    """`me` is the address that this member advertises. `changed` is called whenever the leader, or its lease, may have
    changed. `trust` and `name`: of TLS between members; None: there is none."""

    me: str
    life: str
    _store: Store
    _token: ClusterToken
    _left: Path
    _clock: Callable[[], float]
    election: Election
    trust: ssl.SSLContext | None
    name: str | None
    changed: Callable[[], None]
    say: Callable[[str], None]
    records: dict[str, MemberRecord] = {}
    store_error: str = ""  # why it has not answered the last turn
    store_heard: float = 0.0  # when it last has
    _said: str = ""
    _unkept: bool = False  # the file cannot be written
    _conflict: str = ""
    _unreached: float | None = None  # since when there is no way to the leader
    _asking: set[asyncio.Task[None]] = set()
    _task: asyncio.Task[None] | None = None

    def restore(self, promised: bytes) -> None:
        """Load what the previous process of this member knew and promised."""
        self._write(promised)
        self.election = begun(self.me, self._left, self._clock(), promised)

    def hand_over(self) -> bytes:
        """Stop being this member, for its next process. Return what that process must know."""
        promised = msgspec.json.encode(self._promised())
        for each in (self._task, *self._asking):
            if each is not None:
                each.cancel()
        self._task = None
        self.election.resign(self._clock())
        return promised

    def start(self) -> None:
        """Join the cluster."""
        self._task = lasting("the membership in the cluster", self._keep)

    async def leave(self) -> None:
        """Leave the cluster."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, *self._asking, return_exceptions=True)
            self._task = None
            with contextlib.suppress(StoreError):  # then it is known once its TTL is over
                await self._store.leave(self.election.term)

    async def resign(self) -> None:
        """Give up the lead, if there is another member."""
        if self.election.members - {self.me}:
            self.election.resign(self._clock())
            self.changed()
            with contextlib.suppress(StoreError):  # then another is elected once its TTL is over
                await self._store.resign()

    async def aclose(self) -> None:
        await self.leave()
        await self._store.aclose()

    # -- turns --------------------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        while True:
            sent = self._clock()
            await self._turn(sent)
            election = self.election
            new = election.term and not election.lost_store and election.roster - election.candidates - {self.me}
            await asyncio.sleep(AT_ONCE if new else max(0.0, sent + RENEW - self._clock()))

    async def _turn(self, sent: float) -> None:
        election = self.election
        turn = election.turn(sent)
        if self._unreached is not None and sent >= self._unreached + UNREACHED:
            turn = msgspec.structs.replace(turn, present=False)
        try:
            view, records = await self._store.turn(turn)
        except ClusterConflict as conflict:
            election.step_down(self._clock())
            self._say_conflict(str(conflict))
        except StoreError as error:
            election.failed()
            if isinstance(error, OtherCluster):  # said also where the store did not answer at all before
                self._say_conflict(str(error))
                self.store_error = str(error)
            else:
                self._store_failed(str(error))
            self._ask_for_words(sent)
        else:
            self._conflict = ""
            if self.store_error:
                self.store_error = ""
                self.say("cluster: the store answers again")
            self.store_heard = self._clock()
            self.records = records
            election.answered(sent, self._clock(), turn, view)
        self.news()

    def _say_conflict(self, why: str) -> None:
        if why != self._conflict:
            self._conflict = why
            self.say(f"cluster: {why}")

    def _store_failed(self, why: str) -> None:
        if not self.store_error:
            goes_on = "this gateway goes on leading with the vote of all members" if self.election.term else (
                "the leader goes on with the vote of all members"
            )  # fmt: skip
            self.say(f"cluster: the store does not answer: {why}; {goes_on}")
        self.store_error = why

    def news(self) -> bool:
        """Keep and tell what has changed. Return whether the next process keeps to it."""
        election = self.election
        kept = self._write(msgspec.json.encode(self._promised()))
        leader = election.leader
        line = "nobody leads" if leader is None else f"{leader.name} leads in epoch {leader.epoch}"
        if leader is not None and election.term:
            line = f"this gateway leads in epoch {leader.epoch}"
        if line != self._said and (self._said or leader is not None):
            self._said = line
            self._unreached = None  # that was the leader before
            self.say(f"cluster: {line}")
        self.changed()
        return kept

    def _write(self, promised: bytes) -> bool:
        """Keep what the next process must know. On a full disk nothing is kept: without a file that process stands for
        no election until whatever this one has promised is over. Return whether no older promise is left."""
        new, unkept, kept = self._left.with_suffix(".new"), "", True
        try:
            if not self._left.exists() or self._left.read_bytes() != promised:
                new.write_bytes(promised)
                new.replace(self._left)
        except OSError as error:
            unkept = error.strerror or str(error)
            with contextlib.suppress(OSError):
                new.unlink()
            try:
                self._left.unlink(missing_ok=True)
            except OSError:  # a disk that has become read-only
                kept = False
        if bool(unkept) != self._unkept:
            self._unkept = bool(unkept)
            what = f"cannot be written ({unkept}): make room there" if unkept else "is written again"
            self.say(f"cluster: {self._left} {what}")
        return kept

    def _promised(self) -> SavedMembership:
        election = self.election
        return SavedMembership(
            election.known, max(0.0, election.voted_until), sorted(election.roster)
        )  # JSON has no infinity

    # -- votes --------------------------------------------------------------------------------------------------

    def vote(self, ask: VoteRequest) -> bool:
        """Whether this member votes for a leader, and its next process keeps to that. A request without a leader asks
        whether the member answers."""
        given = bool(ask.leader) and self.election.vote(Leader(ask.leader, ask.epoch), self._clock())
        return given and self.news()

    def _ask_for_words(self, sent: float) -> None:
        leader = self.election.leader
        for name in self.election.voters:
            if leader is not None:
                task = asyncio.get_running_loop().create_task(self._request_vote(name, leader, sent))
                self._asking.add(task)
                task.add_done_callback(self._asking.discard)

    async def _request_vote(self, name: str, leader: Leader, sent: float) -> None:
        try:
            given = await self.visit(name, VoteRequest(leader.name, leader.epoch))
        except (OSError, Unwanted):
            return  # its vote is missing
        if given:
            self.election.record_vote(name, leader.epoch, sent)
            self.changed()

    # -- ways to other members ----------------------------------------------------------------------------------

    async def visit(
        self, name: str, vote: VoteRequest | None, stays: Callable[[], asyncio.Protocol] | None = None
    ) -> bool:
        """See `gateway/frames/entrance.py`. Raises OSError, and Unwanted."""
        proof = Proof(VERSION, self._token.cluster, self.me, self.life, secrets.token_bytes(32), vote)
        return await visit(split_address(name), self._token, proof, self.trust, self.name, stays)

    async def probe(self) -> None:
        """Warn if this member does not reach itself at the address that it advertises."""
        try:
            await self.visit(self.me, VoteRequest("", 0))
        except (OSError, Unwanted) as error:
            self.say(
                f"cluster: this gateway does not reach itself at {self.me}, which it advertises: {error}; others will "
                "not either, unless there is a router between: see cluster.advertise and cluster.listen"
            )

    def reached(self) -> None:
        """Note that the leader can be reached."""
        self._unreached = None

    def unreached(self, line: str) -> None:
        """Note that no leader can be reached, and log `line` the first time."""
        if self._unreached is None and not self.election.term:  # else it was a try of the moment before
            self._unreached = self._clock()
            self.say(line)

    # -- the control port ---------------------------------------------------------------------------------------

    def view(self, cluster: str) -> ClusterView:
        """The cluster, as this member knows it."""
        now, election = self._clock(), self.election
        leader = election.leader
        return ClusterView(
            name=cluster,
            member=self.me,
            leader=None if leader is None else leader.name,
            epoch=election.known,
            since_s=None if leader is None else round(now - election.since, 3),
            leads=bool(election.term),
            granting=election.may_grant(now),
            awaited=sorted(election.awaited),
            members=sorted(election.members),
            candidates=sorted(election.candidates),
            gone=sorted(election.roster - election.members),
            store_error=self.store_error or None,
            store_heard_s=round(now - self.store_heard, 3) if self.store_heard else None,
        )
