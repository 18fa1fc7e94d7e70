"""One batch from the state that it is in to its end: judge its file, work its lines off, write its files.

Whenever the process ends, another run goes on from what the storage has: a line without a result is sent again, one
with a result never. A file is written anew until the transaction that ends the batch knows it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from functools import partial
from typing import BinaryIO

from gateway.batches import tables
from gateway.batches.line_call import LineAnswer, LineCall
from gateway.batches.site import BatchSite
from gateway.batches.tables import Result, StoredBatch
from gateway.core.batches.lines import BatchLine, Judged, read_line
from gateway.core.batches.objects import WINDOW_SECONDS, FileObject, LineFault
from gateway.core.batches.results import CANCELLED, EXPIRED, again_in, answered_line, unanswered_line
from gateway.core.batches.states import end_of
from gateway.core.request.outcome import error_body
from gateway.core.request.routes import ROUTES
from gateway.shared.threads import in_thread, to_its_end

SLICE = 64 * 1024  # bytes of a file that are judged at once: a millisecond in which no other thread runs
CLOCK = 5.0  # seconds between two looks at the clock, which may be set, or stand still with the machine
NO_TENANT = LineAnswer(503, b"", 60.0)  # a reload may bring it back
NO_ENGINE = LineAnswer(503, b"", 5.0)  # without one its model could be answered for as unknown, which is a result
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
        self._lines: asyncio.Task[None] | None = None
        self._ahead = asyncio.Semaphore(site.policy.in_flight)  # lines that are read, and have no result

    async def run(self) -> None:
        """Back when the batch is over. Raises OSError and StorageError of the disk, alone or in a group."""
        storage, row = self._site.storage, self._row
        # What the worker has read may be older than the end of an earlier run.
        if await storage.run(partial(tables.status_of, row=row)) == "validating":
            await self._judge()
        if await storage.run(partial(tables.status_of, row=row)) == "in_progress":
            await self._work()
            if not self._stopped:
                await storage.run(partial(tables.step, row=row, status="finalizing", now=self._site.now()))
        status = await storage.run(partial(tables.status_of, row=row))
        if status == "cancelling":
            await storage.run(partial(tables.forget_unjudged, row=row))
        if status in {"finalizing", "cancelling"}:
            await self._write(status)

    def stop(self) -> None:
        """It was cancelled: calls under way are given up."""
        if self._lines is not None and not self._stopped:
            self._lines.cancel()
        self._stopped = True

    # -- its file -------------------------------------------------------------------------------------------------

    async def _judge(self) -> None:
        site, batch, row = self._site, self._batch, self._row
        judged = Judged(batch.endpoint, site.policy.max_line, site.policy.max_requests)
        await site.storage.run(partial(tables.begin_lines, row=row))
        offset = 0
        while not self._stopped:
            read = await in_thread(partial(self._judge_slice, judged, offset), raises=(OSError,))
            offset += read
            lines = list(judged.taken())
            if lines:
                await site.storage.run(partial(tables.add_lines, row=row, lines=lines))
            if not read:
                break
        if self._stopped:
            return
        now = site.now()
        if judged.faults:
            await site.storage.run(partial(tables.fail, row=row, faults=judged.faults, now=now))
        else:
            await site.storage.run(partial(tables.begin_work, row=row, now=now))

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

    # -- its lines ------------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        """Back when each line has a result, the window is over, or the batch was cancelled."""
        if self._stopped:
            return
        timer: asyncio.TimerHandle | None = None
        over = False

        def watch() -> None:
            nonlocal over, timer
            left = self._left()
            over = left <= 0
            if over:
                lines.cancel()
            else:
                timer = asyncio.get_running_loop().call_later(min(left, CLOCK), watch)

        lines = self._lines = asyncio.ensure_future(self._all_lines())
        watch()
        try:
            await lines
        except asyncio.CancelledError:
            if not (over or self._stopped):
                raise
        finally:
            if timer is not None:
                timer.cancel()
            lines.cancel()

    def _left(self) -> int:
        """Seconds of the window that are left. One whose clock was set back has no more than a whole one."""
        return min(WINDOW_SECONDS, self._batch.expires_at - self._site.now())

    async def _all_lines(self) -> None:
        after = 0
        async with asyncio.TaskGroup() as group:
            while lines := await self._site.storage.run(partial(tables.pending, row=self._row, after=after)):
                for line in lines:
                    await self._ahead.acquire()
                    group.create_task(self._line(line)).add_done_callback(lambda _: self._ahead.release())
                after = lines[-1].number

    async def _line(self, line: BatchLine) -> None:
        """Send it until it has a result, and keep that."""
        tries = 0
        while True:
            tries += 1
            request_id = f"batch_req_{self._name}_{line.number}"
            answer = await self._sent(line, request_id)
            wait = again_in(answer.status, answer.retry_after, answer.helps, tries)
            if wait is None:
                break
            self._site.lines["again"] += 1
            await asyncio.sleep(wait * random.uniform(1.0, 1.25))  # noqa: S311 # not all at once
        text = answered_line(request_id, line.custom_id, answer.status, request_id, answer.body)
        result = Result(line.number, answer.status < 400, text)
        if await self._site.storage.run(partial(tables.keep_result, row=self._row, result=result)):
            self._site.lines["completed" if result.good else "failed"] += 1

    async def _sent(self, line: BatchLine, request_id: str) -> LineAnswer:
        site = self._site
        async with site.seats:
            account = site.pipeline.snapshot.tenants.accounts.get(self._tenant)
            if account is None:
                return NO_TENANT
            if not site.pipeline.decider.up:
                return NO_ENGINE
            read = partial(site.folder.read, self._batch.input_file_id, line.offset, line.length)
            found = read_line(await in_thread(read))
            if found is None:
                return CHANGED
            body = bytes(found.body)
            fields = {
                b"content-type": b"application/json",
                b"x-request-id": request_id.encode(),
                b"x-weir-deadline-ms": b"%d" % (max(1, self._left()) * 1000),
            }
            policy = site.pipeline.snapshot.policy  # a reload may have renamed the class, or done away with it
            name = (policy.batches or site.policy).class_
            if name in policy.classes:
                fields[b"x-weir-class"] = name.encode()
            call = LineCall(site.pipeline, site.bodies, ROUTES[self._batch.endpoint.encode()], account, fields, body)
            site.calls += 1
            try:
                return await call.answer
            finally:
                site.calls -= 1
                call.leave()

    # -- its end --------------------------------------------------------------------------------------------------

    async def _write(self, status: str) -> None:
        """Write the files of results, and end the batch."""
        with contextlib.ExitStack() as written:  # and locked until they have their rows
            await self._write_into(written, status)

    async def _write_into(self, written: contextlib.ExitStack, status: str) -> None:
        site, row = self._site, self._row
        output, errors = f"file-{self._name}-output", f"file-{self._name}-error"

        def begin() -> tuple[BinaryIO, BinaryIO]:
            return written.enter_context(site.folder.begin(output)), written.enter_context(site.folder.begin(errors))

        good, bad = await to_its_end(begin)
        after = 0
        while page := await site.storage.run(partial(tables.results, row=row, after=after)):
            await to_its_end(partial(_write_each, page, good, bad))
            after = page[-1].number
        after = missing = 0
        why = CANCELLED if status == "cancelling" else EXPIRED
        while lines := await site.storage.run(partial(tables.pending, row=row, after=after)):
            ids = [(f"batch_req_{self._name}_{line.number}", line.custom_id) for line in lines]
            text = b"".join([unanswered_line(id, custom_id, why) for id, custom_id in ids])
            await to_its_end(partial(bad.write, text))
            missing += len(lines)
            after = lines[-1].number
        sizes = await to_its_end(lambda: (site.folder.keep(output, good), site.folder.keep(errors, bad)))
        now = site.now()
        files = {}
        for column, id, size in (("output_file_id", output, sizes[0]), ("error_file_id", errors, sizes[1])):
            if size:
                files[column] = FileObject(
                    id=id, bytes=size, created_at=now, expires_at=now + int(site.policy.keep),
                    filename=f"{self._batch.id}_{'output' if id == output else 'error'}.jsonl", purpose="batch_output",
                )  # fmt: skip
            else:
                await to_its_end(partial(site.folder.delete, id))
        end = end_of(status, missing)
        await site.storage.run(partial(tables.finish, row=row, status=end, now=now, tenant=self._tenant, files=files))


def _write_each(page: list[Result], good: BinaryIO, bad: BinaryIO) -> None:
    for result in page:
        (good if result.good else bad).write(result.text)
