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


class Seats:
    """So many seats."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._taken: dict[str, Counter[int]] = {}  # by tenant and batch
        self._waiting: dict[str, dict[int, deque[asyncio.Future[None]]]] = {}

    @property
    def taken(self) -> int:
        """Number of lines that have one."""
        return sum(each.total() for each in self._taken.values())

    @contextlib.asynccontextmanager
    async def seat(self, tenant: str, batch: int) -> AsyncIterator[None]:
        """Wait for a seat, and keep it within."""
        seat: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue = self._waiting.setdefault(tenant, {}).setdefault(batch, deque())
        queue.append(seat)
        self._hand_out()
        try:
            await seat
            yield
        finally:
            if seat.done() and not seat.cancelled():
                self._take(tenant, batch, -1)
            elif seat in queue:
                queue.remove(seat)
                self._forget(tenant, batch)
            self._hand_out()

    def _hand_out(self) -> None:
        while self._waiting:
            free = self.taken < self._number
            waiting = [
                (self._of_tenant(tenant), self._of_batch(tenant, batch), tenant, batch)
                for tenant, batches in self._waiting.items()
                for batch in batches
                if free or self._of_batch(tenant, batch) < self._part(tenant)
            ]
            if not waiting:
                return
            *_, tenant, batch = min(waiting)
            seat = self._waiting[tenant][batch].popleft()
            self._forget(tenant, batch)
            if not seat.cancelled():  # else its line was given up a moment ago
                self._take(tenant, batch, 1)
                seat.set_result(None)

    def _part(self, tenant: str) -> int:
        """Seats that a batch of the tenant may have where none is free: one at least."""
        tenants = len(self._taken.keys() | self._waiting.keys())
        batches = len(self._taken.get(tenant, {}).keys() | self._waiting.get(tenant, {}).keys())
        return max(1, self._number // (tenants * batches))

    def _of_tenant(self, tenant: str) -> int:
        return self._taken[tenant].total() if tenant in self._taken else 0

    def _of_batch(self, tenant: str, batch: int) -> int:
        return self._taken[tenant][batch] if tenant in self._taken else 0

    def _take(self, tenant: str, batch: int, change: int) -> None:
        taken = self._taken.setdefault(tenant, Counter())
        taken[batch] += change
        if not taken[batch]:
            del taken[batch]
        if not taken:
            del self._taken[tenant]

    def _forget(self, tenant: str, batch: int) -> None:
        waiting = self._waiting[tenant]
        if not waiting[batch]:
            del waiting[batch]
        if not waiting:
            del self._waiting[tenant]
