"""Connections of this machine's relays, each of which is passed on to the leader: here, or on another machine.

A relay knows nothing of the cluster. When another decider leads its connection is closed; it comes again, tells what it
holds, and is led there. Totals stay here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType

import msgspec

from gateway.decider.relays.hub import RelayHub
from gateway.decider.relays.session import RelaySession
from gateway.decider.relays.totals import RelayTotals, lives
from gateway.frames import messages as frames
from gateway.frames.channel import Channel
from gateway.frames.codec import from_decider, from_relay
from gateway.frames.durations import shift
from gateway.frames.entrance import Unwanted
from gateway.serve.upgrade.rendezvous import HandOffPayload
from gateway.shared.tasks import telling

# Opens a connection to the leader on another machine; its protocol is made by the argument. Raises OSError, Unwanted.
Lead = Callable[[Callable[[], Channel]], Awaitable[None]]


class RelayProxy:
    """Connection of a relay, passed on to the leader. `welcome`: a decider has taken the relay."""

    def __init__(self, relays: RelayProxies) -> None:
        self._relays = relays
        self.channel = Channel(from_relay(), self._take, self._lost, self._outward)
        self.hello: frames.Hello | None = None
        self.counts: frames.RelayCounts | None = None
        self.welcome = False
        self._session: RelaySession | None = None  # the leader is here
        self._far: Channel | None = None  # or there
        self._task: asyncio.Task[None] | None = None

    def _take(self, message: frames.FromRelay) -> None:
        if isinstance(message, frames.RelayCounts):
            self._relays.counted(self, message)
        elif isinstance(message, frames.Hello) and self.hello is None:
            self.hello = message
            self._relays.said_hello(self)
        elif self._session is not None:
            self._session.take(message)
        elif self._far is not None:
            shift(message, -self._relays.clock())
            self._far.send(message)

    def _outward(self, message: frames.Message) -> None:
        self.welcome = self.welcome or isinstance(message, frames.Welcome)

    def serve(self, hub: RelayHub) -> None:
        """Attach the relay to the decider of this process, which leads."""
        assert self.hello is not None  # noqa: S101 # it has said hello
        self._session = RelaySession(hub)
        self._session.channel = self.channel
        self._session.take(self.hello)

    def lead(self, lead: Lead) -> None:
        """Pass the relay on to the leader's decider on another machine."""
        self._task = asyncio.get_running_loop().create_task(self._lead(lead))
        self._task.add_done_callback(telling("a relay is not passed on to the leader"))

    async def _lead(self, lead: Lead) -> None:
        hello = self.hello
        assert hello is not None  # noqa: S101 # it has said hello
        made: list[Channel] = []

        def far() -> Channel:
            made.append(Channel(from_decider(), self._from_afar, self._far_lost))
            return made[0]

        try:
            await lead(far)
        except (OSError, Unwanted) as error:
            self._relays.unreached(str(error))
            self.channel.close("the leader cannot be reached")
            return
        self._relays.reached()
        if self.channel.closed:
            made[0].close()
            return
        self._far = made[0]
        self._far.send(hello)

    def _from_afar(self, message: frames.FromDecider) -> None:
        if not isinstance(message, frames.CountsAsk | frames.DrainOrder):  # that is for this machine's decider to say
            shift(message, self._relays.clock())
            self.channel.send(message)

    def _far_lost(self, why: str) -> None:
        self.channel.close(why)

    def _lost(self, why: str) -> None:
        if self._session is not None:
            self._session.lost(why)
        if self._task is not None:
            self._task.cancel()
        if self._far is not None:
            self._far.close()
        self._relays.left(self)


class RelayProxies(msgspec.Struct, eq=False):
    """All relays of this machine. `arrived` gets each that has said hello, and passes it on."""

    clock: Callable[[], float]
    _arrived: Callable[[RelayProxy], None]
    reached: Callable[[], None]
    unreached: Callable[[str], None]
    all: dict[RelayProxy, None] = {}  # by age: the order of a set is by address
    totals: RelayTotals = msgspec.field(default_factory=lambda: RelayTotals(lives))
    pids: dict[int, int] = {}
    _order: frames.DrainOrder | None = None  # to all: they drain

    def channel(self) -> Channel:
        """The protocol of a connection that a relay has opened."""
        proxy = RelayProxy(self)
        self.all[proxy] = None
        return proxy.channel

    def said_hello(self, proxy: RelayProxy) -> None:
        assert proxy.hello is not None  # noqa: S101 # see above
        self.pids[proxy.hello.relay] = proxy.hello.pid
        self._arrived(proxy)
        if self._order is not None:
            proxy.channel.send(self._order)

    def left(self, proxy: RelayProxy) -> None:
        self.all.pop(proxy, None)
        if proxy.hello is not None:
            self.totals.leaves((proxy.hello.relay, proxy.hello.epoch), proxy.hello.pid)
        self.totals.heard(proxy.channel)

    def reconnect(self) -> None:
        """Have every relay connect again: another member leads."""
        for proxy in list(self.all):
            proxy.channel.close("another decider leads")

    def drain(self, within: float) -> None:
        """Have every relay finish what is under way, and end."""
        self._order_all(frames.DrainOrder(within))

    def hand_over(self, within: float, decider: str) -> None:
        """Have every relay finish gently within so many seconds, and ask the decider at this socket from now on."""
        self._order_all(frames.DrainOrder(within, True, decider))

    def _order_all(self, order: frames.DrainOrder) -> None:
        """Give all relays this order, now or once they have said hello."""
        self._order = order
        for proxy in self.all:
            if proxy.hello is not None:
                proxy.channel.send(order)
                proxy.channel.flush()

    def living(self, others: Mapping[int, int] = MappingProxyType({})) -> dict[int, int]:
        """The processes that live, by number: of relays, and `others` that may not have come yet. One that has ended is
        forgotten, as another program may have its id later."""
        for number in [number for number, pid in self.pids.items() if not lives(pid)]:
            del self.pids[number]
        return {number: pid for number, pid in {**others, **self.pids}.items() if lives(pid)}

    def take(self, given: HandOffPayload) -> None:
        """Relays of a gateway that was taken over, and totals of those that had ended before."""
        self.pids.update(given.relays)
        self.totals.take(given.left)

    # -- totals -------------------------------------------------------------------------------------------------

    def counted(self, proxy: RelayProxy, counts: frames.RelayCounts) -> None:
        if proxy.hello is not None:
            proxy.counts = counts
            self.totals.told((proxy.hello.relay, proxy.hello.epoch), counts, proxy.channel)

    async def count(self) -> None:
        """Have every relay tell its totals."""
        await self.totals.ask(proxy.channel for proxy in self.all if proxy.hello is not None)
