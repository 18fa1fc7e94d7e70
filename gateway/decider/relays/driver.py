"""Driver of a relay's calls: each question about a call is put to the local decider, and its answer goes back.

A message that belongs to a turn that has been changes nothing: it came late, or twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any

from gateway.core.admission import refusals
from gateway.core.request.outcome import Refused
from gateway.decider.grant import LocalGrant
from gateway.decider.relays.served import ServedCall
from gateway.decider.waiting import QueuePlace
from gateway.frames import messages as frames
from gateway.frames.calls import facts_of, refusal_of
from gateway.shared.tasks import telling

if TYPE_CHECKING:
    from gateway.decider.relays.hub import RelayHub


class CallDriver:
    """`send` sends an answer to the relay. `introduce` tells it first of a grant's engines that it does not know."""

    def __init__(self, hub: RelayHub, send: Callable[[Any], None], introduce: Callable[[LocalGrant], None]) -> None:
        self._hub = hub
        self._send = send
        self._introduce = introduce

    def begin(self, served: ServedCall) -> None:
        """Judge the call, and find it an engine where it wants one."""
        ask = served.ask
        if ask.facts is None:
            self._decided(served, self._judge)
        elif ask.front:
            self._decided(served, self._queue)
        elif ask.wait:
            self._decided(served, self._wait)

    def take(self, message: frames.OfCall, served: ServedCall) -> None:
        """Do what a message about a call that is here says."""
        grant = served.grant
        if grant is not None:
            self._of_grant(message, served, grant)
        elif isinstance(message, frames.WaitAsk) and self._new_turn(served, message.turn):
            self._decided(served, self._wait)

    def _of_grant(self, message: frames.OfCall, served: ServedCall, grant: LocalGrant) -> None:
        match message:
            case frames.Prefilled() if message.turn == served.turn:
                grant.prefilled(message.at, message.failure, message.message, message.reason)
            case frames.Answered() if message.turn == served.turn:
                grant.answered(message.status)
            case frames.AttemptFailed() if message.turn == served.turn:
                attempt = served.second if message.second else grant
                if attempt is not None:
                    pause = message.pause
                    attempt.failed(message.kind, message.message, message.reason, over=message.over, pause=pause)
            case frames.RetryAsk() if self._new_turn(served, message.turn):
                self._run(served, self._retry(served, grant, message))
            case frames.MoveAsk() if self._new_turn(served, message.turn):
                grant.ending = grant.ending if message.ending is None else message.ending
                self._run(served, self._move(served, grant, message))
            case frames.SecondAsk() if self._new_turn(served, message.turn):
                self._run(served, self._second(served, grant, message))
            case frames.SecondEnd() if message.turn == served.turn:
                served.waits_no_more()  # it may be given up before it is granted
                second, served.second = served.second, None
                if second is None:
                    return
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
        hub, ask = self._hub, served.ask
        snapshot, account = self._hub.payer(ask.call.tenant, ask.policy)
        served.admission = admission = hub.decider.arrive(
            snapshot, account, served.record, ask.call.arrived, ask.call.body
        )
        served.go_by(snapshot)
        judging = admission.judge(served.call)
        if judging is None:
            self._judged(served)
        else:
            self._run(served, self._judge_late(served, judging))

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
        lines = b"" if served.admission is None else served.admission.headers(self._hub.clock())
        self._send(frames.Judgement(served.ask.number, served.turn, facts_of(served.call), lines))

    def _wait(self, served: ServedCall) -> None:
        """A grant at once, or a place in the queue. Raises Refused."""
        dispatch = self._hub.decider.dispatch
        grant = dispatch.at_once(served.call)
        if grant is not None:
            self._granted(served, grant)
            return
        self._tell_judged(served)
        self._queue(served)

    def _queue(self, served: ServedCall) -> None:
        """A place in the queue, before the next message is looked at. Raises Refused."""
        ask = served.ask
        waiting = self._hub.decider.dispatch.waiting
        served.place = place = waiting.queue(served.call, frozenset(ask.exclude), front=ask.front)
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
        self._hub.decider.dispatch.retries.call(self._hub.clock())
        served.grant = grant
        self._tell_granted(served, grant, served.turn)

    def _tell_granted(self, served: ServedCall, grant: LocalGrant, turn: int) -> None:
        hub = self._hub
        self._introduce(grant)
        self._send(served.terms(grant, turn, hub.epoch, grant.hedge_after(), hub.clock()))

    async def _retry(self, served: ServedCall, grant: LocalGrant, message: frames.RetryAsk) -> None:
        served.attempts = message.attempts
        pause = await grant.again(message.kind, message.attempts, set(message.failed))
        self._send(frames.RetryAnswer(message.number, message.turn, pause))

    async def _move(self, served: ServedCall, grant: LocalGrant, message: frames.MoveAsk) -> None:
        await self._hub.until_synced()
        await grant.move(frozenset(message.exclude))
        self._tell_granted(served, grant, message.turn)

    async def _second(self, served: ServedCall, grant: LocalGrant, message: frames.SecondAsk) -> None:
        await self._hub.until_synced()
        served.second = await grant.second(None)
        if served.second is None:
            self._send(frames.SecondNone(message.number, message.turn))
        else:
            self._tell_granted(served, served.second, message.turn)

    def _refuse(self, served: ServedCall, refused: Refused) -> None:
        facts = None if served.admission is None else facts_of(served.call)
        self._send(refusal_of(served.ask.number, served.turn, refused, facts))

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
