"""Everything that the parts of the Batch API share, with the seats of its lines."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from gateway.batches.file_folder import FileFolder
from gateway.core.policy.batches import BatchesPolicy
from gateway.core.request.body_memory import BodyMemory
from gateway.relay.pipeline import Pipeline
from gateway.shared.storage import Storage

FOLDER = "files"  # beside the storage's file
AHEAD = 16_384  # lines of all batches that are read while they have no result, each for 2.5 KiB of memory


class BatchSite:
    """Parts and counts. `policy` is the one of the start. `lines` counts results of lines, and lines that were sent
    once more. `say` takes lines for the operator."""

    def __init__(
        self,
        policy: BatchesPolicy,
        storage: Storage,
        pipeline: Pipeline,
        bodies: BodyMemory,
        say: Callable[[str], None],
    ) -> None:
        self.policy = policy
        self.storage = storage
        self.folder = FileFolder(Path(storage.folder) / FOLDER)
        self.pipeline = pipeline
        self.bodies = bodies
        self.say = say
        self.calls = 0  # lines that wait or run now
        self.runs = 0  # batches that are worked on now
        self.seats = Seats(policy.in_flight)  # of calls that wait or run
        self.kept: dict[str, int] = {}  # bytes that tenants had on the disk at the last result
        self.spilled: Counter[str] = Counter()  # bytes of answers under way, beside those
        self.lines = Counter({"completed": 0, "failed": 0, "again": 0})

    @property
    def ahead(self) -> int:
        """Lines of each batch that are read while they have no result."""
        return max(1, min(self.policy.in_flight, AHEAD // max(1, self.runs)))

    def room(self, tenant: str) -> bool:
        """Whether the tenant may have more on the disk."""
        return self.kept.get(tenant, 0) + self.spilled[tenant] <= self.policy.per_tenant

    def told(self, error: BaseException) -> str:
        """An error of the disk or the storage, in words for the operator."""
        if isinstance(error, OSError):
            return f"{error.filename or self.folder.path}: {error.strerror or error}"
        return str(error)

    def now(self) -> int:
        """Unix seconds, as the API's objects have them."""
        return int(time.time())


def is_full(error: BaseException) -> bool:
    """Whether the disk has no room, or the gateway's user or process (RLIMIT_FSIZE) may write no more."""
    return getattr(error, "errno", None) in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG} or getattr(error, "full", False)


# -- seats ------------------------------------------------------------------------------------------------------------

# A seat that is free goes to the batch that has the least, of the tenant that has the least. Where none is free, a
# batch that has less than its part still gets one: so slow calls, whosever they are, shut nobody out. For a while
# there are more lines than seats then, and nobody above his part gets one until they are fewer.
Owner = tuple[str, int]  # tenant and batch


class Seats:
    """Seats of the lines that wait or run, `number` of them, in even parts: by tenant, and of a tenant by batch."""

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
        waiting = self._waiting.setdefault(owner, deque())
        waiting.append(seat)
        if len(waiting) == 1:  # behind another of its batch, for which there is no seat, there is none either
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
