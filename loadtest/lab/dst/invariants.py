"""Invariants of a simulated gateway, at every moment and whatever happens to it.

The dispatch tells its events to a witness. At each moment, once nothing is left to be done, everything is compared with
the witness's own books.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Container

from gateway.core.admission.deadline import too_late
from gateway.core.admission.queues import Queues, Ticket
from gateway.core.engines.breaker import BreakerState
from gateway.core.engines.choice import Choice, choose_by_role, knows, usable_of
from gateway.core.engines.engine import Engine
from gateway.core.engines.hold import Hold
from gateway.core.engines.origin import engine_id
from gateway.core.policy.policy import Policy
from gateway.core.request.call import Call
from gateway.core.request.outcome import Outcome, Refused
from gateway.core.request.tenants import MIRROR
from gateway.decider.model_waits import LOOK_AGAIN
from gateway.serve.assembly import Gateway
from loadtest.lab.dst.batches import Batches
from loadtest.lab.dst.books import Retries
from loadtest.lab.dst.fairness import Fairness
from loadtest.lab.dst.grants import Grants

SLACK = 1e-6  # seconds: two clock readings of one moment
BACKOFF = 0.3  # seconds after its deadline a call may need to notice it: it may sleep between two attempts


class Invariants:
    """Witness of one gateway. `wrong` is told, in words, of what is not as it must be; `granted` of each call, by its
    id, that gets an engine, before its own task is. `watch` comes before the first event."""

    def __init__(self, wrong: Callable[[str], None], granted: Callable[[str, str], None]) -> None:
        self.retries = Retries(wrong)
        self.batches = Batches(wrong)
        self._wrong = wrong
        self._granted = granted
        self._loop = asyncio.get_running_loop()
        self._rng = random.Random(0)  # noqa: S311 # of its own: to look must change nothing
        self._holds: list[tuple[Hold, Call]] = []
        self._prompts: list[tuple[Hold, Call]] = []  # holds of prompts that are read for another engine
        self._ended: set[str] = set()  # ids of calls
        self._moved: set[str] = set()  # ids of calls that have had their free move
        self._idle_for: dict[str, str] = {}  # calls that enter a queue -> an engine that was idle
        self._refusable: set[str] = set()  # ids of calls that their model's mode refused as they entered
        self._pumped: dict[str, float] = {}
        self._owed: list[Ticket] = []  # the first head, while it is popped, of a tenant that is owed much
        self._fairness: dict[str, Fairness] = {}
        self._unserved: dict[str, float] = {}  # models that calls wait for, since when without an engine or a sidecar
        self._settled = True  # no hold was taken since the books were compared, and no call ended

    def watch(self, gateway: Gateway) -> None:
        """Set the gateway that is looked at."""
        self._gateway = gateway
        self._dispatch = gateway.dispatch
        self._grants = Grants(gateway)

    def apply(self, policy: Policy) -> None:
        """A reload has taken effect."""
        self.batches.apply(policy)

    # -- events -------------------------------------------------------------------------------------------------

    def applying(self, policy: Policy) -> None:
        for fairness in self._fairness.values():
            fairness.apply(policy)

    def entering(self, call: Call, exclude: frozenset[str], *, front: bool) -> None:
        """On an idle engine every call that fits is granted at once, if nobody waits and nothing but a prediction
        forbids it."""
        dispatch, id = self._dispatch, call.request_id
        self._idle_for[id] = idle = self._idle(call)
        refuses = self._refuses(call)
        if front:
            self._grants.first.add(id)
            if not exclude & {hold.engine.id for hold, whose in self._holds if whose is call}:
                self._wrong(f"call {id} may go back to the engine that has failed it: not {set(exclude)}")
            return
        (self._refusable.add if refuses else self._refusable.discard)(id)
        settings = dispatch.policy.classes.get(call.class_name)
        waits = dispatch.queues.get(call.model) or dispatch.draining or self._loop.time() >= call.deadline
        limit = None if settings is None else settings.max_concurrency
        full = settings is None or (limit is not None and dispatch.running[call.class_name] >= limit)
        if idle and not (exclude or waits or full or refuses or self._expects(call)):
            self._wrong(f"call {id} is not granted at once though {idle} is idle")

    def refused(self, call: Call, refused: Refused) -> None:
        idle = self._idle_for[call.request_id]
        if idle and refused.outcome is Outcome.DEADLINE_UNREACHABLE and not self._expects(call):
            self._wrong(f"call {call.request_id} is refused by prediction though {idle} is idle: {refused.message}")
        dispatch, now = self._dispatch, self._loop.time()
        outlook = dispatch.sidecars.outlook(call.model, now)
        if refused.outcome is Outcome.NO_ENGINE and outlook is None and self._restarts(call.model):
            lasts = now - dispatch.control.outages.since[call.model]
            if lasts < dispatch.policy.routing.hold_unserved:
                self._wrong(f"call {call.request_id} does not wait for an engine that is gone for {lasts:.3f} s")

    def pushing(self, queues: Queues, ticket: Ticket, *, front: bool) -> None:
        """No copy of a call waits: it would be in somebody's way."""
        if ticket.call.tenant == MIRROR:
            self._wrong(f"the copy {ticket.call.request_id} waits for {ticket.call.model}")
        self._fairness_of(ticket.call.model, queues).pushing(ticket, front=front)

    def popping(self, model: str, queues: Queues, now: float, paused: Container[str]) -> None:
        self._pumped[model] = self._loop.time()
        self._fairness_of(model, queues).popping(now, paused)
        heads = [queue.head() for queue in queues.order(now, paused)[:1]]
        fit = sum([engine.ledger.largest for engine in self._dispatch.fleet.serving(model)])
        self._owed = [head for head in heads if queues.owed(head) > fit]

    def popped(self, model: str, ticket: Ticket | None) -> None:
        """Check that no call is set aside for a full engine while its tenant is owed more service."""
        self._fairness[model].popped(ticket)
        for head in self._owed:
            if head.aside and head is not ticket:
                self._wrong(f"call {head.call.request_id} of {head.call.tenant} is set aside, though it is owed more")

    def granting(self, call: Call, choice: Choice, now: float, ticket: Ticket | None) -> None:
        self._granted(call.request_id, choice.engine.id)
        for found in self._grants.wrong_with(call, choice, now, ticket):
            self._wrong(f"call {call.request_id} is granted {found}")
        if ticket is not None and call.request_id in self._refusable - self._grants.first:
            self._wrong(f"call {call.request_id} has waited for {choice.engine.id} though its model's mode refused it")

    def granted(self, call: Call, hold: Hold) -> None:
        self._settled = False
        self._holds.append((hold, call))
        self.retries.granted(call.request_id)

    def prefilling(self, call: Call, hold: Hold) -> None:
        """A prompt is held on the engine that reads it for another, once."""
        self._settled = False
        if any(each.live and other is call for each, other in self._prompts):
            self._wrong(f"the prompt of {call.request_id} is held twice")
        self._prompts.append((hold, call))
        self._grants.read(hold.engine.id, call)

    def prefilled(self, call: Call, hold: Hold) -> None:
        """The books are compared again."""
        self._settled = False

    def retried(self, call: Call) -> None:
        self.retries.retried(self._dispatch.policy.retries)

    def moved_free(self, call: Call) -> None:
        """The one move that costs no budget."""
        self.retries.free += 1
        if call.request_id in self._moved:
            self._wrong(f"call {call.request_id} has lost an engine for the second time, and pays nothing for it")
        self._moved.add(call.request_id)

    def correcting(self, ticket: Ticket, prompt_tokens: int, completion_tokens: int) -> None:
        self._fairness[ticket.call.model].correcting(ticket, prompt_tokens, completion_tokens)

    def corrected(self, ticket: Ticket) -> None:
        self._fairness[ticket.call.model].corrected(ticket)

    def _fairness_of(self, model: str, queues: Queues) -> Fairness:
        if model not in self._fairness:
            self._fairness[model] = Fairness(queues, self._dispatch.policy, self._wrong)
        return self._fairness[model]

    def _expects(self, call: Call) -> bool:
        """Whether an engine has most of the call's prompt cached: then the call may wait for that engine."""
        return any(knows(engine, call) for engine in self._dispatch.fleet.serving(call.model))

    def _idle(self, call: Call) -> str:
        """An engine that has nothing to do and can take the call; empty: there is none."""
        for engine in self._dispatch.fleet.serving(call.model):
            able = engine.health.up and not engine.draining and engine.breaker.state is BreakerState.CLOSED
            if able and not engine.ledger.in_flight and call.cost <= engine.ledger.largest:
                return engine.id
        return ""

    def _refuses(self, call: Call) -> bool:
        """Whether its model's mode refuses the call as it comes; while nobody has its model, none does."""
        traffic = self._dispatch.traffic.get(call.model)
        engines = [each for each in self._dispatch.fleet.serving(call.model) if each.health.up and not each.draining]
        closed = any(engine.breaker.state is BreakerState.CLOSED for engine in engines)
        return traffic is not None and closed and traffic.refuses(call) is not None

    def _restarts(self, model: str) -> bool:
        """Whether all its engines are out, and one may come back."""
        engines = self._dispatch.fleet.serving(model)
        out = not any(engine.health.up and not engine.draining for engine in engines)
        return out and any(engine not in self._gateway.engines.retired for engine in engines)

    def ended(self, request_id: str) -> None:
        """A call has its record: it may hold nothing any more."""
        self._ended.add(request_id)
        self._settled = False

    # -- at rest ------------------------------------------------------------------------------------------------

    def at_rest(self) -> None:
        """Nothing is left to be done at this moment."""
        now = self._loop.time()
        dispatch = self._dispatch
        for model in [model for model in self._unserved if dispatch.fleet.serves(model)]:
            del self._unserved[model]
        for model, queues in dispatch.queues.items():
            if queues:
                self._conserves_work(model, queues, now)
        if not self._settled or not all(hold.live for hold, _ in self._holds):
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
        if not dispatch.fleet.serves(model) and (outlook is None or outlook.ready_in is None):
            lasts = now - self._unserved.setdefault(model, now)
            hold = dispatch.policy.routing.hold_unserved
            if not self._restarts(model) or outlook is not None or lasts > hold + SLACK or not hold:
                self._wrong(f"{len(queues)} calls wait for {model}, which nobody has or can have, for {lasts:.3f} s")
        else:
            self._unserved.pop(model, None)
        if any(engine.breaker.state is not BreakerState.CLOSED for engine in engines):
            return
        held_up = False
        for line in queues.order(at, dispatch.control.workload.paused()):  # as the pump looks at them
            ticket = line.head()
            if ticket.aside:
                self._patient(ticket, engines, now)
                continue
            choice = None if held_up and not line.settings.reserve else self._choice(ticket, engines, at)
            if choice is not None and not self._late(ticket, choice, now):
                self._wrong(f"call {ticket.call.request_id} waits though {choice.engine!r} has room: a lost wake-up")
            if choice is not None:
                return
            if line.settings.headroom:
                continue  # it fills gaps, and holds nobody up
            if line.starving(ticket, at):
                return
            held_up = held_up or not ticket.large

    def _patient(self, ticket: Ticket, engines: tuple[Engine, ...], now: float) -> None:
        """Check that a call waits for a full engine no longer than twice what reading its prompt takes now."""
        call = ticket.call
        reading = call.prompt_tokens / min((engine.speed.prefill_rate for engine in engines), default=SLACK)
        fits = call.subset is None and any(call.cost <= each.ledger.largest for each in usable_of(engines, now))
        if fits and now - ticket.since > 2.0 * reading + LOOK_AGAIN + SLACK:
            self._wrong(f"call {call.request_id} is set aside for {now - ticket.since:.3f} s")

    def _choice(self, ticket: Ticket, engines: tuple[Engine, ...], at: float) -> Choice | None:
        routing = self._dispatch.policy.routing
        return choose_by_role(engines, ticket.call, at, routing=routing, rng=self._rng, exclude=ticket.exclude)

    def _late(self, ticket: Ticket, choice: Choice, now: float) -> bool:
        engine, dispatch = choice.engine, self._dispatch
        if not engine.ledger.in_flight and not dispatch.control.workload.contended(dispatch.queues[ticket.call.model]):
            return False
        spread = engine.speed.ttft_spread
        reading = spread * choice.prefill / engine.speed.prefill_rate
        return too_late(ticket.call, now, spread * choice.ttft, reading, engine.speed.tpot)

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
        self._prompts = [entry for entry in self._prompts if entry[0].live]
        for hold, call in [*self._holds, *self._prompts]:
            id = hold.engine.id
            if call.request_id in self._ended:
                self._wrong(f"call {call.request_id} has ended and still holds {hold.tokens} tokens on {id}")
            tokens[id] += hold.tokens
            calls[id] += 1
            prefill[id] += hold.prefill
            used[id, hold.class_name] += hold.tokens
        for hold, call in self._holds:
            if dispatch.fleet.engines.get(hold.engine.id) is not hold.engine:
                self._wrong(
                    f"call {call.request_id} holds {hold.tokens} tokens on {hold.engine.id}, which was forgotten"
                )
            running[hold.class_name] += 1
            drained[call.model] += hold.tokens
        ranked = {engine_id(each.url) for each in dispatch.policy.fleet.engines if each.scheduling_policy == "priority"}
        for engine in dispatch.fleet:
            if engine.priorities != (engine.id in ranked) and engine not in self._gateway.engines.retired:
                self._wrong(f"{engine.id} is told priorities: {engine.priorities}, unlike the policy")
            found, expected = (
                (engine.ledger.held, engine.ledger.in_flight, engine.prefills.queued),
                (tokens[engine.id], calls[engine.id], prefill[engine.id]),
            )
            if found != expected:
                self._wrong(f"the ledger of {engine.id} is {found}, the holds on it are {expected}")
            if wrong := {name: n for name, (n, _) in engine.ledger.used.items() if n != used[engine.id, name]}:
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
        left = {
            "holds": [hold.tokens for hold, _ in self._holds],
            "holds of prompts": [hold.tokens for hold, _ in self._prompts],
            **dispatch.left_over(),
            "engines to be forgotten": gateway.engines.retired,
            "models asked for": gateway.waking.models,
            "tasks of calls": gateway.pipeline.tasks,
            "calls in queues": [ticket.call.request_id for queues in dispatch.queues.values() for ticket in queues],
        }
        for what, found in left.items():
            if found:
                self._wrong(f"left behind: {what}: {found!r}")
        if set(gateway.engines.clients) != set(gateway.fleet.engines):
            self._wrong(f"clients of {sorted(gateway.engines.clients)}, engines {sorted(gateway.fleet.engines)}")
        self.batches.idle(gateway.pipeline.batcher)
        self.retries.end()
