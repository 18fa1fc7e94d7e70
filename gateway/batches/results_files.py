"""Output and error file of one batch, to which results are appended as answers come.

What has come in GATHER seconds is written as one group: appended, brought to the disk (fdatasync), and then one
transaction takes the lines away and names the files' new sizes. Nothing counts that stands behind those: the next run
cuts it off, and its lines are sent again. So neither SIGKILL nor a power cut loses a result or doubles one.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import mmap
import os
from collections.abc import Iterator
from typing import BinaryIO

import msgspec

from gateway.batches import tables
from gateway.batches.line_call import TOO_LONG, LineAnswer
from gateway.batches.site import BatchSite
from gateway.batches.tables import Sizes, StoredBatch
from gateway.core.batches import results
from gateway.shared.threads import in_thread, to_its_end

GATHER = 0.05  # seconds
PIECE = 256 * 1024  # bytes of an answer that are copied at once


class Result(msgspec.Struct, frozen=True):
    """A line's answer, whose body's file is open until it is kept."""

    number: int
    id: str
    custom_id: str
    answer: LineAnswer


class ResultsFiles:
    """The files of one batch, from `open` to `aclose`. `lost`: what earlier runs had written is not there any more."""

    def __init__(self, site: BatchSite, stored: StoredBatch) -> None:
        self.ids = tables.results_of(stored.batch.id)
        self.lost = False
        self._site = site
        self._row = stored.row
        self._tenant = stored.tenant
        self._files: tuple[BinaryIO, BinaryIO] | None = None
        self._waiting: list[tuple[Result, asyncio.Future[bool]]] = []
        self._task: asyncio.Task[None] | None = None
        self._failure: Exception | None = None

    async def open(self) -> None:
        """Lock both, and cut off what does not count. Raises OSError and StorageError."""
        site = self._site
        sizes = await site.storage.run(tables.sizes_of, row=self._row)
        with contextlib.ExitStack() as stack:

            def begin() -> tuple[BinaryIO, BinaryIO]:
                output = stack.enter_context(site.folder.begin(self.ids[0], sizes.output))
                return output, stack.enter_context(site.folder.begin(self.ids[1], sizes.errors))

            output, errors = self._files = await to_its_end(begin)
            self.lost = output.tell() < sizes.output or errors.tell() < sizes.errors
            site.kept[self._tenant] = await site.storage.run(tables.kept, tenant=self._tenant)
            stack.pop_all()

    async def keep(self, result: Result) -> bool:
        """Keep a result. Return whether its answer is a good one. Raises OSError and StorageError."""
        if self._failure is not None:
            raise self._failure
        waiting = result, asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._keep_all())
        try:
            return await asyncio.shield(waiting[1])
        except asyncio.CancelledError:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            else:  # it is being written
                await asyncio.gather(waiting[1], return_exceptions=True)
            raise

    async def unanswered(self, lines: list[tuple[str, str]], error: results.LineError) -> None:
        """Append lines, by id and custom_id, that have no answer: they count once the batch is over."""
        text = b"".join([results.unanswered_line(id, custom_id, error) for id, custom_id in lines])
        await to_its_end(self._both[1].write, text)
        self._site.kept[self._tenant] = self._site.kept.get(self._tenant, 0) + len(text)

    async def whole(self) -> tuple[int, int]:
        """Finish both files under their names, and return their sizes in bytes."""
        output, errors = self._both
        folder, ids = self._site.folder, self.ids
        return await to_its_end(lambda: (folder.keep(ids[0], output), folder.keep(ids[1], errors)))

    async def aclose(self) -> None:
        """Wait for the write under way, then close the files, so that another process may write them."""
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
        for file in self._files or ():
            with contextlib.suppress(OSError):  # what is still to be written has no place on a full disk
                file.close()

    @property
    def _both(self) -> tuple[BinaryIO, BinaryIO]:
        assert self._files is not None  # noqa: S101 # they are open
        return self._files

    # -- groups ---------------------------------------------------------------------------------------------------

    async def _keep_all(self) -> None:
        site = self._site
        while self._waiting:
            await asyncio.sleep(GATHER)
            group, self._waiting = self._waiting, []
            try:
                if self._failure is not None:
                    raise self._failure
                good, bad, sizes = await in_thread(self._append, [result for result, _ in group])
                kept = await site.storage.run(tables.keep_results, row=self._row, good=good, bad=bad, sizes=sizes)
                site.kept[self._tenant] = kept
            except Exception as error:  # of the disk, or a bug: whoever waits is told
                self._failure = error  # what stands in the files now does not count
                for _, told in group:
                    told.set_exception(error)
            else:
                for result, told in group:
                    told.set_result(result.number in good)
        self._task = None

    # -- in a thread

    def _append(self, group: list[Result]) -> tuple[set[int], set[int], Sizes]:
        output, errors = self._both
        good, bad = set[int](), set[int]()
        for result in group:
            error = _error_of(result.answer)
            is_good = error is None and result.answer.status < 400
            file = output if is_good else errors
            (good if is_good else bad).add(result.number)
            if error is not None:
                file.write(results.unanswered_line(result.id, result.custom_id, error))
                continue
            before, behind = results.around(result.id, result.custom_id, result.answer.status, result.id)
            file.write(before)
            file.writelines(map(results.on_one_line, _pieces(result.answer)))
            file.write(behind)
        for file, some in ((output, good), (errors, bad)):
            if some:
                file.flush()
                os.fdatasync(file.fileno())
        return good, bad, Sizes(output.tell(), errors.tell())


def _pieces(answer: LineAnswer) -> Iterator[bytes]:
    if answer.spilled is None:
        yield answer.body
        return
    answer.spilled.seek(0)
    while piece := answer.spilled.read(PIECE):
        yield piece


def _error_of(answer: LineAnswer) -> results.LineError | None:
    """The reason why an answer cannot stand in a line."""
    if answer is TOO_LONG:
        return results.too_long()
    utf_8 = codecs.getincrementaldecoder("utf-8")()
    try:
        for piece in _pieces(answer):
            utf_8.decode(piece)
        utf_8.decode(b"", final=True)
    except UnicodeDecodeError:
        return results.no_json(answer.status)
    return None if _is_json(answer) else results.no_json(answer.status)


def _is_json(answer: LineAnswer) -> bool:
    """Judged in place: a large one is never copied into memory."""
    if answer.spilled is None:
        return results.is_json(answer.body)
    answer.spilled.flush()
    with mmap.mmap(answer.spilled.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as view:
        return results.is_json(view)
