"""Invariant of fairness between tenants: who is served while who waits.

Of two tenants of a class that both have calls waiting, the one that was served less by its weight goes next. That is
Start-time Fair Queueing (Goyal, Vin, Cheng, "Start-time Fair Queueing", SIGCOMM 1996), with a call's tokens as a
packet's length. Let D be by how much more tokens over weight one of the two was served than the other since both began
to wait. Whenever the first is served D is at most a constant of that time, and whenever the second is served at least
that constant. So if the first was ever served at a greater D than the second was, the order was not fair; and from this
alone follows their theorem 1: between any two such moments D changes by no more than the longest call of the one over
its weight and that of the other over its own.

What a call is charged is the estimate, and its real use once that is known ("Fairness in Serving Large Language
Models", OSDI 2024): corrections move D too, and are taken from the queue as they come.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gateway.core.admission.queues import Queues, Ticket
    from gateway.core.policy.policy import Policy

OUTPUT = 2  # what a written token counts beside one that is read
ROUNDING = 1e-6  # tokens over weight
Who = tuple[str, str]  # class, tenant


class Fairness:
    """Check of the fairness of one model's queues. `wrong` gets, in words, the calls served out of turn."""

    def __init__(self, queues: Queues, policy: Policy, wrong: Callable[[str], None]) -> None:
        self._queues = queues
        self._wrong = wrong
        self._weights: dict[str, float] = {}
        self._classes: set[str] = set()
        self._gone: set[str] = set()  # classes that a reload has done away with: what they were charged is forgotten
        self._served: defaultdict[Who, float] = defaultdict(float)
        self._charged: dict[str, tuple[Who, float]] = {}  # by request id
        self._spans: defaultdict[Who, int] = defaultdict(int)  # times it has begun to wait
        self._span = count(1)
        self._length = 0  # when one last came or was served
        # For a pair that waits, ended by either's ceasing to: the greatest D at which the first was served, and the
        # least at which the second was.
        self._pairs: dict[tuple[Who, Who], tuple[int, int, float, float]] = {}
        self._before = 0.0  # a tenant's counter, before it is corrected
        self._expected: float | None = None  # by how much it is to move; None: its class is gone
        # Just before a call is served: the head of each class in order, of these who starves first, who blocks others,
        # and whose class has a reserve; and all that wait and have not paid.
        self._heads: list[Ticket] = []
        self._starving: Ticket | None = None
        self._blocking: list[Ticket] = []
        self._reserved: set[Ticket] = set()
        self._unpaid: list[Ticket] = []
        self.apply(policy)

    def apply(self, policy: Policy) -> None:
        """A reload: other weights, other classes."""
        classes = set(policy.classes)
        self._gone |= self._classes - classes
        self._classes = classes
        self._weights = {name: tenant.weight for name, tenant in policy.tenants.items()}
        self._pairs.clear()

    def pushing(self, ticket: Ticket, *, front: bool) -> None:
        """A call begins to wait."""
        queues, who = self._queues, _who(ticket)
        places = 2 * sum([settings.max_queue for settings in queues.classes.values()])
        if not front and len(queues) >= max(places, self._length):  # in another's place
            self._wrong(f"call {ticket.call.request_id} begins to wait beside {len(queues)}, in {places} places")
        if not any(_who(other) == who for other in queues):
            self._spans[who] = next(self._span)
        self._length = len(queues) + 1

    def popping(self, now: float, paused: Container[str]) -> None:
        """Note which calls wait just before a call may be served, and whose turn it is."""
        order = [(line.head(), line) for line in self._queues.order(now, paused)]
        holding_up = [(head, line) for head, line in order if not line.settings.headroom]  # others fill gaps only
        self._heads = [head for head, _ in order]
        self._starving = next((head for head, line in holding_up if line.starving(head, now)), None)
        self._blocking = [head for head, _ in holding_up if not head.large]
        self._reserved = {head for head, line in order if line.settings.reserve}
        self._unpaid = [ticket for ticket in self._queues if not ticket.paid]

    def popped(self, ticket: Ticket | None) -> None:
        """Note that this call, if any, is served."""
        self._length = len(self._queues)
        if ticket is None:
            return
        before = self._heads[: self._heads.index(ticket)] if ticket in self._heads else []
        if self._starving is not None and self._starving in before:
            self._wrong(f"call {ticket.call.request_id} passes {self._starving.call.request_id}, which is starving")
        blocking = next((head for head in self._blocking if not head.aside), None)  # as of this time
        if blocking is not None and blocking in before and ticket not in self._reserved:
            self._wrong(f"call {ticket.call.request_id} passes {blocking.call.request_id}, which is not large")
        if ticket in self._unpaid:
            # Those that wait for the engine that knows their session let others pass.
            waiting = [other for other in self._unpaid if not other.aside]
            self._serves(ticket, _who(ticket), dict.fromkeys(map(_who, waiting)))

    def correcting(self, ticket: Ticket, prompt_tokens: int, completion_tokens: int) -> None:
        """Note what a served call really used."""
        charged = self._charged.pop(ticket.call.request_id, None)
        who, more = _who(ticket), 0.0
        if charged is not None and charged[0] == who:
            more = (prompt_tokens + OUTPUT * completion_tokens - charged[1]) / self._weight(who)
        self._served[who] += more
        known = who[0] not in self._gone and (charged is None or charged[0] == who)  # else its class has gone since
        self._expected = more if known else None
        self._before = self._queues.served(*who)

    def corrected(self, ticket: Ticket) -> None:
        """Move its tenant's counter by the difference."""
        who, more = _who(ticket), self._expected
        moved = self._queues.served(*who) - self._before
        if more is None:  # its class has gone since: the one that it has now bears the difference
            self._served[who] += moved
        elif abs(moved - more) > ROUNDING:
            self._wrong(f"{who} is charged {moved:.0f} tokens more for {ticket.call.request_id}, expected {more:.0f}")

    def _serves(self, ticket: Ticket, who: Who, waiting: Iterable[Who]) -> None:
        for other in waiting:
            if other[0] == who[0] and other != who and who[0] not in self._gone:
                self._compare(who, other)
        charge = ticket.call.prompt_tokens + OUTPUT * ticket.call.output_tokens
        self._charged[ticket.call.request_id] = who, charge
        self._served[who] += charge / self._weight(who)

    def _compare(self, served: Who, other: Who) -> None:
        first, second = sorted((served, other))
        lead = self._served[first] - self._served[second]
        spans = self._spans[first], self._spans[second]
        *since, most, least = self._pairs.get((first, second), (*spans, -float("inf"), float("inf")))
        if tuple(since) != spans:
            most, least = -float("inf"), float("inf")
        if served == first:
            most = max(most, lead)
        else:
            least = min(least, lead)
        self._pairs[first, second] = (*spans, most, least)
        if most > least + ROUNDING:
            self._wrong(
                f"{served[1]} is served before {other[1]} in {served[0]}, which is unfair by {most - least:.0f} tokens"
            )

    def _weight(self, who: Who) -> float:
        return self._weights.get(who[1], 1.0)


def _who(ticket: Ticket) -> Who:
    return ticket.call.class_name, ticket.call.tenant
