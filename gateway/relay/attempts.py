"""Attempts: from a grant to the first bytes of an answer. The only place that may change a call's engine.

A failure the client has seen nothing of is tried again elsewhere, within the policy's retry budget. Hedging is a second
attempt while the first is slow to answer: whoever answers first serves the call, the other is cancelled. It needs room
on another engine now (nobody waits twice) and a retry of the budget, so it adds no more load than retries may. A send
that is cancelled closes its connection, and vLLM aborts its request.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any

from gateway.core.admission.retries import RetryBudget
from gateway.core.admission.shaping import shape_body
from gateway.core.engines.breaker import Ending, ending_of
from gateway.core.engines.choice import usable_of
from gateway.core.engines.fleet import Engine, Fleet
from gateway.core.engines.trouble import OWN, Trouble
from gateway.core.policy.policy import Policy
from gateway.core.request.call import Call
from gateway.core.request.outcome import Outcome, Refused
from gateway.core.request.record import Record
from gateway.decider.dispatch import Dispatch, Grant
from gateway.upstream.client import Client, EngineError, Reply

# Failures of an engine before its first byte, by the policy's names for them: nothing of the answer has been used.
CAUSES = {"connect": "connect", "timeout": "timeout"} | dict.fromkeys(
    ("reset", "garbage", "truncated", "stall", "closed"), "reset"
)
SLOWER = 3.0  # than its usual pace an engine may be with a whole answer
FAIR = 1.0  # seconds that any engine should need at most for a first byte, however little is predicted
EARLY = 0.005  # seconds that a time-out may come before its time: loops count milliseconds, and timers have slack
QUANTILES = {"p90": 0.90, "p95": 0.95, "p99": 0.99}  # the policy's words


class Attempts:
    """`policy` is the one that new calls go by."""

    def __init__(
        self,
        policy: Policy,
        fleet: Fleet,
        dispatch: Dispatch,
        retries: RetryBudget,
        clients: Mapping[str, Client],
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self.policy = policy
        self.fleet = fleet
        self.dispatch = dispatch
        self.retries = retries
        self.clients = clients
        self.clock = clock
        self.rng = rng

    async def send(self, path: bytes, headers: bytes, call: Call, grant: Grant, record: Record) -> Reply:
        """Send the call; on a failure try another engine within the budget. `grant` is then of the engine that
        answered. `headers` are lines for the engine. Raises Refused."""
        policy = self.policy
        self.retries.call(self.clock())
        failed: set[str] | None = None
        while True:
            after = self._hedge_after(call, policy) if policy.hedging.enabled else None
            reply: Reply | None = None
            try:
                if after is None:
                    reply = await self._send(path, headers, call, record, grant)
                else:
                    send = partial(self._send, path, headers, call, record)
                    reply = await hedged(grant, send, after, self._second)
                    record.engine = grant.engine.id
            except EngineError as error:
                kind, message = CAUSES[error.kind], str(error)
                at_work = kind == "timeout" and self._over(call)
                call.sent_at = call.sent_at if at_work else None
                blameless = error.reason == OWN or (kind == "timeout" and self._hurried(call, grant))
                _judge(grant, Ending.NEUTRAL if blameless else Ending.FAILURE, message)
                if kind == "connect" and not blameless:
                    # until its health answers again
                    grant.engine.down(Trouble(error.reason, f"{message} (a call)", self.clock()))
                    self.dispatch.changed(grant.engine)  # who waits for it may have to go elsewhere
            else:
                kind, message = str(reply.status), f"it answered {reply.status}"
                _judge(grant, ending_of(reply.status), message)
                if kind not in policy.retries.on:
                    return reply
                call.sent_at = None
            failed = set() if failed is None else failed
            again = kind in policy.retries.on and self._again(kind, call, grant, record, failed)
            if reply is not None:
                if kind == "429" and not again:
                    return reply  # nobody else can be asked: let the client hear it
                reply.close()
            if not again:
                if self._over(call):
                    raise Refused(Outcome.EXPIRED, "The deadline passed before the engine's first byte.")
                raise failure(grant.engine, message, "it cannot be reached" if kind == "connect" else message)
            failed.add(grant.engine.id)
            if kind != "429":  # an engine that is too busy says nothing of the others
                await asyncio.sleep(self.retries.backoff(record.attempts, self.rng))
            await grant.move(frozenset(failed))

    def _send(
        self, path: bytes, headers: bytes, call: Call, record: Record, grant: Grant
    ) -> Coroutine[Any, Any, Reply]:
        """One attempt, on the grant's engine."""
        engine, now = grant.engine, self.clock()
        record.attempts += 1
        if call.sent_at is None:
            call.sent_at = now
        record.engine = engine.id
        body = shape_body(call.body, call.route.kind, call.shaped) if call.shaped else call.body
        patience = self.policy.timeouts.first_byte
        if not call.stream:  # a whole answer's first byte comes with its last
            patience += SLOWER * (call.shaped or call.asked) * engine.tpot
        timeout = min(patience, call.deadline - now)
        return self.clients[engine.id].send(b"POST", path, headers, body, timeout=timeout)

    def _again(self, kind: str, call: Call, grant: Grant, record: Record, failed: set[str]) -> bool:
        """Whether there may be another attempt; if so it is taken from the budget. A 429 goes elsewhere or nowhere."""
        now = self.clock()
        if self._over(call) or record.attempts > self.retries.policy.per_call:
            return False
        if kind == "429" and not self._others(call, grant, failed):
            return False
        return self._lost_one(kind, call, grant, record, failed) or self.retries.take(now)

    def _hurried(self, call: Call, grant: Grant) -> bool:
        """Whether the call's own deadline left the engine less time than it may well need: that is no fault of it, and
        no client may open a breaker by asking for the impossible."""
        now = self.clock()
        usual = grant.expected if call.stream else grant.expected + (call.shaped or call.asked) * grant.engine.tpot
        return self._over(call) and now - grant.hold.taken_at < max(FAIR, SLOWER * usual)

    def _over(self, call: Call) -> bool:
        """Whether the call's deadline is why an attempt has ended now, or leaves no time for another."""
        return self.clock() + EARLY >= call.deadline

    def _others(self, call: Call, grant: Grant, failed: set[str]) -> list[Engine]:
        """Engines that could take the call and have not failed it."""
        usable = usable_of(self.fleet.serving(call.model), self.clock())
        return [engine for engine in usable if engine is not grant.engine and engine.id not in failed]

    def _lost_one(self, kind: str, call: Call, grant: Grant, record: Record, failed: set[str]) -> bool:
        """Whether the call has lost its engine while the others are well: its one move from there costs no budget.

        The budget keeps retries from adding load where everything fails; an engine that is gone takes none.
        """
        return (
            kind in ("connect", "reset")
            and record.attempts == 1
            and any(not engine.breaker.failures for engine in self._others(call, grant, failed))
        )

    def _hedge_after(self, call: Call, policy: Policy) -> float | None:
        """Seconds after which a second attempt is worth its cost; None: never."""
        traffic = self.dispatch.traffic[call.model]
        if not call.stream or traffic.level:
            return None
        after = policy.hedging.after
        return after if isinstance(after, float) else traffic.usual_ttft(call.class_name, QUANTILES[after])

    def _second(self, grant: Grant) -> Grant | None:
        """Room on another engine, at once, and within the retry budget."""
        call = grant.call
        if not self._others(call, grant, set()):
            return None
        second = self.dispatch.at_once(call, frozenset((grant.engine.id,)))
        if second is not None and (second.engine is grant.engine or not self.retries.take(self.clock())):
            second.close()
            return None
        return second


