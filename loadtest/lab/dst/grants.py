"""Invariants of a grant: the engine, the time and the order in which a call may have it. Each breach is a text."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

from gateway.core.admission.queues import Queues, Ticket
from gateway.core.engines.breaker import BreakerState
from gateway.core.engines.choice import Choice, choose_by_role
from gateway.core.request.call import Call
from gateway.serve.assembly import Gateway


class Grants:
    """Looks at the grants of one gateway before they are made."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._dispatch = gateway.dispatch
        self.first: set[str] = set()  # ids of calls that lost their engine and go first
        self._read: set[tuple[str, str, int]] = set()  # engine, tenant, and what it has been sent of prompts

    def wrong_with(self, call: Call, choice: Choice, now: float, ticket: Ticket | None) -> Iterator[str]:
        """The call is about to be given this engine; `ticket`: it has waited, and is not among the waiting any more."""
        engine, dispatch = choice.engine, self._dispatch
        if now >= call.deadline:
            yield f"{now - call.deadline:.6f} s past its deadline"
        if not (0.0 <= call.predicted_wait < math.inf and 0.0 < choice.ttft < math.inf):  # nor is it a number else
            yield f"{engine.id} after a wait foretold as {call.predicted_wait}, a first token as {choice.ttft}"
        brought = self._gateway.engines.brought.get(engine.id)
        open_ = (brought is None or brought.open) and engine not in self._gateway.engines.retired
        if not open_ or not engine.health.up or engine.draining:
            yield f"{engine!r}, which may not be used"
        if dispatch.draining and call.request_id not in self.first:
            yield f"{engine.id} while the gateway drains"
        within = engine.ledger.load < engine.ledger.budget and engine.ledger.load + call.cost <= engine.ledger.ceiling
        empty = not engine.ledger.in_flight and call.cost <= engine.ledger.largest
        if engine.ledger.in_flight >= engine.ledger.slots or not (empty or within):
            yield f"{engine!r}, which has no room for {call.cost} tokens"
        limit = dispatch.policy.classes[call.class_name].max_concurrency
        if limit is not None and dispatch.running[call.class_name] >= limit:
            yield f"an engine though {limit} of {call.class_name} run"
        yield from self._caches(call, choice)
        queues = dispatch.queues.get(call.model)
        if ticket is None:
            if queues:
                yield f"an engine at once though others wait for {call.model}"
            if dispatch.traffic[call.model].refuses(call) is not None:
                yield "an engine at once though its model's mode refuses it"
        else:
            if engine.id in ticket.exclude and any(self._others(call, ticket, now)):
                yield f"{engine.id}, which has failed it, though there are others"
            if queues:
                yield from self._order(ticket, queues)

    def _others(self, call: Call, ticket: Ticket, now: float) -> Iterator[bool]:
        """Whether each other engine could have the call: one that reads for others only where it takes the call now."""
        routing, rng = self._dispatch.policy.routing, random.Random(0)  # noqa: S311 # one engine is not drawn
        for other in self._dispatch.fleet.serving(call.model):
            closed = other.breaker.state is BreakerState.CLOSED
            usable = other.health.up and not other.draining and closed and other.id not in ticket.exclude
            yield usable and (
                other.transfers.answers
                or choose_by_role((other,), call, now, routing=routing, rng=rng, exclude=ticket.exclude) is not None
            )

    def _caches(self, call: Call, choice: Choice) -> Iterator[str]:
        """A beginning is cached only where it was sent, and for its own tenant."""
        if choice.cached and not any((choice.engine.id, call.tenant, each) in self._read for each in call.prefix):
            yield f"{choice.engine.id} for {choice.cached} cached tokens of a prompt that it was never sent"
        self.read(choice.engine.id, call)

    def read(self, engine: str, call: Call) -> None:
        """Note that the engine was sent the call's prompt."""
        self._read.update([(engine, call.tenant, each) for each in call.prefix])

    def _order(self, ticket: Ticket, queues: Queues) -> Iterator[str]:
        """Within a class a tenant's calls go by deadline, but first those that lost their engine."""
        call = ticket.call
        if call.request_id in self.first:
            return
        key = (ticket.deadline, ticket.since, ticket.sequence)
        for other in queues:
            theirs = other.call
            if (theirs.class_name, theirs.tenant) != (call.class_name, call.tenant) or other.aside:
                continue
            if other.key < key:
                yield f"an engine before {theirs.request_id}, whose turn it is"
