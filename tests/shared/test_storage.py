"""Storage: transactions that outlast the process, and files that cannot be used."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import resource
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import ParamSpec

import pytest

from gateway.shared import storage as module
from gateway.shared.storage import Storage, StorageError

ONE = ("CREATE TABLE marks (name TEXT PRIMARY KEY, number INTEGER NOT NULL) STRICT",)
TWO = ("ALTER TABLE marks ADD COLUMN colour TEXT NOT NULL DEFAULT 'red'",)


P = ParamSpec("P")


def in_loop(test: Callable[P, Coroutine[None, None, None]]) -> Callable[P, None]:
    """A test that runs in an event loop of its own."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


@contextlib.asynccontextmanager
async def opened(folder: Path, *schema: tuple[str, ...]) -> AsyncIterator[Storage]:
    storage = Storage(folder, schema or (ONE,))
    try:
        await storage.open()
        yield storage
    finally:
        await storage.aclose()


def put(database: sqlite3.Connection, name: str, number: int) -> None:
    database.execute("INSERT INTO marks (name, number) VALUES (?, ?)", (name, number))


def marks(database: sqlite3.Connection) -> list[tuple[str, int]]:
    return database.execute("SELECT name, number FROM marks ORDER BY name").fetchall()


@in_loop
async def test_what_is_put_in_is_there_after_it_was_closed_and_is_the_users_own(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    async with opened(folder) as storage:
        await storage.run(lambda database: put(database, "a", 1))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(storage.file.stat().st_mode) == 0o600
    async with opened(folder) as storage:
        assert await storage.run(marks) == [("a", 1)]


@in_loop
async def test_all_calls_are_made_in_one_thread_that_is_not_the_loops_and_ends(tmp_path: Path) -> None:
    async with opened(tmp_path) as storage:
        threads = {await storage.run(lambda _: threading.current_thread()) for _ in range(3)}
    assert len(threads) == 1
    assert threads.isdisjoint({threading.main_thread()})
    thread = threads.pop()
    thread.join(10)
    assert not thread.is_alive()


@in_loop
async def test_work_that_raises_changes_nothing_and_the_next_is_done(tmp_path: Path) -> None:
    def half(database: sqlite3.Connection) -> None:
        put(database, "a", 1)
        raise KeyError("a")

    async with opened(tmp_path) as storage:
        with pytest.raises(KeyError):
            await storage.run(half)
        await storage.run(lambda database: put(database, "b", 2))
        with pytest.raises(sqlite3.IntegrityError):
            await storage.run(lambda database: put(database, "b", 3))
        with pytest.raises(StorageError, match="no such table"):
            await storage.run(lambda database: database.execute("SELECT * FROM absent"))
        assert await storage.run(marks) == [("b", 2)]


@in_loop
async def test_a_caller_that_is_cancelled_leaves_the_work_to_its_end(tmp_path: Path) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(database: sqlite3.Connection) -> None:
        begun.set()
        assert go_on.wait(60)
        put(database, "a", 1)

    async with opened(tmp_path) as storage:
        task = asyncio.ensure_future(storage.run(slow))
        await asyncio.to_thread(begun.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()
        assert await storage.run(marks) == [("a", 1)]


@in_loop
async def test_an_older_file_is_brought_to_the_newest_version(tmp_path: Path) -> None:
    async with opened(tmp_path, ONE) as storage:
        await storage.run(lambda database: put(database, "a", 1))
    async with opened(tmp_path, ONE, TWO) as storage:
        assert await storage.run(lambda database: database.execute("SELECT colour FROM marks").fetchall()) == [("red",)]
    async with opened(tmp_path, ONE, TWO) as storage:
        assert await storage.run(marks) == [("a", 1)]


@in_loop
async def test_a_step_that_fails_leaves_the_file_at_its_version(tmp_path: Path) -> None:
    async with opened(tmp_path, ONE) as storage:
        await storage.run(lambda database: put(database, "a", 1))
    with pytest.raises(StorageError, match="duplicate column"):
        async with opened(tmp_path, ONE, (*TWO, *TWO)):
            pass
    async with opened(tmp_path, ONE, TWO) as storage:
        assert await storage.run(marks) == [("a", 1)]


@in_loop
async def test_a_newer_gateways_file_is_left_alone_and_let_go_of(tmp_path: Path) -> None:
    async with opened(tmp_path, ONE, TWO):
        pass
    storage = Storage(tmp_path, (ONE,))
    for attempt in (storage.check, storage.open):
        with pytest.raises(StorageError, match=r"a newer gateway has written it \(version 2, and this one knows 1\)"):
            await attempt()
    async with opened(tmp_path, ONE, TWO):
        await storage.aclose()


@pytest.mark.parametrize(
    ("mark", "words"), [("PRAGMA application_id = 7", "another program's"), ("CREATE TABLE x (y)", "another program's")]
)
@in_loop
async def test_another_programs_database_is_left_alone(tmp_path: Path, mark: str, words: str) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / module.NAME)) as database:
        database.execute(mark)
        database.commit()
    before = (tmp_path / module.NAME).read_bytes()
    with pytest.raises(StorageError, match=words):
        async with opened(tmp_path):
            pass
    assert (tmp_path / module.NAME).read_bytes() == before