def failure(engine: Engine, message: str, told: str) -> Refused:
    """The refusal after an engine's failure. Its address, and `message` where that may hold one, are for the log."""
    detail = f"Engine {engine.id} failed: {message}."
    return Refused(Outcome.UPSTREAM, f"Engine {engine.name} failed: {told}.", retry_after=1.0, detail=detail)


async def hedged(
    grant: Grant,
    send: Callable[[Grant], Coroutine[Any, Any, Reply]],
    after: float,
    second: Callable[[Grant], Grant | None],
) -> Reply:
    """The first good reply of two attempts; where none is good, what became of the first. `grant` is then of the engine
    that the reply is from. Good is whatever is no failure of the engine: one that fails fast must not win.

    `second` is asked once, `after` seconds from now, for a grant on another engine; None: there is no second attempt.
    Raises EngineError.
    """
    first = asyncio.ensure_future(send(grant))
    other: Grant | None = None
    tasks = [first]
    try:
        await asyncio.wait(tasks, timeout=after)
        if not first.done():
            other = second(grant)
        if other is not None:
            tasks.append(asyncio.ensure_future(send(other)))
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not any(_ending(task) is Ending.SUCCESS for task in tasks):  # one has failed: the other decides
            await asyncio.wait(tasks)
        winner = next((task for task in tasks if _ending(task) is Ending.SUCCESS), first)
        if other is not None and winner is not first:
            grant.ending = _ending(first)
            grant.take(other)
            other = None
        tasks.remove(winner)
        return winner.result()
    finally:
        # Nothing is awaited from here on: a cancellation could come in between, and holds and replies would be lost.
        for task in tasks:
            task.cancel()
            task.add_done_callback(_drop)
        if other is not None:
            other.close()


def _judge(grant: Grant, ending: Ending, met: str) -> None:
    """What an attempt's end says of its engine; `met`: in words, for whoever asks why its breaker is open."""
    grant.ending = ending
    if ending is Ending.FAILURE:
        grant.engine.failed_call = met


def _ending(task: asyncio.Future[Reply]) -> Ending:
    """What an attempt says of its engine so far."""
    if not task.done() or task.cancelled():
        return Ending.NEUTRAL
    return ending_of(None if task.exception() is not None else task.result().status)


def _drop(task: asyncio.Future[Reply]) -> None:
    """End an attempt nobody needs any more: its connection closes, or goes back to the pool if its answer is whole."""
    if task.cancelled():
        return
    error = task.exception()
    if error is None:
        task.result().close()
    elif not isinstance(error, EngineError):
        raise error
