"""Fair queue of one class: virtual token counters between tenants, earliest deadline first within each.

Between tenants the one that was served least goes next, by the virtual token counters of VTC ("Fairness in Serving
Large Language Models", OSDI 2024). A call served adds (prompt + 2 x output tokens) / weight to its tenant's counter:
estimated when it leaves the queue, replaced by what it really used when that is known. A tenant that comes back is
lifted to the least counter of those that wait, or, where nobody does, of the last that did: staying away saves up
nothing.

The bound: counters of two tenants that wait differ by at most U. What they are served between any two moments, over
weight, then differs by at most 2U while both wait. With estimates alone U is the largest charge over the smallest
weight. With estimates replaced it is VTC's w_out x M over the smallest weight, M being the tokens of all that runs at a
time, each call at the larger of estimate and truth.

Within a class nothing passes the call whose turn it is, fitting or not: else neither would hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from math import floor, inf

from gateway.core.admission.ticket import OUTPUT_WEIGHT, TenantQueue, Ticket
from gateway.core.policy.traffic import TrafficClass
from gateway.core.request.call import Call

CREDIBLE = 2**24  # tokens: no engine's report of one call counts for more
LOOKED_PAST = 16  # tenants, and calls of each, that are looked at behind those that wait for one engine
REMEMBERED = 10_000  # tenants that do not wait, per class


class ClassQueue:
    """Queue of one class of one model. `served`: its counter among the classes (tokens over weight)."""

    def __init__(self) -> None:
        self.served = 0.0
        self.served_at = -inf
        self.tickets: dict[Ticket, None] = {}  # in order of arrival
        self.tokens = 0
        self.promised = self.promised_tokens = 0  # calls that came back for their bookings, and tokens of these
        self.active = 0  # tenants that wait
        self._tenants: dict[str, TenantQueue] = {}
        self._turns: list[tuple[float, int, TenantQueue]] = []  # heap by counter; void unless the stamp is the queue's
        self._stamp = 0
        self._floor = 0.0  # no tenant that comes back has less

    def counter(self, tenant: str) -> float:
        """Service that the tenant has received: charges over weight."""
        queue = self._tenants.get(tenant)
        return 0.0 if queue is None else queue.counter

    def owed(self, tenant: str) -> float:
        """Charges over weight by which a tenant that waits was served less than another that does, at most."""
        return max([turn[0] for turn in self._turns if turn[1] == turn[2].stamp]) - self._tenants[tenant].counter

    def configure(self, settings: TrafficClass, band: int, weights: dict[str, float]) -> None:
        """Take the policy's settings and the tenants' weights. A tenant's lead over the least served stays the same
        number of tokens; waiting calls stay."""
        self.settings = settings
        self.weight = settings.weight
        self.band = band
        self._weights = weights
        level = self.level()
        for tenant, queue in self._tenants.items():
            weight = weights.get(tenant, 1.0)
            queue.counter = level + (queue.counter - level) * queue.weight / weight
            queue.weight = weight
        self._sort_turns()

    # -- the next call ------------------------------------------------------------------------------------------

    def head(self) -> Ticket:
        """The ticket whose turn it is; the queue is not empty."""
        return self._turns[0][2].order[0][3]

    def candidates(self, head: Ticket) -> Iterator[Ticket]:
        """The head, and while those that were looked at are `aside`, the next of its class: the tenants in turn, the
        order within each."""
        yield head
        if head.aside:
            turns = sorted(turn for turn in self._turns if turn[1] == turn[2].stamp)
            for _, _, queue in turns[:LOOKED_PAST]:
                for ticket in queue.first(LOOKED_PAST):
                    if ticket is not head:
                        yield ticket
                        if not ticket.aside:
                            return

    def starving(self, ticket: Ticket, now: float) -> bool:
        """Whether it has waited half of the time it may wait."""
        return now - ticket.since > self._half(ticket)

    def _half(self, ticket: Ticket) -> float:
        return (ticket.call.deadline - ticket.since) / 2

    def rank(self, now: float) -> tuple[bool, int, float]:
        """Sort key among the class queues. It is before all others, whatever their bands and counters, if its head
        starves and the class was not served for as long either."""
        ticket = self.head()
        half = self._half(ticket)
        return now - ticket.since <= half or now - self.served_at <= half, self.band, self.served

    def level(self) -> float:
        """The counter to which a tenant that comes back is lifted."""
        return max(self._floor, self._turns[0][0]) if self._turns else self._floor

    # -- coming and going ---------------------------------------------------------------------------------------

    def push(self, ticket: Ticket) -> None:
        """Take a place in the tenant's order. O(log n)."""
        tenant = ticket.call.tenant
        queue = self._tenants.get(tenant)
        if queue is None:
            queue = self._open(tenant)
        if not queue.tickets:
            self._floor = self.level()
            queue.counter = max(queue.counter, self._floor)
            self.active += 1
            self._turn(queue)
        queue.push(ticket)
        self.tickets[ticket] = None
        self._count(ticket, 1)

    def take(self, ticket: Ticket, now: float) -> None:
        """Remove a ticket that is served, and charge its class and tenant if that has not been done."""
        self.served_at = now
        if not ticket.paid:
            ticket.paid = True
            self.served += ticket.cost / self.weight
            queue = self._tenants[ticket.call.tenant]
            queue.counter += ticket.charge / queue.weight
            if len(queue.tickets) > 1:
                self._turn(queue)
        self.remove(ticket)

    def remove(self, ticket: Ticket) -> None:
        """Withdraw a ticket."""
        queue = self._tenants[ticket.call.tenant]
        queue.remove(ticket)
        del self.tickets[ticket]
        self._count(ticket, -1)
        if not queue.tickets:
            queue.stamp = 0
            self.active -= 1
            self._tidy()
            if not self.active:
                self._floor = max(self._floor, queue.counter)

    def _count(self, ticket: Ticket, sign: int) -> None:
        self.tokens += sign * ticket.cost
        if ticket.promised:
            self.promised += sign
            self.promised_tokens += sign * ticket.cost

    def merge(self) -> None:
        """Bring tickets that came from another class into the order of arrival."""
        self.tickets = by_arrival(self.tickets)
        for queue in self._tenants.values():
            queue.tickets = by_arrival(queue.tickets)

    def correct(self, ticket: Ticket, prompt_tokens: int, completion_tokens: int) -> None:
        """Replace the charge of a served ticket by the tokens it used; a second time changes nothing.

        Of a tenant that was forgotten there is nothing to correct.
        """
        queue = self._tenants.get(ticket.call.tenant)
        if queue is None:
            return
        prompt, completion = max(0, min(prompt_tokens, CREDIBLE)), max(0, min(completion_tokens, CREDIBLE))
        charge = prompt + OUTPUT_WEIGHT * completion
        queue.counter += (charge - ticket.charge) / queue.weight
        ticket.charge = charge
        if queue.tickets:
            self._turn(queue)

    # -- tenants ------------------------------------------------------------------------------------------------

    def _open(self, tenant: str) -> TenantQueue:
        if len(self._tenants) - self.active >= REMEMBERED:
            self._forget()
        queue = self._tenants[tenant] = TenantQueue(self._weights.get(tenant, 1.0))
        return queue

    def _forget(self) -> None:
        """Keep the tenants that wait, and of the others the half of REMEMBERED with the highest counters.

        To forget one below the level changes nothing, as it would be lifted there. One above it comes back early, by
        the lead it had: at most one call, and what its running calls use beyond their estimates.
        """
        level = self.level()
        above = [(name, each) for name, each in self._tenants.items() if not each.tickets and each.counter > level]
        above.sort(key=lambda entry: entry[1].counter)
        waiting = {name: each for name, each in self._tenants.items() if each.tickets}
        self._tenants = waiting | dict(above[-REMEMBERED // 2 :])

    def _turn(self, queue: TenantQueue) -> None:
        """Give a waiting tenant its place among the others, behind its equals; the one it had is void."""
        self._stamp += 1
        queue.stamp = self._stamp
        turns = self._turns
        if turns and turns[0][2] is queue:
            heapreplace(turns, (queue.counter, self._stamp, queue))
        else:
            heappush(turns, (queue.counter, self._stamp, queue))
        self._tidy()

    def _tidy(self) -> None:
        """The first turn is a valid one, and most are."""
        turns = self._turns
        while turns and turns[0][1] != turns[0][2].stamp:
            heappop(turns)
        if len(turns) > 2 * self.active + 16:
            self._sort_turns()

    def _sort_turns(self) -> None:
        self._turns = [(each.counter, each.stamp, each) for each in self._tenants.values() if each.stamp]
        heapify(self._turns)

    # -- estimates ----------------------------------------------------------------------------------------------

    def ahead(self, call: Call, ticket: Ticket | None = None) -> float:
        """Tokens of this class that go before `ticket`, or before `call` if it came now.

        O(waiting tenants). Its tenant's counter will be `start` when its turn comes; another tenant has its turns
        until its own counter is above that, each of the mean size of its tickets. Among equals the one that has had
        its place for longer goes first.
        """
        queue = self._tenants.get(call.tenant)
        tokens, charge, start, mine = 0.0, 0.0, self.level(), inf
        if queue is not None:
            start = max(start, queue.counter)
            if queue.tickets:
                tokens, charge = queue.before(call.deadline, ticket)
                start = queue.counter + charge / queue.weight
                mine = queue.stamp
        for _, stamp, other in self._turns:
            if stamp == other.stamp and other is not queue:
                behind = (start - other.counter) * other.weight
                ties = stamp < mine or (behind == 0.0 and charge > 0.0)
                tokens += turns_before(behind, other.charge, len(other.tickets), ties=ties) * other.tokens
        return tokens


def by_arrival(tickets: Iterable[Ticket]) -> dict[Ticket, None]:
    return dict.fromkeys(sorted(tickets, key=lambda ticket: ticket.sequence))


def turns_before(behind: float, backlog: int, tickets: int, *, ties: bool) -> float:
    """The share, 0..1, of a backlog of so many tickets that has its turn while it is `behind` (in the backlog's unit).

    Whoever is behind by any amount has one more turn, and with `ties` whoever is level too: Start-time Fair Queueing
    looks at where a turn starts. Exact for tickets of one size.
    """
    if behind < 0.0 or not backlog:
        return 0.0
    turns = behind * tickets / backlog
    whole = floor(turns + 1e-9) + 1 if ties else -floor(1e-9 - turns)
    return min(1.0, whole / tickets)
