"""The only place a call waits: `admitted(call)` gives a `Grant`, at once or when its turn comes.

`pump()` is the single writer of queues and holds. It is synchronous, hence atomic in one event loop: no locks, no
sweepers. It runs on push, settle, a new sample, an engine's coming or going, and the earliest deadline.
Leaving the `async with`, by any path, gives the hold back; so does leaving the queue, cancelled or expired.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import random
from collections.abc import Callable
from itertools import count
from types import TracebackType

from gateway.core.call import Call
from gateway.core.choice import Choice, choose
from gateway.core.fleet import Engine, Fleet
from gateway.core.outcome import Outcome, Refused
from gateway.core.policy import Policy
from gateway.core.queues import Queues, Ticket

NOBODY: frozenset[str] = frozenset()
DRAIN_WINDOW = 5.0  # seconds over which the drain rate is averaged
DRAIN_EVERY = 0.1  # seconds at least between two readings of it


class Grant:
    """Permission to use one engine, until closed. Its engine changes only through `move`, before the first byte."""

    __slots__ = ("_dispatch", "call", "engine", "hold")

    def __init__(self, dispatch: Dispatch, call: Call, choice: Choice, now: float) -> None:
        self._dispatch = dispatch
        self.call = call
        self.engine: Engine = choice.engine
        self.hold = choice.engine.hold(call.cost, choice.prefill, now)
        if not call.stream:
            choice.engine.expect_first_byte(self.hold, now + choice.ttft)
        dispatch.running[call.class_name] += 1

    def first_byte(self, now: float) -> None:
        """The engine has answered: it has read the prompt, and has it cached."""
        self.hold.first_byte(now, teach=self.call.stream)
        self.engine.remember(self.call.prefix, now)

    async def move(self, exclude: frozenset[str]) -> None:
        """Give the hold back and take one elsewhere, waiting at the head of the line where there is no room."""
        self.close()
        other = await self._dispatch.enter(self.call, exclude, front=True)
        self.engine, self.hold = other.engine, other.hold

    def close(self) -> None:
        """Give the hold back; a second time changes nothing."""
        hold = self.hold
        if hold.live:
            hold.release()
            self._dispatch.released(self.call, hold.tokens, self.engine)


class Admission:
    """`async with dispatch.admitted(call) as grant`. A class of its own: contextlib's wrapper costs 3 us a call."""

    __slots__ = ("_call", "_dispatch", "_grant")

    def __init__(self, dispatch: Dispatch, call: Call) -> None:
        self._dispatch = dispatch
        self._call = call
        self._grant: Grant | None = None

    async def __aenter__(self) -> Grant:
        self._grant = self._dispatch.at_once(self._call) or await self._dispatch.enter(self._call, NOBODY)
        return self._grant

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._grant is not None:
            self._grant.close()