@pytest.mark.parametrize("data", [b"no database at all" * 100, b"SQLite format 3\x00" + b"\xff" * 500])
@in_loop
async def test_what_is_no_database_is_told(tmp_path: Path, data: bytes) -> None:
    (tmp_path / module.NAME).write_bytes(data)
    with pytest.raises(StorageError, match="no SQLite file"):
        async with opened(tmp_path):
            pass


@in_loop
async def test_processes_of_one_gateway_use_a_file_together_and_notice_each_others_changes(tmp_path: Path) -> None:
    beside = Storage(tmp_path, (ONE,))
    with pytest.raises(StorageError, match=r"weir\.db: it cannot be opened"):
        await beside.open_beside()
    assert not beside.file.exists()
    async with opened(tmp_path) as storage:
        await beside.open_beside()
        seen = await beside.changes(), await storage.changes()
        await beside.run(lambda database: put(database, "a", 1))
        await beside.done()
        assert await beside.changes() == seen[0], "its own"
        assert await storage.changes() != seen[1]
        assert await storage.run(marks) == [("a", 1)]
        newer = Storage(tmp_path, (ONE, TWO))
        with pytest.raises(StorageError, match="an older gateway has it"):
            await newer.open_beside()
        with pytest.raises(StorageError, match="is not open"):
            await newer.changes()
        await newer.aclose()
    assert await beside.run(marks) == [("a", 1)]
    await beside.aclose()
    async with opened(tmp_path):  # the one beside never had the folder's lock
        pass


@in_loop
async def test_one_gateway_uses_a_folder_and_another_may_have_it_afterwards(tmp_path: Path) -> None:
    first, second = Storage(tmp_path, (ONE,)), Storage(tmp_path, (ONE,))
    await first.open()
    await second.check()
    with pytest.raises(StorageError, match="another gateway uses this storage"):
        await second.open()
    waits = asyncio.ensure_future(second.open(30))
    await first.aclose()
    await waits
    await second.aclose()


@in_loop
async def test_one_that_shares_it_ends_what_it_has_begun_beside_the_other(tmp_path: Path) -> None:
    first, second = Storage(tmp_path, (ONE,)), Storage(tmp_path, (ONE,))
    await first.open()
    await first.share()
    await second.open()
    for each in (first, second):
        await each.run(lambda database: database.execute("CREATE TABLE IF NOT EXISTS both (x)"))
        await each.run(lambda database: database.execute("INSERT INTO both VALUES (1)"))
        await each.aclose()
    with sqlite3.connect(tmp_path / module.NAME) as database:
        assert database.execute("SELECT count(*) FROM both").fetchone() == (2,)
    database.close()


@in_loop
async def test_a_folder_that_cannot_be_made_or_is_a_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder, words in (
        (tmp_path / "absent" / "deep", "the folder above it is not there: make that"),
        (tmp_path / "file", "File exists"),
    ):
        with pytest.raises(StorageError, match=words):
            async with opened(folder):
                pass


