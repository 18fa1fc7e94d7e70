"""Worker of all batches: which of them run now, and what becomes of old files.

The storage is looked at every LOOK seconds, and whenever a batch comes: so a batch of before a restart goes on, and
one whose disk has failed is tried again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial

from gateway.batches import tables
from gateway.batches.batch_run import BatchRun
from gateway.batches.site import BatchSite
from gateway.batches.tables import StoredBatch
from gateway.shared.storage import StorageError
from gateway.shared.threads import in_thread

LOOK = 30.0  # seconds
AT_ONCE = 64  # batches
OF_A_TENANT = 4


class BatchWorker:
    """Runs the batches of one storage."""

    def __init__(self, site: BatchSite) -> None:
        self._site = site
        self._runs: dict[int, tuple[str, BatchRun, asyncio.Task[None]]] = {}  # by row; of whom
        self._wanted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.states: dict[str, int] = {}  # batches, at the last look

    async def start(self) -> None:
        """Forget what nobody needs, and begin. Raises OSError and StorageError."""
        site = self._site
        await in_thread(site.folder.make)
        loose = set(await in_thread(site.folder.loose))
        known = await site.storage.run(tables.file_ids)  # asked last: who let go of a file has its row
        for name in loose - known:
            await in_thread(partial(site.folder.delete, name))
        self._task = asyncio.get_running_loop().create_task(self._look())

    def look(self) -> None:
        """There is a new batch, or one has ended."""
        self._wanted.set()

    def cancelled(self, row: int) -> None:
        """This batch is `cancelling`."""
        if row in self._runs:
            self._runs[row][1].stop()
        self.look()

    async def aclose(self) -> None:
        """End what is under way. A result that is being kept is kept."""
        tasks = [task for _, _, task in self._runs.values()]
        tasks += [] if self._task is None else [self._task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _look(self) -> None:
        while True:
            self._wanted.clear()
            try:
                await self._forget()
                found = await self._site.storage.run(tables.unfinished)
                self.states = await self._site.storage.run(tables.states)
            except (OSError, StorageError) as error:
                self._site.say(f"batches: {self._site.told(error)}: tried again in {LOOK:g} s")
            else:
                self._begin(found)
            try:
                async with asyncio.timeout(LOOK):
                    await self._wanted.wait()
            except TimeoutError:
                pass

    def _begin(self, found: list[StoredBatch]) -> None:
        busy = Counter(tenant for tenant, _, _ in self._runs.values())
        for stored in found:
            if stored.row in self._runs or busy[stored.tenant] >= OF_A_TENANT or len(self._runs) >= AT_ONCE:
                continue
            busy[stored.tenant] += 1
            run = BatchRun(self._site, stored)
            task = asyncio.get_running_loop().create_task(self._run(stored, run))
            self._runs[stored.row] = stored.tenant, run, task

    async def _run(self, stored: StoredBatch, run: BatchRun) -> None:
        try:
            await run.run()
        except* (OSError, StorageError) as failed:
            self._site.say(f"{stored.batch.id}: {self._site.told(_first(failed))}: tried again in {LOOK:g} s")
        else:
            self.look()
        finally:
            del self._runs[stored.row]

    async def _forget(self) -> None:
        for id in await self._site.storage.run(partial(tables.forget_old, now=self._site.now())):
            await in_thread(partial(self._site.folder.delete, id))


def _first(group: BaseExceptionGroup[Exception]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
