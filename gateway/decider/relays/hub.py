"""Relays of one decider: who they are, what they go by, and what all of them have counted.

A decider grants nothing before every relay that lived when it began has told what it holds, or is gone: until then
calls wait, and are then asked in the order of their arrival. Relays are told of a new policy at once, of engines and
models within TICK seconds, and of an engine that is up before a grant names it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping
from itertools import chain

import msgspec

from gateway.core.admission.limits import Charge
from gateway.core.engines.engine import Engine
from gateway.core.policy.snapshot import Snapshot
from gateway.core.request.outcome import Outcome, Refused
from gateway.core.request.record import Record
from gateway.core.request.tenants import Account
from gateway.decider.local import LocalAdmission, LocalDecider
from gateway.decider.relays.session import RelaySession
from gateway.decider.relays.totals import RelayTotals
from gateway.decider.relays.totals import lives as alive
from gateway.frames import messages as frames
from gateway.frames.channel import Channel
from gateway.frames.codec import from_relay
from gateway.shared.tasks import cancel, lasting
from gateway.upstream.trust import Trust

TICK = 0.1  # seconds between two looks at what relays should know
VERSIONS = 8  # of the policy that are kept for calls under way
ELSEWHERE = 2**40  # "processes" from here on are those of other machines


class RelayHub:
    """Relays of `decider`, which leads in `epoch`. `expected`: the process of each relay that lives already, by its
    number.

    `shown` returns the key and the trust for an engine. `engine_of` returns the engine of an id and address, and
    creates it if there is none. `call_ended` receives the engine of each call that ends, `deposed` the epoch of a
    decider that leads in place of this one. `lives` says whether there is a process of this id, in place of the
    kernel's word. `ended` receives the record of each ended call, and when. `left` is called when a relay has left.
    """

    def __init__(
        self,
        decider: LocalDecider,
        epoch: int,
        expected: dict[int, int],
        *,
        engine_of: Callable[[str, str], Engine],
        shown: Callable[[Engine], tuple[str | None, Trust | None]],
        call_ended: Callable[[str], None],
        say: Callable[[str], None],
        deposed: Callable[[int], None],
        lives: Callable[[int], bool] | None = None,
        ended: Callable[[Record, float], None] = lambda _, __: None,
        left: Callable[[], None] = lambda: None,
    ) -> None:
        self.decider = decider
        self.epoch = epoch
        self.clock = decider.clock
        self.engine_of = engine_of
        self._shown = shown
        self.call_ended = call_ended
        self.say = say
        self.deposed = deposed
        self.ended = ended
        self._lives = alive if lives is None else lives
        self._left = left
        self.sessions: dict[RelaySession, None] = {}  # by age: the order of a set is by address
        self.version = 0
        self.first = not expected  # there was no decider before
        self.complete = not expected  # every relay that lived before has told what it holds
        self.totals = RelayTotals(self._lives)
        self.changes = 0  # calls that came, and that ended: each may change what a checkpoint has
        self.empty = asyncio.Event()
        self.empty.set()
        self._expected = dict(expected)
        # Relays whose connection has ended, by number. While a relay's process lives its calls may run, and hold what
        # they hold: it comes again and tells of them.
        self.orphans: dict[int, RelaySession] = {}
        self._snapshots: dict[int, Snapshot] = {}
        self._policy: frames.PolicyNews | None = None
        self._order: frames.DrainOrder | None = None  # to all relays: one that was about to come is told, too
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Keep the relays told from now on."""
        self._task = lasting("news for the relays", self._watch)

    async def aclose(self) -> None:
        await cancel(self._task)
        for session in list(self.sessions):
            session.close("")
            self.leaves(session)
        for relay in list(self.orphans):
            self._forget(relay)

    def channel(self) -> Channel:
        """The protocol of a connection that a relay has opened."""
        session = RelaySession(self)
        session.channel = Channel(from_relay(), session.take, session.lost)
        return session.channel

    # -- relays that come and go --------------------------------------------------------------------------------

    def expect(self, relays: Mapping[int, int]) -> None:
        """Grant nothing before these relays, processes by number, have told what they hold too. Where it was not known
        which there are, 0 has stood for them."""
        self._expected.pop(0, None)
        self._expected.update(relays)
        self.complete = False
        self.release()

    async def until_synced(self) -> None:
        """Wait until every relay that lived before has reported its holds, or is gone."""
        while not self.complete:  # noqa: ASYNC110 # at the start; `_watch` looks no more often
            await asyncio.sleep(TICK / 10)

    def relays(self) -> dict[int, int]:
        """The processes of the relays, by number: those that are here, and those that are expected."""
        here = {each.hello.relay: each.hello.pid for each in self.sessions if each.hello is not None}
        return {**self._expected, **here}

    def joins(self, session: RelaySession, hello: frames.Hello) -> bool:
        """Whether a relay may join; an earlier life of it, or connection, gives way. What an earlier connection's calls
        hold stays held until it has told of them."""
        for other in [each for each in self.sessions if each.hello and each.hello.relay == hello.relay]:
            assert other.hello is not None  # noqa: S101 # see above
            if other.hello.epoch > hello.epoch:
                return False
            other.close("the same relay has come again")
            self.leaves(other)
        kept = self.orphans.get(hello.relay)
        epoch = -1 if kept is None or kept.hello is None else kept.hello.epoch
        if epoch > hello.epoch:
            return False
        if kept is not None and epoch == hello.epoch:
            session.resync.orphans = kept.calls
            del self.orphans[hello.relay]
        else:
            self._forget(hello.relay)
        self.sessions[session] = None
        self.empty.clear()
        return True

    async def joined(self, relays: int, within: float) -> None:
        """Wait until `relays` relays are connected, for `within` seconds at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within):
                while len(self.sessions) < relays:  # noqa: ASYNC110 # once, at the start
                    await asyncio.sleep(TICK / 4)

    def leaves(self, session: RelaySession) -> None:
        """A session has ended."""
        if session in self.sessions and session.hello is not None:
            del self.sessions[session]
            session.give_up()
            if session.calls:
                self.orphans[session.hello.relay] = session
            self.totals.leaves((session.hello.relay, session.hello.epoch), session.hello.pid)
            self._left()
        self.totals.heard(session.channel)
        if not self.sessions:
            self.empty.set()

    @property
    def ungranted(self) -> Iterator[Charge]:
        """Charges of calls that have no engine yet. Another decider is asked for them anew, and charges them anew."""
        for session in chain(self.sessions, self.orphans.values()):
            for served in session.known.values():
                if served.grant is None and isinstance(served.admission, LocalAdmission):
                    yield from served.admission.charges

    def _forget(self, relay: int) -> None:
        """A relay is gone: what its calls held comes back, and what they were charged. One that was only out of reach
        for too long comes again, and its calls are charged anew."""
        kept = self.orphans.pop(relay, None)
        for served in () if kept is None else kept.calls.values():
            served.forgotten()

    def release(self) -> None:
        """Answer the waiting calls in the order of their arrival, once every relay has reported its holds."""
        for session in self.sessions:
            if session.resync.done and session.hello is not None:
                self._expected.pop(session.hello.relay, None)
        if self._expected:
            return
        self.complete = True
        told = [session for session in self.sessions if session.resync.done]
        asked = [
            (ask.call.arrived, number, session, ask) for session in told for number, ask in session.waiting.items()
        ]
        for session in told:
            session.waiting = {}
        for _, _, session, ask in sorted(asked, key=lambda each: each[:2]):
            session.answer(ask)

    # -- what relays go by --------------------------------------------------------------------------------------

    def apply(self, snapshot: Snapshot, cache_secret: bytes) -> None:
        """Apply another policy, and send it to the relays."""
        self.version += 1
        self._snapshots[self.version] = snapshot
        self._snapshots.pop(self.version - VERSIONS, None)
        limits = self.decider.limits
        metered = [name for name in snapshot.tenants.accounts if limits.limited and limits.counts_tokens(name)]
        policy = msgspec.Raw(msgspec.msgpack.encode(snapshot.policy))
        jwks = b"" if snapshot.tenants.tokens is None else snapshot.tenants.tokens.jwks
        self._policy = frames.PolicyNews(self.version, policy, cache_secret, limits.limited, metered, jwks)
        for session in self.sessions:
            session.send(self._policy)
            self.tell_fleet(session)

    def snapshot(self, version: int) -> Snapshot:
        """The policy of this version; the newest, where that is not known any more."""
        return self._snapshots.get(version) or self._snapshots[self.version]

    def payer(self, tenant: str, policy: int) -> tuple[Snapshot, Account]:
        """The policy of a request, and who pays. Raises Refused where a reload has done away with the tenant."""
        snapshot = self.snapshot(policy)
        account = snapshot.tenants.account(tenant) or self.snapshot(self.version).tenants.account(tenant)
        if account is None:
            raise Refused(Outcome.UNAUTHORIZED, "The tenant of this key is no longer there.")
        return snapshot, account

    def tell_all(self, session: RelaySession) -> None:
        """A relay that is new hears all."""
        if self._policy is not None:
            session.send(self._policy)
        self.tell_fleet(session)
        if self._order is not None:
            self._end(session, self._order)

    def tell_fleet(self, session: RelaySession) -> None:
        news = self._news()
        session.engines = frozenset(engine.id for engine in news.engines if engine.up)
        session.news = news
        session.send(news)

    def _news(self) -> frames.FleetNews:
        decider = self.decider
        fleet, engines = decider.fleet, []
        for each in fleet:
            key, trust = self._shown(each)
            told = None if trust is None else (trust.ca, trust.name)
            # A decider that has just begun knows of none that it is down.
            up = each.health.up or each.id in fleet.unasked
            engines.append(frames.EngineNews(each.id, each.url, key, told, up, each.label))
        names = [name for name in fleet.models if len(name) <= 256]
        models = tuple([frames.ModelNews(name, fleet.context(name), decider.window(name)) for name in names])
        return frames.FleetNews(tuple(engines), models, decider.up)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            news = self._news()
            for session in self.sessions:
                if session.news != news:
                    self.tell_fleet(session)
            for relay in [
                each for each, kept in self.orphans.items() if kept.hello and not self._lives(kept.hello.pid)
            ]:
                self._forget(relay)
            if not self.complete:
                self._expected = {relay: pid for relay, pid in self._expected.items() if self._lives(pid)}
                self.release()

    # -- totals -------------------------------------------------------------------------------------------------

    async def count(self) -> None:
        """Have every relay tell its totals."""
        await self.totals.ask(session.channel for session in self.sessions)

    # -- the end ------------------------------------------------------------------------------------------------

    async def drain(self, within: float) -> None:
        """Have every relay finish what is under way, and end; back when none is left."""
        self._order_all(frames.DrainOrder(within))
        await self.empty.wait()

    def hand_over(self, within: float, decider: str) -> None:
        """Have every relay finish gently within so many seconds, and ask the decider at this socket from now on, which
        this one then hears no more of; empty: go on asking this one."""
        self._order_all(frames.DrainOrder(within, True, decider))

    def _order_all(self, order: frames.DrainOrder) -> None:
        self._order = order
        for session in list(self.sessions):
            self._end(session, order)

    def _end(self, session: RelaySession, order: frames.DrainOrder) -> None:
        session.send(order)
        if order.decider and session.channel is not None:
            session.channel.flush()
            session.channel.deafen()
            session.give_back()