@in_loop
async def test_a_file_that_is_a_link_to_elsewhere_is_not_followed(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "kept", tmp_path / "theirs.db"
    folder.mkdir()
    (folder / "weir.db").symlink_to(elsewhere)
    storage = Storage(folder, (ONE,))
    with pytest.raises(StorageError, match="link to elsewhere"):
        await storage.open()
    await storage.aclose()
    assert not elsewhere.exists()


@in_loop
async def test_what_waits_for_a_file_that_is_kept_locked_waits_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BUSY_WITHIN", 0.3)
    async with opened(tmp_path) as storage:
        with contextlib.closing(sqlite3.connect(tmp_path / module.NAME, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            first, second = [asyncio.ensure_future(storage.run(lambda db: put(db, "a", 1))) for _ in range(2)]
            with pytest.raises(StorageError, match="another program has kept it locked"):
                await first
            other.execute("ROLLBACK")
            with pytest.raises(StorageError, match="another program has kept it locked"):
                await second
        await storage.run(lambda database: put(database, "b", 2))
        assert await storage.run(marks) == [("b", 2)]


@in_loop
async def test_a_full_disk_is_told_and_nothing_is_half_done(tmp_path: Path) -> None:
    def much(database: sqlite3.Connection) -> None:
        for number in range(1000):
            put(database, f"b{number}" * 50, number)

    async with opened(tmp_path) as storage:
        await storage.run(lambda database: put(database, "a", 1))
        # SQLite's own bound on the file's size: its error is that of a full disk.
        pages = await storage.run(lambda database: database.execute("PRAGMA page_count").fetchone()[0])
        await storage.run(lambda database: database.execute(f"PRAGMA max_page_count = {pages}").fetchone())
        with pytest.raises(StorageError, match="the disk is full: free space there"):
            await storage.run(much)
        assert await storage.run(marks) == [("a", 1)]
        await storage.run(lambda database: database.execute("PRAGMA max_page_count = 1000").fetchone())
        await storage.run(lambda database: put(database, "c", 3))


@in_loop
async def test_a_quota_of_this_users_is_told_as_a_full_disk(tmp_path: Path) -> None:
    """By a limit on the size of files, which fails a write as a quota does: SQLite takes both for a broken disk."""
    before, old = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    async with opened(tmp_path) as storage:

        async def fill() -> None:
            for number in range(1000):
                await storage.run(functools.partial(put, name=f"{number:0100000}", number=1))

        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1024 * 1024, before[1]))
            with pytest.raises(StorageError, match="the disk takes no more") as failed:
                await fill()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, old)
        assert failed.value.full
        kept = len(await storage.run(marks))
        await storage.run(lambda database: put(database, "room again", 2))
        assert len(await storage.run(marks)) == kept + 1


@in_loop
async def test_it_is_closed_once_and_says_so(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    with pytest.raises(StorageError, match="is not open"):
        await storage.run(marks)
    await asyncio.gather(storage.aclose(), storage.aclose())
    await storage.aclose()
    with pytest.raises(StorageError, match="is closed"):
        await storage.run(marks)
    never = Storage(tmp_path)
    await never.aclose()
    with pytest.raises(StorageError, match="is closed"):
        await never.open()


@in_loop
async def test_what_was_asked_for_before_the_end_is_done(tmp_path: Path) -> None:
    async with opened(tmp_path) as storage:
        asked = [asyncio.ensure_future(storage.run(functools.partial(put, name=str(n), number=n))) for n in range(20)]
        await asyncio.sleep(0)
    await asyncio.gather(*asked)
    async with opened(tmp_path) as storage:
        assert len(await storage.run(marks)) == 20


CHILD = """
import asyncio, sys
from pathlib import Path
from gateway.shared.storage import Storage
async def main():
    storage = Storage(Path(sys.argv[1]), (("CREATE TABLE marks (name TEXT PRIMARY KEY, number INTEGER) STRICT",),))
    await storage.open()
    for number in range(10**9):
        await storage.run(lambda database: database.execute("INSERT INTO marks VALUES (?, ?)", (str(number), number)))
        print(number, flush=True)
asyncio.run(main())
"""


@pytest.mark.slow
def test_what_was_committed_is_there_after_sigkill_and_the_folder_is_free(tmp_path: Path) -> None:
    told = -1
    with subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        while told < 50:
            told = int(child.stdout.readline())
        child.send_signal(signal.SIGKILL)

    async def numbers() -> list[int]:
        async with opened(tmp_path) as storage:
            return sorted(number for _, number in await storage.run(marks))

    found = asyncio.run(numbers())
    assert found == list(range(len(found)))
    assert len(found) > told
