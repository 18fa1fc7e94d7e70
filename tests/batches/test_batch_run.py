"""Run of a batch: a model without an engine takes no other's places; a disk that fails is waited for.

At its end its files are nobody's to clear before the storage knows them.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.batches import tables, worker
from gateway.batches.batch_run import BatchRun
from gateway.batches.site import AHEAD, BatchSite
from gateway.batches.tables import Sizes
from gateway.core.batches.lines import BatchLine
from gateway.core.batches.objects import BatchObject, FileObject
from gateway.core.policy.batches import BatchesPolicy
from gateway.core.policy.policy import Policy
from gateway.core.request.body_memory import BodyMemory
from gateway.core.request.tenants import ANONYMOUS, Tenants
from gateway.relay.pipeline import Pipeline
from gateway.relay.wire.responder import Responder
from gateway.shared.storage import Storage


def finalizing(database: sqlite3.Connection) -> None:
    """A batch of two lines, which has the results of `written`."""
    batch = BatchObject(
        id="batch_1", endpoint="/v1/completions", input_file_id="file-1", status="validating", created_at=1,
        expires_at=2,
    )  # fmt: skip
    assert tables.add_batch(database, "acme", batch, keep_until=3, most=1, most_bytes=10_000)
    tables.add_lines(database, 1, [BatchLine(1, "a", 0, 1), BatchLine(2, "b", 1, 1)])
    tables.begin_work(database, 1, now=1)
    tables.keep_results(database, 1, {1}, {2}, Sizes(2, 2))
    assert tables.step(database, 1, "finalizing", now=1)


def written(folder: Path) -> None:
    """The files of its results, with more that no transaction knows."""
    (folder / "file-1-output.part").write_bytes(b"1\n{")
    (folder / "file-1-error").write_bytes(b"2\n")  # whole already, when its gateway was killed


def site_of(storage: Storage, say: Callable[[str], None] = print) -> BatchSite:
    """Of batches whose lines have their results: no call is sent."""
    return BatchSite(BatchesPolicy(), storage, cast(Pipeline, None), BodyMemory(1, 1.0), say)


def test_files_that_are_whole_and_have_no_row_yet_are_not_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = tables.finish

    async def main() -> None:
        storage = Storage(tmp_path)
        await storage.open()
        site = site_of(storage)
        site.folder.make()

        def cleared_first(database: sqlite3.Connection, **fields: Any) -> None:
            site.folder.clear(site.folder.loose(tables.file_names(database)))
            finish(database, **fields)

        monkeypatch.setattr(tables, "finish", cleared_first)  # as the worker may, each 30 seconds
        await storage.run(finalizing)
        written(site.folder.path)
        (stored,) = await storage.run(tables.unfinished)
        await BatchRun(site, stored).run()
        assert await storage.run(lambda database: tables.status_of(database, 1)) == "completed"
        assert (site.folder.path / "file-1-output").read_bytes() == b"1\n"
        assert (site.folder.path / "file-1-error").read_bytes() == b"2\n"
        assert site.folder.loose(await storage.run(tables.file_names)) == []
        await storage.aclose()

    asyncio.run(main())


def test_a_batch_whose_disk_has_failed_waits_whatever_other_processes_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "NOTICE", 0.01)
    said: list[str] = []

    async def main() -> None:
        storage, other = Storage(tmp_path), Storage(tmp_path)
        await storage.open()
        await other.open_beside()
        await storage.run(finalizing)
        site = site_of(storage, said.append)
        (site.folder.path / "file-1-output.part").mkdir(parents=True)  # in place of the file
        works = worker.BatchWorker(site)
        await works.start()
        async with asyncio.timeout(60):
            for tokens in range(5):
                seen = works.states
                await other.run(lambda database, tokens=tokens: database.execute(
                    "INSERT INTO token_use VALUES ('acme', 'day', ?, 1)", (tokens,)))  # fmt: skip
                while works.states is seen:
                    await asyncio.sleep(0.01)
        await works.aclose()
        assert works.states == {}
        for each in (other, storage):
            await each.aclose()

    asyncio.run(main())
    assert len(said) == 1, said
    assert said[0].endswith("file-1-output.part: Is a directory: tried again in 30 s")


class Models:
    """In place of the pipeline. `sim` has an engine; what asks for `gone` waits, and is refused, until it is back."""

    def __init__(self, back_after: int) -> None:
        policy = Policy()
        self.current = SimpleNamespace(policy=policy, snapshot=SimpleNamespace(tenants=Tenants(policy)))
        self.decider = SimpleNamespace(up=True)
        self.answered: Counter[str] = Counter()
        self.at_once: list[int] = []  # lines without an answer, at each that comes
        self.waiting: list[int] = []  # lines for `gone` that wait, at each that comes once one has been refused
        self._back_after = back_after  # lines for `sim`
        self._wait = self._refused = 0

    def begin(self, request: Any, responder: Responder, *_: Any) -> None:
        model, loop = json.loads(request.body)["model"], asyncio.get_running_loop()
        self.at_once.append(len(self.at_once) + 1 - self.answered.total())
        if model == "sim" or self.answered["sim"] >= self._back_after:
            loop.call_later(0.001, self._answer, model, responder)
            return
        self._wait += 1
        if self._refused:
            self.waiting.append(self._wait)
        loop.call_later(0.1, self._refuse, responder)

    def _answer(self, model: str, responder: Responder) -> None:
        self.answered[model] += 1
        responder.send(200, b"content-type: application/json\r\n", b"{}")

    def _refuse(self, responder: Responder) -> None:
        self._wait -= 1
        self._refused += 1
        responder.send(503, b"x-weir-reason: no_engine\r\nretry-after: 0\r\n", b"{}")


def added(database: sqlite3.Connection, id: str, now: int) -> None:
    """A batch of the lines that stand in the file `file-1`."""
    batch = BatchObject(
        id=id, endpoint="/v1/completions", input_file_id="file-1", status="validating", created_at=now,
        expires_at=now + 3600,
    )  # fmt: skip
    assert tables.add_batch(database, ANONYMOUS, batch, keep_until=2**40, most=10, most_bytes=2**30)


def asked(folder: Path, models: list[str]) -> Path:
    """The file `file-1`, with a line for each of these models."""
    file = folder / "file-1"
    lines = [
        {"custom_id": f"{number}", "method": "POST", "url": "/v1/completions", "body": {"model": model, "prompt": "x"}}
        for number, model in enumerate(models)
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


def answered(folder: Path, models: Models, lines: list[str], runs: int = 1) -> None:
    """Run a batch of lines for these models to its end, with eight seats, as one of so many that are worked on."""

    async def main() -> None:
        storage = Storage(folder)
        await storage.open()
        site = BatchSite(BatchesPolicy(in_flight=8), storage, cast(Any, models), BodyMemory(2**30, 1.0), print)
        site.folder.make()
        site.runs = runs
        asked(site.folder.path, lines)
        await storage.run(added, "batch_1", site.now())
        (stored,) = await storage.run(tables.unfinished)
        async with asyncio.timeout(60):
            await BatchRun(site, stored).run()
        assert await storage.run(lambda database: tables.status_of(database, 1)) == "completed"
        await storage.aclose()

    asyncio.run(main())
    assert models.answered == Counter(lines)


def test_lines_that_find_out_whether_an_engine_is_back_leave_the_places_to_others(tmp_path: Path) -> None:
    models = Models(back_after=200)
    answered(tmp_path, models, ["gone"] * 20 + ["sim"] * 300)
    assert set(models.waiting) == {1}, "of 8 places"


@pytest.mark.parametrize(("runs", "most"), [(1, 8), (AHEAD // 2, 2), (2 * AHEAD, 1)])
def test_batches_of_thousands_of_tenants_read_few_lines_ahead(tmp_path: Path, runs: int, most: int) -> None:
    models = Models(back_after=0)
    answered(tmp_path, models, ["sim"] * 20, runs)
    assert max(models.at_once) == most


class Hanging(Models):
    """In place of the pipeline: no call is answered."""

    def begin(self, request: Any, responder: Responder, *_: Any) -> None:
        self._wait += 1


def test_a_batch_that_waits_for_its_tenants_others_is_cancelled_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        storage = Storage(tmp_path)
        await storage.open()
        hanging = cast(Any, Hanging(0))
        site = BatchSite(BatchesPolicy(), storage, hanging, BodyMemory(2**30, 1.0), print)
        site.folder.make()
        size = asked(site.folder.path, ["sim"]).stat().st_size
        file = FileObject(id="file-1", bytes=size, created_at=1, expires_at=2**40, filename="a", purpose="batch")
        await storage.run(tables.add_file, ANONYMOUS, file)
        for number in range(worker.OF_A_TENANT + 1):
            await storage.run(added, f"batch_{number}", site.now())
        works = worker.BatchWorker(site)
        await works.start()
        async with asyncio.timeout(10):
            while hanging._wait < worker.OF_A_TENANT:
                await asyncio.sleep(0.01)
            last = f"batch_{worker.OF_A_TENANT}"
            row = await storage.run(tables.cancel, ANONYMOUS, last, site.now())
            assert row is not None
            works.cancelled(row)
            while await storage.run(tables.status_of, row=row) != "cancelled":
                await asyncio.sleep(0.01)
        await works.aclose()
        await storage.aclose()

    asyncio.run(main())


def test_lines_whose_file_has_vanished_are_told_so(tmp_path: Path) -> None:
    async def main() -> None:
        storage = Storage(tmp_path)
        await storage.open()
        models = Models(back_after=0)
        site = BatchSite(BatchesPolicy(), storage, cast(Any, models), BodyMemory(2**30, 1.0), print)
        site.folder.make()
        file = asked(site.folder.path, ["sim"])
        await storage.run(added, "batch_1", site.now())
        (stored,) = await storage.run(tables.unfinished)
        await BatchRun(site, stored)._judge()
        file.unlink()
        async with asyncio.timeout(10):
            await BatchRun(site, stored).run()
        batch = await storage.run(tables.batch_of, ANONYMOUS, "batch_1")
        assert batch is not None
        assert (batch.status, batch.request_counts.failed) == ("completed", 1)
        assert b"line_changed" in (site.folder.path / "file-1-error").read_bytes()
        await storage.aclose()

    asyncio.run(main())


def test_a_row_that_cannot_be_read_is_told_and_batches_go_on_once_it_is_mended(tmp_path: Path) -> None:
    told: list[str] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, what: told.append(what["message"]))
        storage = Storage(tmp_path)
        await storage.open()
        site = site_of(storage)
        site.folder.make()
        await storage.run(finalizing)
        written(site.folder.path)
        await storage.run(lambda database: database.execute("UPDATE batches SET times = '{'"))
        works = worker.BatchWorker(site)
        await works.start()
        async with asyncio.timeout(10):
            while not told:
                await asyncio.sleep(0.01)
            await storage.run(lambda database: database.execute("UPDATE batches SET times = '{}'"))
            while await storage.run(tables.status_of, row=1) != "completed":
                await asyncio.sleep(0.01)
        await works.aclose()
        await storage.aclose()

    asyncio.run(main())
    assert told[0] == "the work on batches failed, and begins anew"
