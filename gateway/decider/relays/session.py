"""Session of one relay with its decider: each message drives the local decider, and its answer goes back.

What a session holds is given back when it ends, in whatever way. A message about a call that is unknown, or to a turn
that has been, changes nothing: it came late, or twice.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from gateway.core.cluster.fencing import FencingToken
from gateway.core.request.outcome import Refused
from gateway.core.request.record import Record
from gateway.core.request.routes import ROUTES
from gateway.decider.grant import LocalGrant
from gateway.decider.relays.driver import CallDriver
from gateway.decider.relays.resync import Resync
from gateway.decider.relays.served import ServedCall
from gateway.frames import messages as frames
from gateway.frames.calls import refusal_of
from gateway.frames.channel import Channel

if TYPE_CHECKING:
    from gateway.decider.relays.hub import RelayHub


class RelaySession:
    """Connection of one relay. `hello` None: the relay has not introduced itself."""

    def __init__(self, hub: RelayHub) -> None:
        self.hub = hub
        self.hello: frames.Hello | None = None
        self.counts: frames.RelayCounts | None = None
        self.calls: dict[int, ServedCall] = {}
        self.waiting: dict[int, frames.Ask] = {}  # asked before every relay had told what it holds
        self.resync = Resync(hub, self.calls)
        self.engines: frozenset[str] = frozenset()  # those that it takes for up
        self.news: frames.FleetNews | None = None  # what it was told of them last
        self.channel: Channel | None = None
        self._driver = CallDriver(hub, self.send, self._introduce)
        self._listing: set[asyncio.Task[None]] = set()

    # -- messages -----------------------------------------------------------------------------------------------

    def take(self, message: frames.FromRelay) -> None:
        """Do what a message says."""
        if self.hello is None:
            self._hello(message)
            return
        match message:
            case frames.Ask():
                self._asked(message)
            case frames.CallEnd():
                self._call_ended(message)
            case frames.FirstByte():
                served = self.calls.get(message.number)
                if served is not None and served.grant is not None and served.grant.hold.awaited:
                    served.grant.first_byte(message.at)
            case frames.RelayCounts():
                self.counts = message
                self.hub.totals.told((self.hello.relay, self.hello.epoch), message, self.channel)
            case frames.EndedRecords():
                for at, record in message.calls:
                    self.hub.ended(record, at)
            case _:
                self._take_rare(message)

    def _take_rare(self, message: frames.FromRelay) -> None:
        match message:
            case frames.Held():
                self._held(message)
            case frames.AllHeld():
                self._all_held(message)
            case frames.ArrivalAsk():
                self._counted(message)
            case frames.ModelsAsk():
                task = asyncio.get_running_loop().create_task(self._models(message))
                self._listing.add(task)
                task.add_done_callback(self._listing.discard)
            case frames.Hello():
                self.close("it says hello twice")
            case _ if isinstance(message, frames.OfCall):
                served = self.calls.get(message.number)
                if served is not None:
                    self._driver.take(message, served)

    def _hello(self, message: frames.FromRelay) -> None:
        hub = self.hub
        if not isinstance(message, frames.Hello):
            self.close("it has not said hello")
        elif message.version != frames.VERSION:
            self.close(f"it speaks version {message.version} of the frames, and this decider version {frames.VERSION}")
        elif FencingToken(message.decider_epoch).fences(hub.epoch):
            self.close(f"it has met a decider of epoch {message.decider_epoch}: the epoch {hub.epoch} is over")
            hub.deposed(message.decider_epoch)
        elif not hub.joins(self, message):
            self.close(f"relay {message.relay} is here with a later epoch than {message.epoch}")
        else:
            self.hello = message
            self.send(frames.Welcome(frames.VERSION, hub.epoch))
            hub.tell_all(self)

    def send(self, message: Any) -> None:
        if self.channel is not None:
            self.channel.send(message)

    def close(self, why: str) -> None:
        """Cut it off."""
        if self.channel is not None:
            self.channel.close(why)

    def lost(self, why: str) -> None:
        """The connection has ended. What its calls hold comes back once it is known that their relay is gone too."""
        if why:
            name = "a relay" if self.hello is None else f"relay {self.hello.relay}"
            self.hub.say(f"{name} was cut off: {why}")
        for task in self._listing:
            task.cancel()
        self.hub.leaves(self)

    @property
    def known(self) -> dict[int, ServedCall]:
        """All calls, those among them that the relay's earlier connection has left and this one has not reported."""
        return self.resync.orphans | self.calls

    def give_up(self) -> None:
        """Take the calls off the queues. They keep what they hold."""
        for number, served in self.resync.orphans.items():
            if self.calls.setdefault(number, served) is not served:
                served.forgotten()  # its relay has told of another hold
        self.resync.orphans = {}
        self.waiting.clear()
        for served in self.calls.values():
            served.waits_no_more()

    def give_back(self) -> None:
        """Give back all that its calls hold here."""
        self.give_up()
        for served in self.calls.values():
            served.lost()
        self.calls.clear()

    def _introduce(self, grant: LocalGrant) -> None:
        """Tell the relay of a grant's engines that it does not know, or takes for dead: it would move the call away."""
        plan = grant.prefill
        if grant.engine.id not in self.engines or (plan and plan.engine and plan.engine.id not in self.engines):
            self.hub.tell_fleet(self)

    # -- a call's questions -------------------------------------------------------------------------------------

    def _asked(self, ask: frames.Ask) -> None:
        number = ask.number
        earlier = self.waiting.get(number)
        if number in self.calls or (earlier is not None and ask.turn <= earlier.turn):
            return
        if earlier is None and self.resync.is_over(number):
            return
        self.resync.last = max(self.resync.last, number)
        if not self.resync.done or not self.hub.complete:
            self.waiting[number] = ask
        else:
            self.answer(ask)

    def answer(self, ask: frames.Ask) -> None:
        """Judge the call, and find it an engine where it wants one."""
        route = ROUTES.get(ask.call.route.encode())
        if route is None:
            self.close(f"it asks for the route {ask.call.route[:60]!r}, which there is not")
            return
        self.hub.changes += 1
        served = self.calls[ask.number] = ServedCall(ask, route)
        self.resync.asked_again(served)
        self._driver.begin(served)

    # -- other questions and news -------------------------------------------------------------------------------

    def _call_ended(self, end: frames.CallEnd) -> None:
        self.hub.changes += 1
        self.waiting.pop(end.number, None)
        self.resync.last = max(self.resync.last, end.number)
        served = self.calls.pop(end.number, None) or self.resync.orphans.pop(end.number, None)
        if served is None:
            return
        if end.learned is not None:
            self.hub.decider.learn(served.call, *end.learned)
        served.ended(end)
        if served.grant is not None:
            self.hub.call_ended(served.grant.engine.id)

    def _held(self, held: frames.Held) -> None:
        call = held.ask.call
        route = ROUTES.get(call.route.encode())
        if route is None:
            self.close(f"it holds a call of the route {call.route[:60]!r}, which there is not")
        else:
            self.resync.restore(held, route)

    def _all_held(self, told: frames.AllHeld) -> None:
        """The relay has reported all that it holds: answer what it asked meanwhile."""
        if self.resync.done:
            return
        self.resync.finish(told)
        wanted = set(told.alive) - self.calls.keys()  # those that hold something do not ask for it
        self.waiting = {number: ask for number, ask in self.waiting.items() if number in wanted}
        self.hub.release()

    def _counted(self, message: frames.ArrivalAsk) -> None:
        """Count a request. Of one that has come to nothing, nobody waits for the answer."""
        self.hub.changes += 1
        try:
            snapshot, account = self.hub.payer(message.tenant, message.policy)
            record = Record(request_id="", route="", tenant=message.tenant)
            self.hub.decider.arrive(snapshot, account, record, message.at, b"")
        except Refused as refused:
            self.send(refusal_of(message.number, message.turn, refused))
        else:
            self.send(frames.ArrivalAnswer(message.number, message.turn))

    async def _models(self, message: frames.ModelsAsk) -> None:
        try:
            _, account = self.hub.payer(message.tenant, message.policy)
        except Refused as refused:
            self.send(refusal_of(message.number, message.turn, refused))
            return
        status, body = await self.hub.decider.models(message.path, account, lambda: False)
        self.send(frames.ModelsAnswer(message.number, message.turn, status, body))
