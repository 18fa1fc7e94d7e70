"""What must hold at every moment of a simulated gateway, whatever happens to it.

Looked at from outside: the dispatch's doors (at once, entering, pumping, granting, releasing) are watched as they are
used, and everything is compared with the watcher's own books once nothing is left to be done at a moment.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

from gateway.core.admission.deadline import too_late
from gateway.core.admission.queues import Queues, Ticket
from gateway.core.admission.retries import RetryBudget
from gateway.core.engines.breaker import BreakerState
from gateway.core.engines.choice import Choice, choose
from gateway.core.engines.fleet import Engine, Hold
from gateway.core.policy.policy import Policy
from gateway.core.request.call import Call
from gateway.core.request.outcome import Outcome, Refused
from gateway.decider.dispatch import NOBODY
from gateway.decider.grant import LocalGrant
from gateway.serve.assembly import Gateway
from loadtest.lab.dst.batches import Batches
from loadtest.lab.dst.books import Retries
from loadtest.lab.dst.fairness import Fairness
from loadtest.lab.dst.grants import Grants

SLACK = 1e-6  # seconds: two clock readings of one moment
BACKOFF = 0.3  # seconds after its deadline a call may need to notice it: it may sleep between two attempts


class Invariants:
    """Watches one gateway. `wrong` is told, in words, of what is not as it must be; `granted` of each call, by its id,
    that gets an engine, before its own task is."""

    def __init__(self, gateway: Gateway, wrong: Callable[[str], None], granted: Callable[[str, str], None]) -> None:
        self.retries = Retries(gateway.retries, wrong)
        self._gateway = gateway
        self._dispatch = dispatch = gateway.dispatch
        self._wrong = wrong
        self._granted = granted
        self._loop = asyncio.get_running_loop()
        self._rng = random.Random(0)  # noqa: S311 # of its own: to look must change nothing
        self._holds: list[tuple[Hold, Call]] = []
        self._ended: set[str] = set()  # ids of calls
        self._grants = Grants(gateway)
        self._moved: set[str] = set()  # ids of calls that have had their free move
        self._pumped: dict[str, float] = {}
        self._settled = True  # no hold was taken or given back since the books were compared
        dispatch.retries = cast("RetryBudget", self.retries)  # it has all of the surface that is used
        for name in ("at_once", "enter", "released", "_grant", "_pump"):
            vars(dispatch)[name] = getattr(self, name)
        self.batches = Batches(gateway.pipeline.batcher, wrong)
        self._fairness: dict[str, Fairness] = {}
        vars(dispatch)["_state"] = self._state
        dispatch.witness = self

    def apply(self, policy: Policy) -> None:
        """A reload has taken effect."""
        self.batches.apply(policy)

    # -- the doors ----------------------------------------------------------------------------------------------

    def at_once(self, call: Call, exclude: frozenset[str] = NOBODY) -> LocalGrant | None:
        """On an idle engine every call that fits is granted at once, if nobody waits and nothing but a prediction
        forbids it."""
        dispatch = self._dispatch
        settings = dispatch.policy.classes.get(call.class_name)
        waits = dispatch.queues.get(call.model) or dispatch.draining or self._loop.time() >= call.deadline
        idle = "" if exclude or waits or settings is None or self._refuses(call) else self._idle(call)
        limit = None if settings is None else settings.max_concurrency
        if limit is not None and dispatch.running[call.class_name] >= limit:
            idle = ""
        grant = type(dispatch).at_once(dispatch, call, exclude)
        if idle and grant is None:
            self._wrong(f"call {call.request_id} is not granted at once though {idle} is idle")
        return grant

    async def enter(self, call: Call, exclude: frozenset[str], *, front: bool = False) -> LocalGrant:
        dispatch = self._dispatch
        refused = not front and self._refuses(call)
        idle = self._idle(call)
        if front:
            self._grants.first.add(call.request_id)
            if not exclude & {hold.engine.id for hold, whose in self._holds if whose is call}:
                self._wrong(f"call {call.request_id} may go back to the engine that has failed it: not {set(exclude)}")
        try:
            grant = await type(dispatch).enter(dispatch, call, exclude, front=front)
        except Refused as told:
            if idle and told.outcome is Outcome.HOPELESS:
                self._wrong(f"call {call.request_id} is refused by prediction though {idle} is idle: {told.message}")
            raise
        if refused:
            self._wrong(f"call {call.request_id} has waited for {grant.engine.id} though its model's mode refused it")
        return grant

    def _idle(self, call: Call) -> str:
        """An engine that has nothing to do and can take the call; empty: there is none."""
        for engine in self._dispatch.fleet.serving(call.model):
            able = engine.up and not engine.draining and engine.breaker.state is BreakerState.CLOSED
            if able and not engine.in_flight and call.cost <= engine.largest:
                return engine.id
        return ""

    def _refuses(self, call: Call) -> bool:
        """Whether its model's mode refuses the call as it comes; while nobody has its model, none does."""
        traffic = self._dispatch.traffic.get(call.model)
        engines = [each for each in self._dispatch.fleet.serving(call.model) if each.up and not each.draining]
        closed = any(engine.breaker.state is BreakerState.CLOSED for engine in engines)
        return traffic is not None and closed and traffic.refuses(call) is not None

    def _state(self, model: str) -> Any:
        dispatch = self._dispatch
        state = type(dispatch)._state(dispatch, model)
        if model not in self._fairness:
            self._fairness[model] = Fairness(state[0], dispatch.policy, self._wrong)
        return state

    def released(self, call: Call, hold: Hold, now: float) -> None:
        self._settled = False
        dispatch = self._dispatch
        type(dispatch).released(dispatch, call, hold, now)

    def moved_free(self, call: Call) -> None:
        """The one move that costs no budget."""
        self.retries.free += 1
        if call.request_id in self._moved:
            self._wrong(f"call {call.request_id} has lost an engine for the second time, and pays nothing for it")
        self._moved.add(call.request_id)

    def _pump(self, model: str, queues: Queues) -> None:
        self._pumped[model] = self._loop.time()
        dispatch = self._dispatch
        type(dispatch)._pump(dispatch, model, queues)

    def _grant(self, call: Call, choice: Choice, now: float, ticket: Ticket | None) -> LocalGrant:
        engine, dispatch = choice.engine, self._dispatch
        self._granted(call.request_id, engine.id)
        for found in self._grants.wrong_with(call, choice, now, ticket):
            self._wrong(f"call {call.request_id} is granted {found}")
        self._settled = False
        grant = type(dispatch)._grant(dispatch, call, choice, now, ticket)
        self._holds.append((grant.hold, call))
        return grant

    def ended(self, request_id: str) -> None:
        """A call has its record: it may hold nothing any more."""
        self._ended.add(request_id)
        self._settled = False

    # -- at rest ------------------------------------------------------------------------------------------------

    def at_rest(self) -> None:
        """Nothing is left to be done at this moment."""
        now = self._loop.time()
        dispatch = self._dispatch
        for model, queues in dispatch.queues.items():
            if queues:
                self._conserves_work(model, queues, now)
        if not self._settled:
            self._settled = True
            self._compare()

    def _conserves_work(self, model: str, queues: Queues, now: float) -> None:
        """No call waits that could have gone when the queue was last looked at. Half-open breakers let calls in by
        time, and nobody looks again for that."""
        dispatch = self._dispatch
        overdue = [ticket.call.request_id for ticket in queues if ticket.expires < now - SLACK]
        if overdue:
            self._wrong(f"calls wait past their time: {', '.join(overdue)}")
        engines, at = dispatch.fleet.serving(model), self._pumped[model]
        outlook = dispatch.sidecars.outlook(model, now)
        if not dispatch._served(model) and (outlook is None or outlook.ready_in is None):
            self._wrong(f"{len(queues)} calls wait for {model}, which nobody has or can have")
        if any(engine.breaker.state is not BreakerState.CLOSED for engine in engines):
            return
        held_up = False
        for line in queues._order(at, dispatch._paused()):  # as the pump looks at them
            ticket = line.head(at)
            choice = None if held_up and not line.settings.reserve else self._choice(ticket, engines, at)
            if choice is not None and not self._late(ticket, choice, now):
                self._wrong(f"call {ticket.call.request_id} waits though {choice.engine!r} has room: a lost wake-up")
            if choice is not None or line.starving(ticket, at):
                return
            held_up = held_up or not ticket.large

    def _choice(self, ticket: Ticket, engines: tuple[Engine, ...], at: float) -> Choice | None:
        routing = self._dispatch.policy.routing
        return choose(engines, ticket.call, at, routing=routing, rng=self._rng, exclude=ticket.exclude)

    def _late(self, ticket: Ticket, choice: Choice, now: float) -> bool:
        engine, dispatch = choice.engine, self._dispatch
        if not engine.in_flight and not dispatch._contended(dispatch.queues[ticket.call.model]):
            return False
        spread = engine.ttft_spread
        reading = spread * choice.prefill / engine.prefill_rate
        return too_late(ticket.call, now, spread * choice.ttft, reading, engine.tpot)

    def _compare(self) -> None:
        """The ledgers against the books."""
        dispatch = self._dispatch
        self._holds = [entry for entry in self._holds if entry[0].live]
        tokens: Counter[str] = Counter()
        calls: Counter[str] = Counter()
        prefill: Counter[str] = Counter()
        running: Counter[str] = Counter()
        drained: Counter[str] = Counter()
        used: Counter[tuple[str, str]] = Counter()  # by class too
        for hold, call in self._holds:
            id = hold.engine.id
            if call.request_id in self._ended:
                self._wrong(f"call {call.request_id} has ended and still holds {hold.tokens} tokens on {id}")
            if dispatch.fleet.engines.get(id) is not hold.engine:
                self._wrong(f"call {call.request_id} holds {hold.tokens} tokens on {id}, which was forgotten")
            tokens[id] += hold.tokens
            calls[id] += 1
            prefill[id] += hold.prefill
            running[hold.class_name] += 1
            drained[call.model] += hold.tokens
            used[id, hold.class_name] += hold.tokens
        for engine in dispatch.fleet:
            found, expected = (
                (engine.held, engine.in_flight, engine.prefill_queued),
                (tokens[engine.id], calls[engine.id], prefill[engine.id]),
            )
            if found != expected:
                self._wrong(f"the ledger of {engine.id} is {found}, the holds on it are {expected}")
            wrong = {name: tokens for name, (tokens, _) in engine.used.items() if tokens != used[engine.id, name]}
            if wrong:
                self._wrong(f"classes use {wrong} of {engine.id}, and hold something else")
        if +Counter(dispatch.running) != running:
            self._wrong(f"{dict(dispatch.running)} run by class, the holds say {dict(running)}")
        for model, traffic in dispatch.traffic.items():
            if traffic.drain.held != drained[model]:
                self._wrong(f"{traffic.drain.held} tokens of {model} are to drain, {drained[model]} are held")

    # -- at the end ---------------------------------------------------------------------------------------------

    def idle(self) -> None:
        """Nothing is asked any more, and nothing may be left."""
        gateway, dispatch = self._gateway, self._dispatch
        self._compare()
        dispatch._arm()
        left = {
            "holds": [hold.tokens for hold, _ in self._holds],
            "turns": dispatch._turns,
            "calls held for models": dispatch._awaiting_model,
            "a timer": dispatch._timer,
            "engines to be forgotten": gateway._retired,
            "models asked for": gateway.waking.models,
            "tasks of calls": gateway.pipeline.tasks,
            "calls in queues": [ticket.call.request_id for queues in dispatch.queues.values() for ticket in queues],
        }
        for what, found in left.items():
            if found:
                self._wrong(f"left behind: {what}: {found!r}")
        if set(gateway.clients) != set(gateway.fleet.engines):
            self._wrong(f"clients of {sorted(gateway.clients)}, engines {sorted(gateway.fleet.engines)}")
        self.batches.idle()
        self.retries.end()
