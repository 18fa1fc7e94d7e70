"""Session of one relay with its decider: each message drives the local decider, and its answer goes back.

What a session holds is given back when it ends, in whatever way. A message about a call that is unknown, or to a turn
that has been, changes nothing: it came late, or twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from gateway.core.admission import refusals
from gateway.core.cluster.fencing import FencingToken
from gateway.core.engines.choice import Choice
from gateway.core.engines.transfer import Prefill
from gateway.core.policy.snapshot import Snapshot
from gateway.core.request.outcome import Outcome, Refused
from gateway.core.request.record import Record
from gateway.core.request.routes import ROUTES
from gateway.core.request.tenants import Account
from gateway.decider.dispatch import QueuePlace
from gateway.decider.grant import LocalGrant
from gateway.decider.local import LocalAdmission
from gateway.decider.relays.served import ServedCall, error_of
from gateway.frames.calls import facts_of, fill_in, refusal_of
from gateway.frames.channel import Channel
from gateway.frames.messages import (
    VERSION,
    AllHeld,
    Answered,
    ArrivalAnswer,
    ArrivalAsk,
    Ask,
    AttemptFailed,
    CallEnd,
    EndedRecords,
    FirstByte,
    FleetNews,
    FromRelay,
    GrantTerms,
    Held,
    Hello,
    Judgement,
    ModelsAnswer,
    ModelsAsk,
    MoveAsk,
    Prefilled,
    RelayCounts,
    RetryAnswer,
    RetryAsk,
    SecondAsk,
    SecondEnd,
    SecondNone,
    UnreadRequest,
    WaitAsk,
    Welcome,
)
from gateway.shared.tasks import telling

if TYPE_CHECKING:
    from gateway.decider.relays.hub import RelayHub

AGREE = 1.0  # seconds by which the time of one hold may differ for two machines
ENDED = 8192  # calls that are remembered to have ended, so that a late question opens none of them anew


class RelaySession:
    """Connection of one relay. `hello` None: the relay has not introduced itself."""

    def __init__(self, hub: RelayHub) -> None:
        self.hub = hub
        self.hello: Hello | None = None
        self.counts: RelayCounts | None = None
        self.calls: dict[int, ServedCall] = {}
        self.waiting: dict[int, Ask] = {}  # asked before every relay had told what it holds
        self.synced = False  # all that it holds
        self.engines: frozenset[str] = frozenset()  # those that it knows
        self.news: FleetNews | None = None  # what it was told of them last
        self.channel: Channel | None = None
        self.orphans: dict[int, ServedCall] = {}  # of the relay's connection before this, until it tells of them
        self._last = 0  # the highest number that its relay had given when it told what it holds
        self._alive: frozenset[int] = frozenset()  # of those up to there
        self._seconds: set[int] = set()  # those for which it holds a second attempt too
        self._ended: dict[int, None] = {}
        self._listing: set[asyncio.Task[None]] = set()

    @property
    def number(self) -> int:
        """Relay number; 0 until the relay has introduced itself."""
        return 0 if self.hello is None else self.hello.relay

    @property
    def process(self) -> tuple[int, float, int, int]:
        """Process of the relay: id, start, calls that have ended, connections."""
        counts, hello = self.counts, self.hello
        of_calls = (0, 0) if counts is None else (counts.ended, counts.connections)
        return (0, 0.0, *of_calls) if hello is None else (hello.pid, hello.started, *of_calls)

    # -- messages -----------------------------------------------------------------------------------------------

    def take(self, message: FromRelay) -> None:
        """Do what a message says."""
        if self.hello is None:
            self._hello(message)
            return
        match message:
            case Ask():
                self._asked(message)
            case CallEnd():
                self._call_ended(message)
            case FirstByte():
                served = self.calls.get(message.number)
                if served is not None and served.grant is not None and served.grant.hold.prefill:
                    served.grant.first_byte(message.at)
            case RelayCounts():
                self.hub.counted(self, message)
            case EndedRecords():
                for at, record in message.calls:
                    self.hub.ended(record, at)
            case _:
                self._take_rare(message)

    def _take_rare(self, message: FromRelay) -> None:
        match message:
            case Held():
                self._held(message)
            case AllHeld():
                self._all_held(message)
            case UnreadRequest():
                self._unread(message)
            case ArrivalAsk():
                self._counted(message)
            case ModelsAsk():
                task = asyncio.get_running_loop().create_task(self._models(message))
                self._listing.add(task)
                task.add_done_callback(self._listing.discard)
            case Hello() | Ask() | CallEnd() | FirstByte() | RelayCounts() | EndedRecords():
                self.close("it says hello twice")
            case _:
                served = self.calls.get(message.number)
                if served is not None and served.grant is not None:
                    self._of_grant(message, served, served.grant)
                elif served is not None and isinstance(message, WaitAsk) and self._new_turn(served, message.turn):
                    self._decided(served, self._wait)

    def _of_grant(
        self,
        message: WaitAsk | Prefilled | Answered | AttemptFailed | RetryAsk | MoveAsk | SecondAsk | SecondEnd,
        served: ServedCall,
        grant: LocalGrant,
    ) -> None:
        match message:
            case Prefilled() if message.turn == served.turn:
                grant.prefilled(message.at, message.failure, message.message, message.reason)
            case Answered() if message.turn == served.turn:
                grant.answered(message.status)
            case AttemptFailed() if message.turn == served.turn:
                pause = message.pause
                grant.failed(message.kind, message.message, message.reason, over=message.over, pause=pause)
            case RetryAsk() if self._new_turn(served, message.turn):
                self._run(served, self._retry(served, grant, message))
            case MoveAsk() if self._new_turn(served, message.turn):
                grant.ending = grant.ending if message.ending is None else message.ending
                self._run(served, self._move(served, grant, message))
            case SecondAsk() if self._new_turn(served, message.turn):
                self._run(served, self._second(served, grant, message))
            case SecondEnd() if message.turn == served.turn and served.second is not None:
                second, served.second = served.second, None
                if message.taken:
                    grant.ending = message.ending
                    grant.take(second)
                else:
                    second.close()

    @staticmethod
    def _new_turn(served: ServedCall, turn: int) -> bool:
        """Whether this is a question that was not asked before."""
        new = turn > served.turn
        served.turn = max(turn, served.turn)
        return new

    def _hello(self, message: FromRelay) -> None:
        hub = self.hub
        if not isinstance(message, Hello):
            self.close("it has not said hello")
        elif message.version != VERSION:
            self.close(f"it speaks version {message.version} of the frames, and this decider version {VERSION}")
        elif FencingToken(message.decider_epoch).fences(hub.epoch):
            self.close(f"it has met a decider of epoch {message.decider_epoch}: the epoch {hub.epoch} is over")
            hub.deposed(message.decider_epoch)
        elif not hub.joins(self, message):
            self.close(f"relay {message.relay} is here with a later epoch than {message.epoch}")
        else:
            self.hello = message
            self.send(Welcome(VERSION, hub.epoch))
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
        calls, self.calls, self.orphans = self.orphans | self.calls, {}, {}
        self.waiting.clear()
        for served in calls.values():
            served.waits_no_more()
        return calls

    # -- a call's questions -------------------------------------------------------------------------------------

    def _asked(self, ask: Ask) -> None:
        number = ask.number
        earlier = self.waiting.get(number)
        if number in self.calls or number in self._ended or (earlier is not None and ask.turn <= earlier.turn):
            return
        if self.synced and number <= self._last and number not in self._alive:
            return  # it has ended before this connection
        if not self.synced or not self.hub.complete:
            self.waiting[number] = ask
        else:
            self.answer(ask)

    def answer(self, ask: Ask) -> None:
        """Judge the call, and find it an engine where it wants one."""
        route = ROUTES.get(ask.call.route.encode())
        if route is None:
            self.close(f"it asks for the route {ask.call.route[:60]!r}, which there is not")
            return
        self.hub.changes += 1
        served = self.calls[ask.number] = ServedCall(ask, route)
        kept = self.orphans.pop(ask.number, None)
        if kept is not None and ask.facts is not None:
            served.admission = kept.admission  # it stays charged
        elif kept is not None:
            kept.forgotten()
        if served.admission is None and ask.facts is not None:
            self._carry(served)
        if ask.facts is None:
            self._decided(served, self._judge)
        elif ask.front:
            self._decided(served, self._queue)
        elif ask.wait:
            self._decided(served, self._wait)

    def _decided(self, served: ServedCall, decide: Callable[[ServedCall], None]) -> None:
        """Do what may end in a refusal, and tell it."""
        try:
            decide(served)
        except Refused as refused:
            self._refuse(served, refused)
        except Exception as error:  # a bug: it must not cost the other calls their connection
            self._refuse(served, refusals.bug(served.call.request_id))
            context = {"message": "a call of a relay failed", "exception": error}
            asyncio.get_running_loop().call_exception_handler(context)

    def _judge(self, served: ServedCall) -> None:
        hub, ask = self.hub, served.ask
        snapshot, account = self._payer(ask.call.tenant, ask.policy)
        served.admission = hub.decider.arrive(snapshot, account, served.record, ask.call.arrived, ask.call.body)
        served.admission.__enter__()
        served.go_by(snapshot)
        judging = served.admission.judge(served.call)
        if judging is None:
            self._judged(served)
        else:
            self._run(served, self._judge_late(served, judging))

    def _payer(self, tenant: str, policy: int) -> tuple[Snapshot, Account]:
        """The policy of a request, and who pays. Raises Refused where a reload has done away with the tenant."""
        hub = self.hub
        snapshot = hub.snapshot(policy)
        account = snapshot.tenants.account(tenant) or hub.snapshot(hub.version).tenants.account(tenant)
        if account is None:
            raise Refused(Outcome.UNAUTHORIZED, "The tenant of this key is no longer there.")
        return snapshot, account

    async def _judge_late(self, served: ServedCall, judging: Awaitable[None]) -> None:
        await judging
        served.task = None
        self._judged(served)

    def _judged(self, served: ServedCall) -> None:
        if served.ask.wait:
            self._wait(served)
        else:
            self._tell_judged(served)

    def _tell_judged(self, served: ServedCall) -> None:
        lines = b"" if served.admission is None else served.admission.headers(self.hub.clock())
        self.send(Judgement(served.ask.number, served.turn, facts_of(served.call), lines))

    def _wait(self, served: ServedCall) -> None:
        """A grant at once, or a place in the queue. Raises Refused."""
        dispatch = self.hub.decider.dispatch
        grant = dispatch.at_once(served.call)
        if grant is not None:
            self._granted(served, grant)
            return
        self._tell_judged(served)
        self._queue(served)

    def _queue(self, served: ServedCall) -> None:
        """A place in the queue, before the next message is looked at. Raises Refused."""
        ask = served.ask
        served.place = place = self.hub.decider.dispatch.queue(
            served.call, frozenset(ask.exclude), front=ask.front
        )  # fmt: skip
        place.turn.add_done_callback(partial(self._turn, served, place))

    def _turn(self, served: ServedCall, place: QueuePlace, turn: asyncio.Future[LocalGrant]) -> None:
        """A call that waited has its grant, or its refusal."""
        refused = turn.exception()
        if served.place is not place:
            return  # it was given up in this very moment
        served.place = None
        if isinstance(refused, Refused):
            self._refuse(served, refused)
        else:
            self._granted(served, turn.result())

    def _granted(self, served: ServedCall, grant: LocalGrant) -> None:
        self.hub.decider.dispatch.retries.call(self.hub.clock())
        served.grant = grant
        self._tell_granted(served, grant, served.turn)

    def _tell_granted(self, served: ServedCall, grant: LocalGrant, turn: int) -> None:
        hub = self.hub
        plan = grant.prefill
        if grant.engine.id not in self.engines or (plan and plan.engine and plan.engine.id not in self.engines):
            hub.tell_fleet(self)
        self.send(served.terms(grant, turn, hub.epoch, grant.hedge_after(), hub.clock()))

    async def _retry(self, served: ServedCall, grant: LocalGrant, message: RetryAsk) -> None:
        served.attempts = message.attempts
        pause = await grant.again(message.kind, message.attempts, set(message.failed))
        self.send(RetryAnswer(message.number, message.turn, pause))

    async def _move(self, served: ServedCall, grant: LocalGrant, message: MoveAsk) -> None:
        await self.hub.until_synced()
        await grant.move(frozenset(message.exclude))
        self._tell_granted(served, grant, message.turn)

    async def _second(self, served: ServedCall, grant: LocalGrant, message: SecondAsk) -> None:
        await self.hub.until_synced()
        served.second = await grant.second()
        if served.second is None:
            self.send(SecondNone(message.number, message.turn))
        else:
            self._tell_granted(served, served.second, message.turn)

    def _refuse(self, served: ServedCall, refused: Refused) -> None:
        facts = None if served.admission is None else facts_of(served.call)
        self.send(refusal_of(served.ask.number, served.turn, refused, facts))

    def _run(self, served: ServedCall, work: Coroutine[Any, Any, None]) -> None:
        """Let the call wait for something. Its end, and its relay's, cancel that."""
        served.task = asyncio.get_running_loop().create_task(self._answered(served, work))
        served.task.add_done_callback(telling("a call of a relay failed"))
        served.task.add_done_callback(lambda _: work.close())  # where it was cancelled before it began

    async def _answered(self, served: ServedCall, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Refused as refused:
            self._refuse(served, refused)
        except Exception:
            self._refuse(served, refusals.bug(served.call.request_id))
            raise

    # -- other questions and news -------------------------------------------------------------------------------

    def _call_ended(self, end: CallEnd) -> None:
        self.hub.changes += 1
        self.waiting.pop(end.number, None)
        self._ended[end.number] = None
        if len(self._ended) > ENDED:
            # In bulk: see caches in docs/decisions/performance.md.
            for number in list(islice(self._ended, ENDED // 16)):
                del self._ended[number]
        served = self.calls.pop(end.number, None) or self.orphans.pop(end.number, None)
        if served is None:
            return
        if end.learned is not None:
            self.hub.decider.learn(served.call, *end.learned)
        served.ended(end)
        if served.grant is not None:
            self.hub.call_ended(served.grant.engine.id)

    def _held(self, held: Held) -> None:
        """A grant of an earlier decider: its hold is taken over."""
        ask, terms, route = held.ask, held.terms, ROUTES.get(held.ask.call.route.encode())
        if route is None:
            self.close(f"it holds a call of the route {ask.call.route[:60]!r}, which there is not")
            return
        if self.synced:
            return  # it was told on another connection
        if held.second:
            self._seconds.add(ask.number)
        if self._keeps(held):
            return
        served = self.calls.get(ask.number)
        if served is None:
            served = self.calls[ask.number] = ServedCall(ask, route)
            fill_in(served.call, terms.facts)
            self._carry(served)
        if (served.second if held.second else served.grant) is not None:
            return
        fill_in(served.call, terms.facts)
        prefill = 0 if held.first_byte else terms.prefill
        engine = self.hub.engine_of(terms.engine.id, terms.engine.url)
        choice = Choice(engine=engine, prefill=prefill, cached=terms.cached, ttft=terms.expected)
        dispatch = self.hub.decider.dispatch
        grant = dispatch.restored(served.call, choice, terms.taken_at, held.first_byte)
        if held.second:
            served.second = grant
        else:
            served.grant = grant
            self._restore_half(grant, terms)

    def _restore_half(self, grant: LocalGrant, terms: GrantTerms) -> None:
        """Take over the hold of a prompt that another engine still reads."""
        plan = terms.elsewhere
        if plan is not None and plan.engine is not None:
            engine = self.hub.engine_of(plan.engine.id, plan.engine.url)
            told = (plan.here, plan.there, plan.unread, plan.moved, plan.priority, plan.within)
            grant.split(Prefill(engine, plan.reason, *told), terms.taken_at, restored=True)

    def _carry(self, served: ServedCall) -> None:
        """An earlier decider let it in: its tokens count in its tenant's quota here."""
        decider = self.hub.decider
        served.carried = decider.limits.carry(served.call.tenant, served.call.cost, self.hub.clock())

    def _keeps(self, held: Held) -> bool:
        """Whether this is a grant of this very decider's, which it has kept since the relay's last connection."""
        number = held.ask.number
        served = self.orphans.get(number) or self.calls.get(number)
        if served is None:
            return False
        first, second = served.grant, served.second
        if first is not None and second is not None and not held.second and _is_of(held, second):
            first.take(second)  # its relay has taken it, and the news of that was lost
            served.second = None
        grant = served.second if held.second else first
        if grant is None or not _is_of(held, grant):
            return False
        self.calls[number] = served
        self.orphans.pop(number, None)
        served.turn = held.ask.turn
        if held.terms.elsewhere is None and grant.half is not None:
            grant.half.close()  # the news of its end was lost
        if held.first_byte and grant.hold.prefill:
            grant.first_byte(held.first_byte)
        return True

    def _all_held(self, told: AllHeld) -> None:
        """Release what the relay has not reported. A call that is asked for again keeps its charges."""
        if self.synced:
            return
        self.synced, self._last, self._alive = True, told.last, frozenset(told.alive)
        for number, served in self.calls.items():
            if served.second is not None and number not in self._seconds:
                served.second.close()
                served.second = None
        for number, served in list(self.orphans.items()):
            if number in self.calls:
                del self.orphans[number]
                served.forgotten()  # it holds something else
            elif number in self._alive:
                served.released()
            else:
                del self.orphans[number]
                served.lost()
        wanted = self._alive - self.calls.keys()  # those that hold something do not ask for it
        self.waiting = {number: ask for number, ask in self.waiting.items() if number in wanted}
        if self.hub.complete:
            waiting, self.waiting = self.waiting, {}
            for ask in waiting.values():
                self.answer(ask)
        self.hub.release()

    def _unread(self, request: UnreadRequest) -> None:
        """Count a request that was never judged. Its refusal by a limit would come too late."""
        try:
            admission = self._count(request)
        except Refused:
            return
        error = error_of(request.left, request.outcome)
        admission.__exit__(None if error is None else type(error), error, None)

    def _count(self, request: UnreadRequest | ArrivalAsk) -> LocalAdmission:
        self.hub.changes += 1
        hub, record = self.hub, Record(request_id="", route="", tenant=request.tenant)
        snapshot, account = self._payer(request.tenant, request.policy)
        return hub.decider.arrive(snapshot, account, record, request.at, b"")

    def _counted(self, message: ArrivalAsk) -> None:
        try:
            self._count(message).__exit__(None, None, None)
        except Refused as refused:
            self.send(refusal_of(message.number, message.turn, refused))
        else:
            self.send(ArrivalAnswer(message.number, message.turn))

    async def _models(self, message: ModelsAsk) -> None:
        try:
            _, account = self._payer(message.tenant, message.policy)
        except Refused as refused:
            self.send(refusal_of(message.number, message.turn, refused))
            return
        status, body = await self.hub.decider.models(message.path, account, lambda: False)
        self.send(ModelsAnswer(message.number, message.turn, status, body))


def _is_of(held: Held, grant: LocalGrant) -> bool:
    """Whether it is this grant that a relay tells of."""
    hold, terms = grant.hold, held.terms
    return hold.live and grant.engine.id == terms.engine.id and abs(hold.taken_at - terms.taken_at) <= AGREE
