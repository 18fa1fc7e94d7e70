"""Storage: one SQLite file for what a gateway keeps longer than it runs, used by one gateway, in one thread of each of
its processes.

    storage = Storage(folder)
    await storage.open()                          # raises StorageError
    rows = await storage.run(lambda database: database.execute("SELECT ...").fetchall())
    await storage.aclose()                        # what was asked for before is done first

- `run` is one transaction: committed when the work returns, rolled back when it raises. A commit survives the end of
  the process, SIGKILL too. A power cut may undo the last ones, never half of one (WAL with synchronous=NORMAL).
- The event loop never waits for a disk: each call runs in a daemon thread of the storage's own, one after another.
- The folder is locked (flock), so that two gateways never count or work the same things. Of several processes the
  decider locks it, and relays open the file beside it. A gateway that is taken over shares it with its successor, for
  requests that it has begun. The file itself is open to readers, such as a backup by `sqlite3 weir.db .backup`.
- The folder `schema` has a script for each of the schema's versions. A new version is one more; none ever changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from gateway.shared.folder_lock import FolderLock
from gateway.shared.tasks import done_within

T = TypeVar("T")
P = ParamSpec("P")

NAME = "weir.db"
APPLICATION = 0x57454952  # "WEIR": the mark of such a file


def _statements(file: Path) -> Iterator[str]:
    """Yield the statements of a script."""
    statement = ""
    for line in file.read_text(encoding="utf-8").splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


_SCRIPTS = sorted(Path(__file__).with_name("schema").glob("*.sql"), key=lambda file: int(file.stem))
# Each entry makes a version of the schema from the one before it, in statements.
SCHEMA = tuple(map(tuple[str, ...], map(_statements, _SCRIPTS)))
BUSY_WITHIN = 5.0  # seconds for a reader of the file, such as a backup, to let a commit through
LOOK = 0.05  # seconds between two tries for the folder's lock
CLOSED_WITHIN = 10.0  # seconds for the calls before the end; a disk that hangs does not hold up the process
# What SQLite calls a failed write where a quota or a limit of this user's is used up (ENOSPC alone is SQLITE_FULL).
_UNWRITTEN = frozenset({sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE})
_WORDS = {
    **dict.fromkeys(_UNWRITTEN, "the disk takes no more: a quota or LimitFSIZE is used up, or it fails: free space"),
    sqlite3.SQLITE_FULL: "the disk is full: free space there",
    sqlite3.SQLITE_READONLY: "it cannot be written: its owner and mode must let this user write",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened: its owner and mode must let this user write",
    sqlite3.SQLITE_NOTADB: "it is no SQLite file: another program's; name another folder",
    sqlite3.SQLITE_CORRUPT: "it is damaged: restore it from a backup, or move it away and start anew",
    sqlite3.SQLITE_IOERR: "the disk fails: see the system's log",
    sqlite3.SQLITE_BUSY: f"another program has kept it locked for {BUSY_WITHIN:g} s",
}


class StorageError(Exception):
    """The file cannot be used, now or at all; the message says why and what to do. `full`: its disk is."""

    def __init__(self, message: str, *, full: bool = False) -> None:
        super().__init__(message)
        self.full = full


class Storage:
    """The file in `folder`. `schema`: in place of SCHEMA."""

    def __init__(self, folder: Path, schema: tuple[tuple[str, ...], ...] = SCHEMA) -> None:
        self.folder = folder
        self.file = folder / NAME
        self._schema = schema
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ends = False
        self._locked = -math.inf  # when another program had kept the file locked for too long
        self._closed: Future[None] = Future()
        self._lock = FolderLock(folder)
        self._database: sqlite3.Connection | None = None

    async def check(self) -> None:
        """Check that the file can be opened, apart from another gateway's lock. Raises StorageError."""
        await self._ask(self._check)

    async def open(self, within: float = 0.0) -> None:
        """Lock the folder and open the file, made or brought to this version of the schema if need be. `within`:
        seconds in which another gateway may let go of it. Raises StorageError."""
        await self._ask(lambda: self._open(within))

    async def open_beside(self) -> None:
        """Open the file beside a process of the same gateway, which has the lock and this schema. Raises
        StorageError."""
        await self._ask(self._open_beside)

    async def run(self, work: Callable[Concatenate[sqlite3.Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run the work in one transaction and return its result. If the caller is cancelled, the work still runs to its
        end. Raises StorageError, and what the work raises; then nothing has changed."""
        asked = time.monotonic()

        def waited() -> T:
            if asked <= self._locked:  # with one that waited as long as any may: all together wait no longer
                raise StorageError(f"{self.file}: {_WORDS[sqlite3.SQLITE_BUSY]}")
            return self._transaction(lambda database: work(database, *args, **kwargs))

        return await self._ask(waited)

    async def changes(self) -> int:
        """A number that differs from the one before if another process has committed meanwhile. Raises StorageError."""
        return await self._ask(self._changes)

    async def done(self) -> None:
        """Wait until all earlier work is done. Raises StorageError."""
        await self._ask(lambda: None)

    async def share(self) -> None:
        """Release the lock for another gateway, while this one finishes its requests. Raises StorageError."""
        await self._ask(self._lock.leave)

    async def aclose(self) -> None:
        """Close the file once all earlier work is done. It cannot be opened again."""
        if not self._ends:
            self._ends = True
            self._closed.set_running_or_notify_cancel()
            self._jobs.put(None)
        if self._thread is None:  # nothing was ever asked
            return
        await done_within(asyncio.shield(asyncio.wrap_future(self._closed)), CLOSED_WITHIN)

    # -- on the loop ----------------------------------------------------------------------------------------------

    async def _ask(self, call: Callable[[], T]) -> T:
        if self._ends:
            raise StorageError(f"{self.file} is closed")
        answer: Future[T] = Future()
        answer.set_running_or_notify_cancel()  # from now on no waiter's cancellation touches it
        self._jobs.put(lambda: _answer(call, answer))
        if self._thread is None:
            # A daemon: a disk that hangs must not keep the process from its end.
            self._thread = threading.Thread(target=self._serve, name="storage", daemon=True)
            self._thread.start()
        return await asyncio.wrap_future(answer)

    # -- in the thread --------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
        self._let_go()
        self._closed.set_result(None)

    def _check(self) -> None:
        with self._told(), self._found():
            self.folder.mkdir(mode=0o700, exist_ok=True)
            if not os.access(self.folder, os.W_OK | os.X_OK):
                raise StorageError(f"{self.folder}: this user may not write there")
            if self.file.is_symlink():
                raise StorageError(f"{self.file}: it is a link to elsewhere: put the file itself there")
            if self.file.exists():
                database = sqlite3.connect(f"{self.file.absolute().as_uri()}?mode=ro", uri=True, timeout=BUSY_WITHIN)
                with contextlib.closing(database):
                    self._version(database)

    def _open(self, within: float) -> None:
        self._check()
        with self._told(), self._found(), self._kept():
            self._take_lock(within)
            os.close(os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            version = self._connect()
            for number, statements in enumerate(self._schema[version:], version + 1):
                self._transaction(partial(_migrate, version=number, statements=statements))

    def _open_beside(self) -> None:
        with self._told(), self._found(), self._kept():
            if self._connect() < len(self._schema):
                raise StorageError(f"{self.file}: an older gateway has it: end that one")

    @contextlib.contextmanager
    def _kept(self) -> Iterator[None]:
        """Keep open what is opened within, unless that fails."""
        try:
            yield
        except BaseException:
            self._let_go()
            raise

    def _take_lock(self, within: float) -> None:
        until = time.monotonic() + within
        while not self._lock.take():
            if time.monotonic() >= until:
                raise StorageError(f"{self.folder}: another gateway uses this storage: end it, or name another folder")
            time.sleep(LOOK)

    def _connect(self) -> int:
        """Open the file, which exists, and return the version of its schema."""
        # Transactions are begun and ended here: isolation_level None.
        uri = f"{self.file.absolute().as_uri()}?mode=rw"
        database = self._database = sqlite3.connect(uri, uri=True, timeout=BUSY_WITHIN, isolation_level=None)
        version = self._version(database)
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
        database.execute("PRAGMA foreign_keys = ON")
        return version

    def _version(self, database: sqlite3.Connection) -> int:
        """The version of the file's schema. Raises StorageError for one that this gateway cannot use."""
        version = int(database.execute("PRAGMA user_version").fetchone()[0])
        mark = int(database.execute("PRAGMA application_id").fetchone()[0])
        if mark != APPLICATION and (mark or database.execute("SELECT 1 FROM sqlite_schema").fetchone()):
            raise StorageError(f"{self.file}: it is another program's: name another folder")
        if version > len(self._schema):
            raise StorageError(
                f"{self.file}: a newer gateway has written it (version {version}, and this one knows "
                f"{len(self._schema)}): start the newer one, or name another folder"
            )
        return version

    def _transaction(self, work: Callable[[sqlite3.Connection], T]) -> T:
        database = self._opened()
        with self._told():
            database.execute("BEGIN IMMEDIATE")
            try:
                value = work(database)
                database.execute("COMMIT")
            finally:
                if database.in_transaction:  # it has failed; a full disk may have rolled it back already
                    database.execute("ROLLBACK")
            return value

    def _changes(self) -> int:
        with self._told():
            return int(self._opened().execute("PRAGMA data_version").fetchone()[0])

    def _opened(self) -> sqlite3.Connection:
        if self._database is None:
            raise StorageError(f"{self.file} is not open")
        return self._database

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Raise SQLite's errors as StorageError, but for the mistakes of the work itself."""
        try:
            yield
        except sqlite3.IntegrityError:
            raise
        except sqlite3.Error as error:
            told = getattr(error, "sqlite_errorcode", 0)
            code = told if told in _UNWRITTEN else told & 0xFF  # without its extension
            if code == sqlite3.SQLITE_BUSY:
                self._locked = time.monotonic()
            full = code in {sqlite3.SQLITE_FULL, *_UNWRITTEN}
            raise StorageError(f"{self.file}: {_WORDS.get(code, error)}", full=full) from error

    @contextlib.contextmanager
    def _found(self) -> Iterator[None]:
        """Raise the system's errors about folder and file as StorageError."""
        try:
            yield
        except FileNotFoundError as error:
            raise StorageError(
                f"{self.folder}: the folder above it is not there: make that, or name another"
            ) from error
        except OSError as error:
            raise StorageError(f"{error.filename or self.folder}: {error.strerror or error}") from error

    def _let_go(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None
        self._lock.leave()


def _migrate(database: sqlite3.Connection, version: int, statements: tuple[str, ...]) -> None:
    for statement in statements:
        database.execute(statement)
    database.execute(f"PRAGMA application_id = {APPLICATION}")
    database.execute(f"PRAGMA user_version = {version}")


def _answer(call: Callable[[], T], answer: Future[T]) -> None:
    try:
        answer.set_result(call())
    except BaseException as error:  # whoever waits is told; the thread is for the next call too
        answer.set_exception(error)