class Dispatch:
    """Queues per model over one fleet. `clock` gives monotonic seconds."""

    def __init__(
        self,
        fleet: Fleet,
        policy: Policy,
        rng: random.Random,
        clock: Callable[[], float],
    ) -> None:
        self.fleet = fleet
        self.policy = policy
        self.rng = rng
        self.clock = clock
        self.leaving = False  # balancers are told to go elsewhere; calls are still taken
        self.draining = False
        self.queues: dict[str, Queues] = {}
        self.running = dict.fromkeys(policy.classes, 0)
        self._turns: dict[Ticket, asyncio.Future[Grant]] = {}
        self._deadlines: list[tuple[float, int, Ticket]] = []
        self._sequence = count()
        self._timer: asyncio.TimerHandle | None = None
        self._given_back = 0  # tokens since _drained_at
        self._drained = 0.0  # tokens/s given back lately, as of _drained_at
        self._drained_at = clock()

    def admitted(self, call: Call) -> Admission:
        """Entering raises Refused: not found, no engine, too large, queue full, expired, draining."""
        return Admission(self, call)

    # -- entering -----------------------------------------------------------------------------------------------

    def at_once(self, call: Call) -> Grant | None:
        """A grant without waiting: nobody waits for this model, and an engine has room."""
        queues = self.queues.get(call.model)
        if queues or self.draining:
            return None
        now = self.clock()
        choice = self._choose(call, now, NOBODY)
        return None if choice is None else Grant(self, call, choice, now)

    async def enter(self, call: Call, exclude: frozenset[str], *, front: bool = False) -> Grant:
        """Wait in the class's line for a grant. Raises Refused; cancellation withdraws the call."""
        queues = self._admissible(call, front)
        ticket = Ticket(call, self.clock(), exclude)
        turn: asyncio.Future[Grant] = asyncio.get_running_loop().create_future()
        self._turns[ticket] = turn
        queues.push(ticket, front=front)
        heapq.heappush(self._deadlines, (call.deadline, next(self._sequence), ticket))
        self._pump(call.model, queues)
        try:
            return await turn
        except asyncio.CancelledError:
            if ticket.waiting:
                self._withdraw(ticket)
                self._pump(call.model, queues)
            elif not turn.cancelled() and turn.exception() is None:
                turn.result().close()  # granted in the very moment it was cancelled
            raise

    def _admissible(self, call: Call, front: bool) -> Queues:
        """The queues the call may enter, or Refused. A call that had been granted (`front`) has its place already."""
        if self.draining and not front:
            raise Refused(Outcome.DRAINING, "This gateway is shutting down; retry elsewhere.", retry_after=1.0)
        engines = self.fleet.serving(call.model)
        if not engines:
            self._unknown(call.model)
        self._up(engines, call.model)
        cost, largest = call.cost, max(e.largest for e in engines)
        if cost > largest:
            raise Refused(
                Outcome.TOO_LARGE,
                f"This request needs about {cost} tokens of KV cache and no engine of this fleet can hold more than "
                f"{largest} for {call.model!r}. Shorten the prompt or lower max_tokens.",
                code="context_length_exceeded",
            )
        queues = self.queues.get(call.model)
        if queues is None:
            queues = self.queues[call.model] = Queues(self.policy.classes)
        limit = self.policy.classes[call.class_name].max_queue
        if not front and queues.length(call.class_name) >= limit:
            raise Refused(
                Outcome.QUEUE_FULL,
                f"The queue of class {call.class_name!r} is full ({limit} calls). Retry after the time given.",
                retry_after=self.wait_estimate(queues),
            )
        return queues

    def _unknown(self, model: str) -> None:
        if any(math.isinf(engine.back_at) for engine in self.fleet):
            raise Refused(
                Outcome.NO_ENGINE,
                "Not every engine has been reached yet, so its models are not known.",
                retry_after=1.0,
            )
        raise Refused(
            Outcome.NOT_FOUND,
            f"The model {model!r} does not exist here. GET /v1/models lists what does.",
            param="model",
        )

    def _up(self, engines: tuple[Engine, ...], model: str) -> None:
        if not any(engine.up and not engine.draining for engine in engines):
            raise self._no_engine(model)

    @staticmethod
    def _no_engine(model: str) -> Refused:
        return Refused(
            Outcome.NO_ENGINE, f"No engine that serves {model!r} is up at the moment. Retry shortly.", retry_after=2.0
        )

    # -- the pump -----------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Grant whatever may go now, everywhere: after samples, health, reload."""
        now = self.clock()
        self._drain_rate(now)
        for engine in self.fleet:
            engine.forget_stale(now)
        for model, queues in list(self.queues.items()):
            self._pump(model, queues)

    def released(self, call: Call, tokens: int, engine: Engine) -> None:
        """A hold came back: account the drain and let the next calls of that engine's models go."""
        self.running[call.class_name] -= 1
        self._given_back += tokens
        if not self._turns:
            return  # nobody waits
        # A class's own limit may bind a model that another engine serves.
        limited = self.policy.classes[call.class_name].max_concurrency is not None
        for model in self.queues if limited else engine.models:
            queues = self.queues.get(model)
            if queues:
                self._pump(model, queues)

    def _pump(self, model: str, queues: Queues) -> None:
        now = self.clock()
        choices: list[Choice] = []

        def fits(ticket: Ticket) -> bool:
            choice = self._choose(ticket.call, now, ticket.exclude)
            if choice is not None:
                choices.append(choice)
            return choice is not None

        while queues:
            ticket = queues.pop(fits, now)
            if ticket is None:
                if not any(engine.up for engine in self.fleet.serving(model)):
                    for waiting in list(queues):
                        self._refuse(waiting, self._no_engine(model))
                break
            turn = self._turns.pop(ticket)
            choice = choices.pop()
            if not turn.done():  # else its task is cancelled and has not run yet
                turn.set_result(Grant(self, ticket.call, choice, now))
        self._arm()

    def _choose(self, call: Call, now: float, exclude: frozenset[str]) -> Choice | None:
        limit = self.policy.classes[call.class_name].max_concurrency
        if limit is not None and self.running[call.class_name] >= limit:
            return None
        engines = self.fleet.serving(call.model)
        return choose(engines, call, now, routing=self.policy.routing, rng=self.rng, exclude=exclude)

    # -- leaving ------------------------------------------------------------------------------------------------

    def _withdraw(self, ticket: Ticket) -> None:
        self.queues[ticket.call.model].remove(ticket)
        del self._turns[ticket]
        self._arm()

    def _refuse(self, ticket: Ticket, refused: Refused) -> None:
        turn = self._turns[ticket]
        self._withdraw(ticket)
        if not turn.done():
            turn.set_exception(refused)

    def _arm(self) -> None:
        """One timer, on the earliest deadline of a call that still waits."""
        deadlines = self._deadlines
        if len(deadlines) > 64 and len(deadlines) > 2 * len(self._turns):  # else granted calls stay until deadline
            deadlines[:] = [entry for entry in deadlines if entry[2].waiting]
            heapq.heapify(deadlines)
        while deadlines and not deadlines[0][2].waiting:
            heapq.heappop(deadlines)
        if not deadlines:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        elif self._timer is None or self._timer.when() > deadlines[0][0]:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_at(deadlines[0][0], self._expire)

    def _expire(self) -> None:
        self._timer = None
        now = self.clock()
        for deadline, _, ticket in list(self._deadlines):
            if deadline <= now and ticket.waiting:
                waited = now - ticket.pushed_at
                message = f"The deadline passed after {waited:.1f} s in the queue of class {ticket.call.class_name!r}."
                self._refuse(ticket, Refused(Outcome.EXPIRED, message, retry_after=1.0))
        self._arm()
        self.pump()

    def refuse_waiting(self) -> None:
        """Drain: what waits is refused, what runs goes on."""
        self.leaving = self.draining = True
        for queues in self.queues.values():
            for ticket in list(queues):
                self._refuse(ticket, Refused(Outcome.DRAINING, "This gateway is shutting down.", retry_after=1.0))

    # -- estimates ----------------------------------------------------------------------------------------------

    def _drain_rate(self, now: float) -> float:
        """Tokens given back per second, averaged with weights that fall by e in DRAIN_WINDOW."""
        since = now - self._drained_at
        if since >= DRAIN_EVERY:
            kept = math.exp(-since / DRAIN_WINDOW) if self._drained else 0.0  # from idleness: what was seen, at once
            self._drained = self._drained * kept + self._given_back / since * (1.0 - kept)
            self._given_back, self._drained_at = 0, now
        return self._drained

    def wait_estimate(self, queues: Queues) -> float:
        """Seconds until what waits now has been served: queued tokens over the measured drain rate (Little's law)."""
        rate = self._drain_rate(self.clock())
        return queues.total_tokens / rate if rate > 1.0 else 1.0
