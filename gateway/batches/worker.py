"""Worker of all batches: which of them run now, and what becomes of old files.

Of the processes of a gateway the one works that has claimed the folder of the files. Its end, however it comes, frees
that lock, and another claims it within NOTICE. The storage is looked at every LOOK seconds, when a batch comes or ends,
and within NOTICE of another process's change: so a batch of before a restart goes on, one that another relay has taken
or cancelled is known here, and one whose disk has failed is tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter

from gateway.batches import tables
from gateway.batches.batch_run import BatchRun
from gateway.batches.site import BatchSite
from gateway.batches.tables import StoredBatch
from gateway.shared.storage import StorageError
from gateway.shared.tasks import lasting
from gateway.shared.threads import in_thread

LOOK = 30.0  # seconds
NOTICE = 0.5  # seconds
ENDED_WITHIN = 10.0  # seconds for the disk: what is not written by then keeps the folder claimed until the process ends
AT_ONCE = 64  # batches, and one of each tenant that has none among them
OF_A_TENANT = 4


class BatchWorker:
    """Runs the batches of one storage."""

    def __init__(self, site: BatchSite) -> None:
        self._site = site
        self._runs: dict[int, tuple[str, BatchRun, asyncio.Task[None]]] = {}  # by row; of whom
        self._later: dict[int, float] = {}  # when to try those again whose disk has failed, by row
        self._wanted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._cleared = -LOOK  # when, by the loop's time
        self.states: dict[str, int] = {}  # batches, at the last look; of one that does not work, none

    async def start(self) -> None:
        """Begin, and forget what nobody needs, where no other process works. Raises OSError and StorageError."""
        await in_thread(self._site.folder.make)
        if self._site.folder.claim.take():
            await self._clear()
        self._task = lasting("the work on batches", self._work)

    def look(self) -> None:
        """Wake the worker: a batch is new, or has ended."""
        self._wanted.set()

    def cancelled(self, row: int) -> None:
        """Stop the run of a batch that has become `cancelling`."""
        if row in self._runs:
            self._runs[row][1].stop()
        self.look()

    async def aclose(self) -> None:
        """End what is under way. A result that is being kept is kept; then another process may work."""
        tasks = [task for _, _, task in self._runs.values()]
        tasks += [] if self._task is None else [self._task]
        for task in tasks:
            task.cancel()
        self.states = {}
        with contextlib.suppress(TimeoutError, StorageError):
            async with asyncio.timeout(ENDED_WITHIN):
                await asyncio.gather(*tasks, return_exceptions=True)
                await self._site.storage.done()
                self._site.folder.claim.leave()

    # -- looks ----------------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        site, clock = self._site, asyncio.get_running_loop().time
        while True:
            self._wanted.clear()
            try:
                while not site.folder.claim.take():  # noqa: ASYNC110 # the kernel tells nobody that a lock is free
                    await asyncio.sleep(NOTICE)
                if clock() >= self._cleared + LOOK:
                    await self._clear()
                seen = await site.storage.changes()
                found = await site.storage.run(tables.unfinished)
                self.states = await site.storage.run(tables.states)
                self._go_by(found)
                await self._news(seen)
            except (OSError, StorageError) as error:
                site.say(f"batches: {site.told(error)}: tried again in {LOOK:g} s")
                await self._news(None)

    async def _news(self, seen: int | None) -> None:
        """Wait until a look is due. `seen`: the storage's changes at the last look; None: that look has failed."""
        for _ in range(round(LOOK / NOTICE)):
            try:
                async with asyncio.timeout(NOTICE):
                    await self._wanted.wait()
            except TimeoutError:
                if seen is None or await self._site.storage.changes() == seen:
                    continue
            return

    def _go_by(self, found: list[StoredBatch]) -> None:
        """Begin and stop batches as they were found."""
        busy, now = Counter(tenant for tenant, _, _ in self._runs.values()), asyncio.get_running_loop().time()
        for stored in found:
            if stored.row in self._runs:
                if stored.batch.status == "cancelling":
                    self._runs[stored.row][1].stop()
                continue
            # Any tenant may have one.
            full = busy[stored.tenant] >= (OF_A_TENANT if len(self._runs) < AT_ONCE else 1)
            if (full and stored.batch.status != "cancelling") or now < self._later.get(stored.row, now):
                continue
            self._later.pop(stored.row, None)
            busy[stored.tenant] += 1
            run = BatchRun(self._site, stored)
            task = asyncio.get_running_loop().create_task(self._run(stored, run))
            self._runs[stored.row] = stored.tenant, run, task
            self._site.runs = len(self._runs)

    async def _run(self, stored: StoredBatch, run: BatchRun) -> None:
        try:
            await run.run()
        except* (OSError, StorageError) as failed:
            self._site.say(f"{stored.batch.id}: {self._site.told(_first(failed))}: tried again in {LOOK:g} s")
            loop = asyncio.get_running_loop()
            self._later[stored.row] = loop.time() + LOOK
            loop.call_later(LOOK, self.look)
        else:
            self.look()
        finally:
            del self._runs[stored.row]
            self._site.runs = len(self._runs)

    async def _clear(self) -> None:
        """Forget what has expired, and delete what processes that were killed have left."""
        self._cleared, site = asyncio.get_running_loop().time(), self._site
        now = site.now()
        for id in await site.storage.run(tables.old_files, now=now):
            await in_thread(site.folder.delete, id)  # first: a full disk keeps its row until then
        await site.storage.run(tables.forget_old, now=now)
        known = await site.storage.run(tables.file_names)
        loose = set(await in_thread(site.folder.loose, known))
        if loose:
            known = await site.storage.run(tables.file_names)  # asked again: who let go of a file has its row
            await in_thread(site.folder.clear, loose - known)


def _first(group: BaseExceptionGroup[Exception]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
