"""Expiries of the calls that wait, and one timer for the earliest of them."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Iterator
from itertools import count

from gateway.core.admission.queues import Ticket

FEW = 64  # tickets of calls that wait no more, which need not be removed


class Expiries:
    """`ring` is called when the earliest expiry has come; whoever is called takes what is due, and arms the timer."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self.tickets: list[tuple[float, int, Ticket]] = []  # a heap, by expiry
        self._ring = ring
        self._sequence = count()
        self._timer: asyncio.Handle | None = None
        self._rings_at = 0.0  # what it is set to: for a time that has passed, uvloop's handle does not say

    @property
    def armed(self) -> bool:
        """Whether the timer is set."""
        return self._timer is not None

    def add(self, ticket: Ticket) -> None:
        """Note when the ticket expires."""
        heapq.heappush(self.tickets, (ticket.expires, next(self._sequence), ticket))

    def due(self, now: float) -> Iterator[Ticket]:
        """Take the tickets that have expired and still wait."""
        tickets = self.tickets
        while tickets and (tickets[0][0] <= now or not tickets[0][2].waiting):
            ticket = heapq.heappop(tickets)[2]
            if ticket.waiting:
                yield ticket

    def arm(self, waiting: int) -> None:
        """Set the timer on the earliest expiry of a call that still waits. `waiting`: how many do."""
        tickets = self.tickets
        if len(tickets) > FEW and len(tickets) > 2 * waiting:  # else granted calls stay until then
            tickets[:] = [entry for entry in tickets if entry[2].waiting]
            heapq.heapify(tickets)
        while tickets and not tickets[0][2].waiting:
            heapq.heappop(tickets)
        if not tickets:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        elif self._timer is None or self._rings_at > tickets[0][0]:
            if self._timer is not None:
                self._timer.cancel()
            self._rings_at = tickets[0][0]
            self._timer = asyncio.get_running_loop().call_at(self._rings_at, self._rung)

    def _rung(self) -> None:
        self._timer = None
        self._ring()
