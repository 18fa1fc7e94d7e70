"""Session of one relay with its decider: each message drives the local decider, and its answer goes back.

What a session holds is given back when it ends, in whatever way. A message about a call that is unknown, or to a turn
that has been, changes nothing: it came late, or twice.
"""

from __future__ import annotations

import asyncio
from itertools import islice
from typing import TYPE_CHECKING, Any

from gateway.core.cluster.fencing import FencingToken
from gateway.core.request.outcome import Refused
from gateway.core.request.record import Record
from gateway.core.request.routes import ROUTES
from gateway.decider.grant import LocalGrant
from gateway.decider.local import LocalAdmission
from gateway.decider.relays.driver import CallDriver
from gateway.decider.relays.resync import Resync
from gateway.decider.relays.served import ServedCall, error_of
from gateway.frames import messages as frames
from gateway.frames.calls import refusal_of
from gateway.frames.channel import Channel

if TYPE_CHECKING:
    from gateway.decider.relays.hub import RelayHub

ENDED = 8192  # calls that are remembered to have ended, so that a late question opens none of them anew


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
        self._ended: dict[int, None] = {}
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
                self.hub.counted(self, message)
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
            case frames.UnreadRequest():
                self._unread(message)
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

    def give_back(self) -> None:
        """Give back all that its calls hold here."""
        for served in self.given_up().values():
            served.lost()

    def given_up(self) -> dict[int, ServedCall]:
        """Take the calls off the queues. Return them, with what they hold."""
        calls = self.resync.orphans | self.calls
        for each in (self.calls, self.resync.orphans, self.waiting):
            each.clear()
        for served in calls.values():
            served.waits_no_more()
        return calls

    def _introduce(self, grant: LocalGrant) -> None:
        """Tell the relay of a grant's engines that it does not know, or takes for dead: it would move the call away."""
        plan = grant.prefill
        if grant.engine.id not in self.engines or (plan and plan.engine and plan.engine.id not in self.engines):
            self.hub.tell_fleet(self)

    # -- a call's questions -------------------------------------------------------------------------------------

    def _asked(self, ask: frames.Ask) -> None:
        number = ask.number
        earlier = self.waiting.get(number)
        if number in self.calls or number in self._ended or (earlier is not None and ask.turn <= earlier.turn):
            return
        if self.resync.is_over(number):
            return
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
        self._ended[end.number] = None
        if len(self._ended) > ENDED:
            # In bulk: the first entries of a dict that has lost many are looked for past all that are gone.
            for number in list(islice(self._ended, ENDED // 16)):
                del self._ended[number]
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
        wanted = self.resync.alive - self.calls.keys()  # those that hold something do not ask for it
        self.waiting = {number: ask for number, ask in self.waiting.items() if number in wanted}
        if self.hub.complete:
            waiting, self.waiting = self.waiting, {}
            for ask in waiting.values():
                self.answer(ask)
        self.hub.release()

    def _unread(self, request: frames.UnreadRequest) -> None:
        """Count a request that was never judged. Its refusal by a limit would come too late."""
        try:
            admission = self._count(request)
        except Refused:
            return
        error = error_of(request.left, request.outcome)
        admission.__exit__(None if error is None else type(error), error, None)

    def _count(self, request: frames.UnreadRequest | frames.ArrivalAsk) -> LocalAdmission:
        self.hub.changes += 1
        hub, record = self.hub, Record(request_id="", route="", tenant=request.tenant)
        snapshot, account = self.hub.payer(request.tenant, request.policy)
        return hub.decider.arrive(snapshot, account, record, request.at, b"")

    def _counted(self, message: frames.ArrivalAsk) -> None:
        try:
            self._count(message).__exit__(None, None, None)
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
