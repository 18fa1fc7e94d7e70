"""Tickets, and one tenant's queue of them: earliest deadline first, then age, then arrival."""

from __future__ import annotations

from heapq import heapify, heappop, heappush, nsmallest
from math import inf

from gateway.core.request.call import Call

OUTPUT_WEIGHT = 2  # VTC's w_out over w_in: a token written is work for two that are read
SCANNED = 512  # tickets of one tenant that one estimate looks at


class Ticket:
    """Call in a queue. `waiting` turns false exactly once: the call is granted, refused, expired or withdrawn.

    Absolute seconds: `expires`, when its owner gives the call up; `since`, its age and its order among equal deadlines,
    which is `pushed_at` unless the call returns for a booking; `deadline`, its order within its tenant, which is the
    call's own unless the call was booked with another one. `large`: the call needs so much that others may pass it
    until it fits. `aside`: others may pass the call, because it waits for a full engine that has its prompt.
    `promised`: the call came back for its booking, so its place is kept.
    """

    __slots__ = (
        "aside", "call", "charge", "cost", "deadline", "exclude", "expires", "large", "paid", "promised",
        "pushed_at", "sequence", "since", "waiting",
    )  # fmt: skip

    def __init__(
        self,
        call: Call,
        pushed_at: float,
        exclude: frozenset[str] = frozenset(),
        expires: float | None = None,
        since: float | None = None,
        deadline: float | None = None,
        *,
        large: bool = False,
        promised: bool = False,
    ) -> None:
        prompt, output = call.prompt_tokens, call.output_tokens
        self.call = call
        self.cost = prompt + output
        self.charge = prompt + OUTPUT_WEIGHT * output  # what its tenant is charged, before weights
        self.pushed_at = pushed_at
        self.exclude = exclude  # engines that have failed this call
        self.expires = call.deadline if expires is None else expires
        self.since = pushed_at if since is None else since
        self.deadline = call.deadline if deadline is None else deadline
        self.large = large
        self.aside = False
        self.promised = promised
        self.paid = False  # its class and tenant have been charged for it
        self.sequence = 0  # of its push
        self.waiting = True

    @property
    def key(self) -> tuple[float, float, int]:
        """Order within its tenant. A ticket that was granted before has paid, and goes first."""
        return -inf if self.paid else self.deadline, self.since, self.sequence


class TenantQueue:
    """Queue of one tenant in one class: its waiting tickets, and its counter of service (charges over weight)."""

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.counter = 0.0
        self.stamp = 0  # of its entry among its class's turns; 0: it has none
        self.tickets: dict[Ticket, None] = {}  # in order of arrival
        self.order: list[tuple[float, float, int, Ticket]] = []  # heap by key; the removed stay until they come up
        self.latest = -inf  # deadline since it last had no ticket
        self.tokens = self.charge = 0  # sums over its tickets

    def push(self, ticket: Ticket) -> None:
        """Take a ticket. O(log n)."""
        deadline, since, sequence = ticket.key
        self.latest = max(self.latest, deadline)
        heappush(self.order, (deadline, since, sequence, ticket))
        self.tickets[ticket] = None
        self.tokens += ticket.cost
        self.charge += ticket.charge

    def remove(self, ticket: Ticket) -> None:
        """Give up a ticket. O(log n) over time: the heap is rebuilt when half of it is gone."""
        tickets, order = self.tickets, self.order
        ticket.waiting = False
        del tickets[ticket]
        self.tokens -= ticket.cost
        self.charge -= ticket.charge
        if not tickets:
            order.clear()
            self.latest = -inf
            return
        while not order[0][3].waiting:
            heappop(order)
        if len(order) > 2 * len(tickets) + 16:
            order[:] = [entry for entry in order if entry[3].waiting]
            heapify(order)

    def first(self, most: int) -> list[Ticket]:
        """First tickets of the tenant in order, `most` at most. O(its tickets)."""
        return [entry[3] for entry in nsmallest(most, [entry for entry in self.order if entry[3].waiting])]

    def before(self, deadline: float, ticket: Ticket | None) -> tuple[float, float]:
        """Tokens and charges of its tickets that go before `ticket`, or before a newcomer with that deadline.

        Exact up to SCANNED tickets; of more a sample of as many is looked at, unless the newcomer is last anyway.
        """
        if ticket is None and deadline >= self.latest:
            return self.tokens, self.charge
        key = (deadline, inf) if ticket is None else ticket.key
        seen = tokens = charge = 0
        for entry in self.order[:: len(self.order) // SCANNED + 1]:
            other = entry[3]
            if other.waiting:
                seen += other.cost
                if entry < key:
                    tokens += other.cost
                    charge += other.charge
        scale = self.tokens / seen if seen else 1.0
        return tokens * scale, charge * scale
