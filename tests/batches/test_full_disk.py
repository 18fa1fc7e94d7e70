"""A full disk: requests are told to come later, and what they had begun leaves nothing; batches go on by themselves."""

from __future__ import annotations

import asyncio
import errno
import os
import sqlite3
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gateway.batches import tables
from gateway.batches.batch_run import BatchRun
from gateway.batches.door import BatchDoor
from gateway.batches.file_folder import FileFolder
from gateway.batches.line_call import LineAnswer
from gateway.batches.results_files import Result, ResultsFiles
from gateway.batches.worker import BatchWorker
from gateway.core.batches.lines import BatchLine
from gateway.core.batches.objects import BatchObject, FileObject
from gateway.core.policy.policy import Policy
from gateway.core.request.outcome import Outcome, Refused
from gateway.core.request.tenants import ANONYMOUS, Tenants
from gateway.relay.wire.messages import Request
from gateway.shared.storage import Storage, StorageError
from tests.batches.test_batch_run import site_of

FORM = (
    b'--B\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--B\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\nline\r\n--B--\r\n'
)


def full(*_: Any, number: int = errno.ENOSPC) -> Any:
    raise OSError(number, os.strerror(number))


def upload() -> Request:
    fields = {b"content-type": b"multipart/form-data; boundary=B"}
    return Request(b"POST", b"/v1/files", b"", fields, 0, len(FORM), False)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_an_upload_and_a_batch_are_told_to_come_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    said: list[str] = []

    async def main() -> None:
        storage = Storage(tmp_path)
        await storage.open()
        site = site_of(storage, said.append)
        site.folder.make()
        door = BatchDoor(site)
        account = Tenants(Policy()).accounts[ANONYMOUS]
        monkeypatch.setattr(FileFolder, "keep", partial(full, number=number))
        request = upload()
        door.head(request, account)
        request.body = FORM
        with pytest.raises(Refused) as refused:
            await door.answer(request, None, account)  # type: ignore[arg-type] # it is not answered
        assert (refused.value.outcome, refused.value.status, refused.value.retry_after) == (
            Outcome.STORAGE_FULL, 507, 60.0,
        )  # fmt: skip
        assert list(site.folder.path.iterdir()) == []
        assert not door._uploads
        monkeypatch.undo()

        async def never(*_: Any, **__: Any) -> Any:
            raise StorageError("weir.db: the disk is full", full=True)

        monkeypatch.setattr(storage, "run", never)
        listing = Request(b"GET", b"/v1/batches", b"", {}, 0, 0, False)
        with pytest.raises(Refused) as refused:
            await door.answer(listing, None, account)  # type: ignore[arg-type] # it is not answered
        assert refused.value.status == 507
        monkeypatch.undo()
        await storage.aclose()

    asyncio.run(main())
    assert len(said) == 2


def test_files_can_be_deleted_and_old_ones_go_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The database takes no change while a file is there that takes the last of the disk."""

    async def main() -> None:
        storage = Storage(tmp_path)
        await storage.open()
        site = site_of(storage)
        site.folder.make()
        worker = BatchWorker(site)
        door = BatchDoor(site)
        for name in ("delete_file", "forget_old"):
            change = getattr(tables, name)

            def changed(database: sqlite3.Connection, change: Any = change, **how: Any) -> Any:
                if list(site.folder.path.glob("file-*")):
                    raise StorageError("weir.db: the disk is full", full=True)
                return change(database, **how)

            monkeypatch.setattr(tables, name, changed)

        def add(database: sqlite3.Connection, id: str = "file-1", expires_at: int = 2**40) -> None:
            (site.folder.path / id).write_bytes(b"{}")
            file = FileObject(id=id, bytes=2, created_at=1, expires_at=expires_at, filename="a", purpose="batch")
            tables.add_upload(database, ANONYMOUS, file, most=10**9)

        await storage.run(add)
        assert b'"deleted":true' in await door._delete("file-1", ANONYMOUS)
        assert await storage.run(tables.file_names) == set()
        await storage.run(partial(add, id="file-2", expires_at=2))
        await worker._clear()
        assert await storage.run(tables.file_names) == set()
        assert list(site.folder.path.iterdir()) == []
        await storage.aclose()

    asyncio.run(main())


def begun(database: sqlite3.Connection) -> None:
    batch = BatchObject(id="batch_1", endpoint="/v1/completions", input_file_id="file-1", status="validating",
                        created_at=1, expires_at=2)  # fmt: skip
    assert tables.add_batch(database, "acme", batch, keep_until=3, most=1, most_bytes=10_000)
    tables.add_lines(database, 1, [BatchLine(1, "a", 0, 1), BatchLine(2, "b", 1, 1)])
    tables.begin_work(database, 1, now=1)


def test_results_that_the_disk_does_not_take_do_not_count_and_are_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a group has written is cut off where its transaction failed."""

    async def main() -> None:
        storage = Storage(tmp_path)
        await storage.open()
        site = site_of(storage)
        site.folder.make()
        await storage.run(begun)
        (stored,) = await storage.run(tables.unfinished)
        good = LineAnswer(200, b'{"a":\n1}')
        keep = tables.keep_results
        results = ResultsFiles(site, stored)
        await results.open()
        assert await results.keep(Result(1, "r1", "a", good))

        def refuse(*_: Any, **__: Any) -> int:
            raise StorageError("full", full=True)

        monkeypatch.setattr(tables, "keep_results", refuse)
        for _ in range(2):
            with pytest.raises(StorageError):
                await results.keep(Result(2, "r2", "b", good))
        await results.aclose()
        monkeypatch.setattr(tables, "keep_results", keep)
        part = site.folder.path / "file-1-output.part"
        assert part.read_bytes().count(b"\n") == 2
        results = ResultsFiles(site, stored)
        await results.open()
        assert part.read_bytes().count(b"\n") == 1
        assert not await results.keep(Result(2, "r2", "b", LineAnswer(200, b"<html>")))
        await results.aclose()
        await storage.run(lambda database: tables.step(database, 1, "finalizing", 1))
        await BatchRun(site, stored).run()
        assert await storage.run(lambda database: tables.status_of(database, 1)) == "completed"
        assert b'"custom_id":"a"' in (site.folder.path / "file-1-output").read_bytes()
        assert b"upstream_error" in (site.folder.path / "file-1-error").read_bytes()
        await storage.aclose()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("status", "kept", "end"),
    [("in_progress", {1}, "failed"), ("finalizing", {1, 2}, "failed"), ("cancelling", {1, 2}, "cancelled")],
)
def test_a_batch_whose_results_are_gone_from_the_disk_says_so_also_where_it_is_about_to_end(
    tmp_path: Path, status: str, kept: set[int], end: str
) -> None:
    async def main() -> None:
        storage = Storage(tmp_path)
        await storage.open()
        site = site_of(storage)
        site.folder.make()
        await storage.run(begun)
        await storage.run(lambda database: tables.keep_results(database, 1, kept, (), tables.Sizes(100, 0)))
        if status != "in_progress":
            assert await storage.run(lambda database: tables.step(database, 1, status, 1))
        (stored,) = await storage.run(tables.unfinished)
        assert stored.batch.status == status
        await BatchRun(site, stored).run()
        batch = await storage.run(lambda database: tables.batch_of(database, "acme", "batch_1"))
        assert batch is not None
        assert batch.errors is not None, f"it is {batch.status}, of lines that have results, and has no file"
        assert (batch.status, [fault.code for fault in batch.errors.data]) == (end, ["results_missing"])
        assert list(site.folder.path.iterdir()) == []
        await storage.aclose()

    asyncio.run(main())
