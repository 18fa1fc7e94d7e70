"""Run of one batch from its current state to its end: check its file, send its lines, write its result files.

If the process ends, another run resumes from the storage. It sends every line without a result again, and no line that
has a result.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import sys
from collections import Counter, defaultdict
from collections.abc import AsyncIterator

from gateway.batches import tables
from gateway.batches.line_call import STORAGE_FULL, LineAnswer, LineCall
from gateway.batches.results_files import Result, ResultsFiles
from gateway.batches.site import BatchSite
from gateway.batches.tables import StoredBatch
from gateway.core.batches.lines import MAX_LINES, BatchLine, Judged, read_line
from gateway.core.batches.objects import WINDOW_SECONDS, FileObject, LineFault
from gateway.core.batches.results import EXPIRED, again_in
from gateway.core.batches.states import end_of
from gateway.core.policy.snapshot import largest_body
from gateway.core.request.outcome import error_body
from gateway.core.request.routes import ROUTES
from gateway.shared.threads import in_thread, to_its_end

LOST = LineFault("results_missing", "results of this batch are gone from the gateway's disk")
SLICE = 64 * 1024  # bytes of a file that are judged at once: a millisecond in which no other thread runs
PART = 8  # of the lines that may be under way, one of so many finds out whether an engine has a model again
CLOCK = 5.0  # seconds between two looks at the clock, which may be set, or stand still with the machine
NO_TENANT = LineAnswer(503, b"", 60.0)  # a reload may bring it back
NO_ENGINE = LineAnswer(503, b"", 5.0)  # sent while none is up, a line could get 404 for its model, and keep that
CHANGED = LineAnswer(
    400,
    error_body(
        "The input file is no longer as it was judged: upload it again.", "invalid_request_error", "line_changed"
    ),
    helps=False,
)


class BatchRun:
    """Run of one batch. `stop` is for a batch that was cancelled."""

    def __init__(self, site: BatchSite, stored: StoredBatch) -> None:
        self._site = site
        self._row = stored.row
        self._tenant = stored.tenant
        self._batch = stored.batch
        self._name = stored.batch.id.removeprefix("batch_")
        self._stopped = False
        self._results = ResultsFiles(site, stored)
        self._lines: asyncio.Task[None] | None = None
        self._one_ended = asyncio.Event()  # of the lines that are read, and have no result
        self._running: set[asyncio.Task[None]] = set()  # of the same
        self._unserved: defaultdict[str, set[int]] = defaultdict(set)  # numbers of lines without an engine, by model
        self._away: dict[str, float] = {}  # until when they are left, in seconds of the loop's clock
        self._trying: Counter[str] = Counter()  # calls under way that find out whether an engine has a model again
        self._most_trying = max(1, site.policy.in_flight // PART)  # of one model: it may be long until they know

    async def run(self) -> None:
        """Run the batch to its end. Raises OSError and StorageError of the disk, alone or in a group."""
        storage, row = self._site.storage, self._row
        # What the worker has read may be older than the end of an earlier run.
        if await storage.run(tables.status_of, row=row) == "validating":
            await self._judge()
        try:
            await self._to_its_end()
        finally:
            await self._results.aclose()

    async def _to_its_end(self) -> None:
        storage, row = self._site.storage, self._row
        status = await storage.run(tables.status_of, row=row)
        if status not in {"in_progress", "finalizing", "cancelling"}:
            return
        await self._results.open()
        if self._results.lost:
            await self._fail(LOST)
        if status == "in_progress":
            await self._work()
            if not self._stopped:
                await storage.run(tables.step, row=row, status="finalizing", now=self._site.now())
        status = await storage.run(tables.status_of, row=row)
        if status == "cancelling":
            await storage.run(tables.forget_unjudged, row=row)
        await self._write(status)

    def stop(self) -> None:
        """Stop the run, and cancel its calls under way."""
        if self._lines is not None and not self._stopped:
            self._lines.cancel()
        self._stopped = True

    async def _fail(self, fault: LineFault) -> None:
        """Fail the batch: record `fault` in the storage, then cancel its calls under way."""
        await self._site.storage.run(tables.stop, row=self._row, fault=fault, now=self._site.now())
        self.stop()

    # -- its file -------------------------------------------------------------------------------------------------

    async def _judge(self) -> None:
        site, batch, row = self._site, self._batch, self._row
        judged = Judged(batch.endpoint, largest_body(site.pipeline.current.policy), MAX_LINES)
        await site.storage.run(tables.begin_lines, row=row)
        offset = 0
        while not self._stopped:
            read = await in_thread(self._judge_slice, judged, offset)
            offset += read
            lines = list(judged.taken())
            if lines and await site.storage.run(tables.add_lines, row=row, lines=lines) > site.policy.per_tenant:
                judged.faults.append(self._full())
                break
            if not read:
                break
        if self._stopped:
            return
        now = site.now()
        if judged.faults:
            await site.storage.run(tables.fail, row=row, faults=judged.faults, now=now)
        else:
            await site.storage.run(tables.begin_work, row=row, now=now)

    def _judge_slice(self, judged: Judged, offset: int) -> int:
        """The bytes of the next slice; 0: the file is over."""
        try:
            data = self._site.folder.read(self._batch.input_file_id, offset, SLICE)
        except FileNotFoundError:
            judged.faults.append(LineFault("file_missing", "the input file is gone: upload it again"))
            return 0
        if data and not judged.full:
            judged.feed(data)
            return len(data)
        judged.end()
        return 0

    def _full(self) -> LineFault:
        return LineFault("storage_full", tables.storage_full(self._site.policy.per_tenant).message)

    # -- its lines ------------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        """Send the lines until each has a result, the window is over, or the batch was cancelled."""
        if self._stopped:
            return
        lines = self._lines = asyncio.ensure_future(self._all_lines())
        try:
            while not lines.done() and (left := self._left()) > 0:
                await asyncio.wait((lines,), timeout=min(left, CLOCK))
        finally:
            lines.cancel()  # those that are left have no time, or this run is cancelled
            await asyncio.gather(lines, return_exceptions=True)
        if not lines.cancelled():
            lines.result()

    def _left(self) -> int:
        """Seconds of the window that are left: no more than all of them, also after the clock was set back."""
        return min(WINDOW_SECONDS, self._batch.expires_at - self._site.now())

    async def _all_lines(self) -> None:
        """Send each line. Those of a model that no engine has are left until it may be back, and hold up no other."""
        async with asyncio.TaskGroup() as group:
            async for line in self._pending(0, sys.maxsize):
                await self._begin_due(group)
                await self._begin(group, line)
            while self._running or self._unserved:
                wait = min([CLOCK, *map(self._left_for, self._unserved)])
                if self._running:
                    await asyncio.wait(self._running, timeout=wait, return_when=asyncio.FIRST_COMPLETED)
                else:
                    await asyncio.sleep(wait)
                await self._begin_due(group)

    async def _begin_due(self, group: asyncio.TaskGroup) -> None:
        """Begin the lines that were left, of models that may be back."""
        due = [model for model in self._unserved if not self._left_for(model)]
        models = {number: model for model in due for number in self._unserved.pop(model)}
        if not models:
            return
        async for line in self._pending(min(models) - 1, max(models)):
            model = models.get(line.number)
            if model is not None and self._left_for(model):  # the first of them find out, or have found it away
                self._unserved[model].add(line.number)
            elif model is not None:
                await self._begin(group, line)

    async def _begin(self, group: asyncio.TaskGroup, line: BatchLine) -> None:
        while len(self._running) >= self._site.ahead:
            self._one_ended.clear()
            await self._one_ended.wait()
        task = group.create_task(self._line(line))
        self._running.add(task)
        task.add_done_callback(self._ended)

    async def _pending(self, after: int, last: int) -> AsyncIterator[BatchLine]:
        """Yield the lines without a result behind number `after`, up to `last`."""
        while lines := await self._site.storage.run(tables.pending, row=self._row, after=after):
            for line in lines:
                if line.number > last:
                    return
                yield line
            after = lines[-1].number

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._one_ended.set()

    def _left_for(self, model: str) -> float:
        """Seconds for which lines of the model are left; inf: until those know that find out whether it is back."""
        if model not in self._away:
            return 0.0
        if self._trying[model] >= self._most_trying:
            return math.inf
        return max(0.0, self._away[model] - asyncio.get_running_loop().time())

    async def _line(self, line: BatchLine) -> None:
        """Send a line until it has a result, and keep the result, or until it is left."""
        tries = 0
        request_id = f"batch_req_{self._name}_{line.number}"
        wait: float | None = 0.0
        while wait is not None:
            if tries:
                self._site.lines["again"] += 1
                await asyncio.sleep(wait * random.uniform(1.0, 1.25))  # noqa: S311 # not all at once
            tries += 1
            async with self._site.seats.seat(self._tenant, self._row):
                with contextlib.ExitStack() as call:
                    answer = await self._sent(call, line, request_id)
                    if answer is None:
                        return
                    wait = again_in(answer.status, answer.retry_after, answer.helps, tries)
                    if wait is None:
                        await self._keep(Result(line.number, request_id, line.custom_id, answer))

    async def _keep(self, result: Result) -> None:
        if result.answer is not STORAGE_FULL:
            good = await self._results.keep(result)
            self._site.lines["completed" if good else "failed"] += 1
        if result.answer is STORAGE_FULL or not self._site.room(self._tenant):
            await self._fail(self._full())

    async def _read(self, line: BatchLine) -> tuple[bytes, str] | None:
        """The body of a line and its model; None: its file has changed since it was judged, or is gone."""
        try:
            text = await in_thread(self._site.folder.read, self._batch.input_file_id, line.offset, line.length)
        except FileNotFoundError:
            return None
        return read_line(text)

    async def _sent(self, call: contextlib.ExitStack, line: BatchLine, request_id: str) -> LineAnswer | None:
        """Send a line as a call and return its answer; None: no engine has its model, and it is left. The answer's body
        exists until `call` is closed."""
        site = self._site
        account = site.pipeline.current.snapshot.tenants.accounts.get(self._tenant)
        if account is None:
            return NO_TENANT
        if not site.pipeline.decider.up:
            return NO_ENGINE
        found = await self._read(line)
        if found is None:
            return CHANGED
        body, model = found[0], sys.intern(found[1])
        if self._left_for(model):
            self._unserved[model].add(line.number)
            return None
        fields = {
            b"content-type": b"application/json",
            b"x-request-id": request_id.encode(),
            b"x-weir-deadline-ms": b"%d" % (max(1, self._left()) * 1000),
        }
        policy = site.pipeline.current.policy  # a reload may have renamed the class, or done away with it
        name = (policy.batches or site.policy).class_
        if name in policy.classes:
            fields[b"x-weir-class"] = name.encode()
        sent = LineCall(site, ROUTES[self._batch.endpoint.encode()], account, fields, body)
        call.callback(sent.close)
        tries = model in self._away
        self._trying[model] += tries
        site.calls += 1
        try:
            answer = await sent.answer
        finally:
            site.calls -= 1
            self._trying[model] -= tries
        pause = again_in(answer.status, answer.retry_after, answer.helps, 1) if answer.away else None
        if pause is None:
            if answer.status < 500:
                self._away.pop(model, None)
            return answer
        self._away[model] = asyncio.get_running_loop().time() + pause * random.uniform(1.0, 1.25)  # noqa: S311 # as above
        self._unserved[model].add(line.number)
        site.lines["again"] += 1
        return None

    # -- its end --------------------------------------------------------------------------------------------------

    async def _write(self, status: str) -> None:
        """Finish the batch and name its result files."""
        site, row, results = self._site, self._row, self._results
        faults = await site.storage.run(tables.has_faults, row=row)
        missing = 0
        if status == "finalizing" and not faults:
            after = 0
            while lines := await site.storage.run(tables.pending, row=row, after=after):
                missing += len(lines)
                after = lines[-1].number
                if not site.room(self._tenant):
                    break
                await results.unanswered(
                    [(f"batch_req_{self._name}_{line.number}", line.custom_id) for line in lines], EXPIRED
                )
        now = site.now()
        files = {}
        for kind, id, size in zip(("output", "error"), results.ids, await results.whole(), strict=True):
            if size:
                files[f"{kind}_file_id"] = FileObject(
                    id=id, bytes=size, created_at=now, expires_at=now + int(site.policy.keep),
                    filename=f"{self._batch.id}_{kind}.jsonl", purpose="batch_output",
                )  # fmt: skip
            else:
                await to_its_end(site.folder.delete, id)
        end = end_of(status, missing, faults)
        await site.storage.run(tables.finish, row=row, status=end, now=now, tenant=self._tenant, files=files)
