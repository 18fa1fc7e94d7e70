"""Seats of the lines that wait or run, in even parts: by tenant, and of a tenant by batch.

A seat that is free goes to the batch that has the least, of the tenant that has the least. Where none is free, a batch
that has less than its part still gets one: so slow calls, whosever they are, shut nobody out. For a while there are
more lines than seats then, and nobody above his part gets one until they are fewer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator

Owner = tuple[str, int]  # tenant and batch


class Seats:
    """So many seats."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._taken: Counter[Owner] = Counter()
        self._waiting: dict[Owner, deque[asyncio.Future[None]]] = {}

    @property
    def taken(self) -> int:
        """Number of lines that have one."""
        return self._taken.total()

    @contextlib.asynccontextmanager
    async def seat(self, tenant: str, batch: int) -> AsyncIterator[None]:
        """Wait for a seat, and keep it within."""
        owner, seat = (tenant, batch), asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(seat)
        self._hand_out()
        try:
            await seat
            yield
        finally:
            if seat.done() and not seat.cancelled():
                self._taken -= Counter([owner])
            elif seat in self._waiting.get(owner, ()):
                self._leave(owner, seat)
            self._hand_out()

    def _hand_out(self) -> None:
        while self._waiting:
            owners = self._taken.keys() | self._waiting.keys()
            batches = Counter([tenant for tenant, _ in owners])
            of_tenant: Counter[str] = Counter()
            for (tenant, _), seats in self._taken.items():
                of_tenant[tenant] += seats
            # A batch that is to have one where none is free: one at least is its part.
            parts = {tenant: max(1, self._number // (len(batches) * batches[tenant])) for tenant in batches}
            free = self.taken < self._number
            next_ones = [
                (of_tenant[owner[0]], self._taken[owner], owner)
                for owner in self._waiting
                if free or self._taken[owner] < parts[owner[0]]
            ]
            if not next_ones:
                return
            *_, owner = min(next_ones)
            seat = self._waiting[owner][0]
            self._leave(owner, seat)
            if not seat.cancelled():  # else its line was given up a moment ago
                self._taken[owner] += 1
                seat.set_result(None)

    def _leave(self, owner: Owner, seat: asyncio.Future[None]) -> None:
        """Wait no more for this seat."""
        self._waiting[owner].remove(seat)
        if not self._waiting[owner]:
            del self._waiting[owner]
