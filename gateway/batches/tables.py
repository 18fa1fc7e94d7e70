"""Tables of files, batches and results: every statement that touches them. Each function is part of one transaction.

A result has its line as its key, so it is written once however often a line is sent. Times are Unix seconds. What is
put into a statement's text is this file's own: names of columns, marks and states.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from gateway.core.batches.lines import BatchLine
from gateway.core.batches.objects import BatchObject, FileObject, LineFault
from gateway.core.batches.requests import Page
from gateway.core.batches.states import BEFORE, UNFINISHED
from gateway.core.request.outcome import Outcome, Refused

_FILE = "id, bytes, created_at, expires_at, filename, purpose"
_BATCH = (
    "id, endpoint, errors, input_file_id, status, output_file_id, error_file_id, created_at, expires_at, times, "
    "total, completed, failed, metadata"
)
_UNFINISHED = ", ".join(f"'{status}'" for status in UNFINISHED)
SMALLEST = 16 * 1024  # bytes that any file counts as: an empty one has an inode and a row too
BATCHES_KEPT = 10_000  # of one tenant
LINES_AT_ONCE = 256
RESULTS_AT_ONCE = 32  # each may have megabytes


class StoredBatch(msgspec.Struct, frozen=True):
    """One batch and its owner. `row`: its key in the tables."""

    row: int
    tenant: str
    batch: BatchObject


class Result(msgspec.Struct, frozen=True):
    """A line's own line of the output or the error file."""

    number: int
    good: bool
    text: bytes


# -- files ------------------------------------------------------------------------------------------------------------


def add_upload(database: sqlite3.Connection, tenant: str, file: FileObject, most: int) -> None:
    """Add a file that a client has sent. Raises Refused where all its tenant's would count more than `most` bytes."""
    query = "SELECT coalesce(sum(max(bytes, ?)), 0) FROM files WHERE tenant = ?"
    have = int(database.execute(query, (SMALLEST, tenant)).fetchone()[0])
    if have + max(file.bytes, SMALLEST) > most:
        message = (
            f"your files have {have} bytes, each at least {SMALLEST}, and with this one more than a tenant may keep, "
            f"{most} (batches.per_tenant): delete some first"
        )
        raise Refused(Outcome.TOO_LARGE, message, code="storage_full")
    add_file(database, tenant, file)


def add_file(database: sqlite3.Connection, tenant: str, file: FileObject) -> None:
    values = (file.id, tenant, file.bytes, file.created_at, file.expires_at, file.filename, file.purpose)
    database.execute(
        "INSERT INTO files (id, tenant, bytes, created_at, expires_at, filename, purpose) VALUES (?, ?, ?, ?, ?, ?, ?)",
        values,
    )


def file_of(database: sqlite3.Connection, tenant: str, id: str) -> FileObject | None:
    """A tenant's file; None also where it is another's."""
    row = database.execute(f"SELECT {_FILE} FROM files WHERE id = ? AND tenant = ?", (id, tenant)).fetchone()
    return None if row is None else _file(row)


def files_of(database: sqlite3.Connection, tenant: str, page: Page) -> list[FileObject]:
    """A page of a tenant's files, and one more where there are more."""
    start = _place(database, "files", tenant, page.after)
    rows = database.execute(
        f"SELECT {_FILE} FROM files WHERE tenant = ? AND (? = '' OR purpose = ?) AND " + _behind(page.newest),
        (tenant, page.purpose, page.purpose, start, start, page.limit + 1),
    )
    return [_file(row) for row in rows]


def delete_file(database: sqlite3.Connection, tenant: str, id: str) -> str:
    """Forget a tenant's file. Returns the id of a batch that still needs it, and then nothing has changed."""
    needed = database.execute(
        f"SELECT id FROM batches WHERE input_file_id = ? AND status IN ({_UNFINISHED})",
        (id,),
    ).fetchone()
    if needed is not None:
        return str(needed[0])
    database.execute("DELETE FROM files WHERE id = ? AND tenant = ?", (id, tenant))
    return ""


def forget_old(database: sqlite3.Connection, now: int) -> list[str]:
    """Forget files that have expired, and batches that ended long ago. The ids of those files."""
    database.execute(f"DELETE FROM batches WHERE keep_until <= ? AND status NOT IN ({_UNFINISHED})", (now,))
    rows = database.execute(
        "DELETE FROM files WHERE expires_at <= ? AND id NOT IN "
        f"(SELECT input_file_id FROM batches WHERE status IN ({_UNFINISHED})) RETURNING id",
        (now,),
    )
    return [str(id) for (id,) in rows.fetchall()]


def file_ids(database: sqlite3.Connection) -> set[str]:
    """The ids of all files."""
    return {str(id) for (id,) in database.execute("SELECT id FROM files")}


# -- batches ----------------------------------------------------------------------------------------------------------


def add_batch(database: sqlite3.Connection, tenant: str, batch: BatchObject, keep_until: int, most: int) -> bool:
    """Add a batch; False: the tenant has `most` that are not over. Its oldest that are over are forgotten, for no more
    than BATCHES_KEPT of a tenant are kept."""
    query = f"SELECT count(*) FROM batches WHERE tenant = ? AND status IN ({_UNFINISHED})"
    if database.execute(query, (tenant,)).fetchone()[0] >= most:
        return False
    metadata = None if batch.metadata is None else msgspec.json.encode(batch.metadata)
    database.execute(
        "INSERT INTO batches (id, tenant, endpoint, input_file_id, status, created_at, expires_at, keep_until, "
        "metadata) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (batch.id, tenant, batch.endpoint, batch.input_file_id, batch.status, batch.created_at, batch.expires_at,
         keep_until, metadata),
    )  # fmt: skip
    database.execute(
        f"DELETE FROM batches WHERE tenant = ? AND status NOT IN ({_UNFINISHED}) AND row <= "
        "(SELECT row FROM batches WHERE tenant = ? ORDER BY row DESC LIMIT 1 OFFSET ?)",
        (tenant, tenant, BATCHES_KEPT),
    )
    return True


def cancel(database: sqlite3.Connection, tenant: str, id: str, now: int) -> int | None:
    """Cancel a tenant's batch. Its row; None: it is over, or nearly."""
    found = database.execute("SELECT row FROM batches WHERE id = ? AND tenant = ?", (id, tenant)).fetchone()
    return int(found[0]) if found is not None and step(database, int(found[0]), "cancelling", now) else None


def batch_of(database: sqlite3.Connection, tenant: str, id: str) -> BatchObject | None:
    """A tenant's batch; None also where it is another's."""
    row = database.execute(f"SELECT {_BATCH} FROM batches WHERE id = ? AND tenant = ?", (id, tenant)).fetchone()
    return None if row is None else _batch(row)


def batches_of(database: sqlite3.Connection, tenant: str, page: Page) -> list[BatchObject]:
    """A page of a tenant's batches, the newest first, and one more where there are more."""
    start = _place(database, "batches", tenant, page.after)
    rows = database.execute(
        f"SELECT {_BATCH} FROM batches WHERE tenant = ? AND " + _behind(newest=True),
        (tenant, start, start, page.limit + 1),
    )
    return [_batch(row) for row in rows]


def unfinished(database: sqlite3.Connection) -> list[StoredBatch]:
    """All batches that are not over, the oldest first."""
    rows = database.execute(f"SELECT row, tenant, {_BATCH} FROM batches WHERE status IN ({_UNFINISHED}) ORDER BY row")
    return [StoredBatch(row[0], row[1], _batch(row[2:])) for row in rows]


def status_of(database: sqlite3.Connection, row: int) -> str:
    """The state that a batch is in now; empty: it is forgotten."""
    found = database.execute("SELECT status FROM batches WHERE row = ?", (row,)).fetchone()
    return "" if found is None else str(found[0])


def states(database: sqlite3.Connection) -> dict[str, int]:
    """Number of batches in each state."""
    return {
        str(status): int(count) for status, count in database.execute("SELECT status, count(*) FROM batches GROUP BY 1")
    }


def step(database: sqlite3.Connection, row: int, status: str, now: int) -> bool:
    """Take the batch into this state at this time; False: it is in none that leads there."""
    before = BEFORE[status]
    marks = ", ".join("?" * len(before))
    changed = database.execute(
        f"UPDATE batches SET status = ?, times = json_set(times, ?, ?) WHERE row = ? AND status IN ({marks})",
        (status, f"$.{status}_at", now, row, *before),
    )
    return changed.rowcount == 1


def fail(database: sqlite3.Connection, row: int, faults: Sequence[LineFault], now: int) -> None:
    """The batch cannot be worked off, for these faults of its file."""
    if step(database, row, "failed", now):
        database.execute("UPDATE batches SET errors = ? WHERE row = ?", (msgspec.json.encode(faults), row))
        database.execute("DELETE FROM batch_lines WHERE batch = ?", (row,))


def finish(
    database: sqlite3.Connection, row: int, status: str, now: int, tenant: str, files: Mapping[str, FileObject]
) -> None:
    """The batch is over, with these files under the names of their columns. Nothing of its lines is needed any more."""
    for column, file in files.items():
        add_file(database, tenant, file)
        database.execute(f"UPDATE batches SET {column} = ? WHERE row = ?", (file.id, row))
    pending = "(SELECT count(*) FROM batch_lines WHERE batch = batches.row) - completed - failed"
    database.execute(f"UPDATE batches SET failed = failed + {pending} WHERE row = ?", (row,))
    step(database, row, status, now)
    database.execute("DELETE FROM batch_results WHERE batch = ?", (row,))
    database.execute("DELETE FROM batch_lines WHERE batch = ?", (row,))


# -- lines ------------------------------------------------------------------------------------------------------------


def begin_lines(database: sqlite3.Connection, row: int) -> None:
    """Nothing of its file has been judged."""
    database.execute("DELETE FROM batch_lines WHERE batch = ?", (row,))


def forget_unjudged(database: sqlite3.Connection, row: int) -> None:
    """Forget the lines of a batch that was cancelled before all of its file was judged."""
    database.execute(
        "DELETE FROM batch_lines WHERE batch = (SELECT row FROM batches WHERE row = ? AND total = 0)", (row,)
    )


def add_lines(database: sqlite3.Connection, row: int, lines: Iterable[BatchLine]) -> None:
    database.executemany(
        "INSERT INTO batch_lines (batch, number, custom_id, start, length) VALUES (?, ?, ?, ?, ?)",
        [(row, line.number, line.custom_id, line.offset, line.length) for line in lines],
    )


def begin_work(database: sqlite3.Connection, row: int, now: int) -> None:
    """All its lines are known, and good."""
    if step(database, row, "in_progress", now):
        database.execute(
            "UPDATE batches SET total = (SELECT count(*) FROM batch_lines WHERE batch = row) WHERE row = ?", (row,)
        )


def pending(database: sqlite3.Connection, row: int, after: int, limit: int = LINES_AT_ONCE) -> list[BatchLine]:
    """The next lines behind number `after` that have no result."""
    rows = database.execute(
        "SELECT number, custom_id, start, length FROM batch_lines l WHERE batch = ? AND number > ? AND NOT EXISTS "
        "(SELECT 1 FROM batch_results r WHERE r.batch = l.batch AND r.number = l.number) ORDER BY number LIMIT ?",
        (row, after, limit),
    )
    return [BatchLine(*found) for found in rows]


def keep_result(database: sqlite3.Connection, row: int, result: Result) -> bool:
    """Keep a line's result; False: it has one, or its batch is over."""
    kept = database.execute(
        "INSERT OR IGNORE INTO batch_results (batch, number, good, text) SELECT batch, number, ?, ? FROM batch_lines "
        "WHERE batch = ? AND number = ?",
        (result.good, result.text, row, result.number),
    )
    if kept.rowcount != 1:
        return False
    column = "completed" if result.good else "failed"
    database.execute(f"UPDATE batches SET {column} = {column} + 1 WHERE row = ?", (row,))
    return True


def results(database: sqlite3.Connection, row: int, after: int) -> list[Result]:
    """The next results behind number `after`, in order."""
    rows = database.execute(
        "SELECT number, good, text FROM batch_results WHERE batch = ? AND number > ? ORDER BY number LIMIT ?",
        (row, after, RESULTS_AT_ONCE),
    )
    return [Result(number, bool(good), text) for number, good, text in rows]


# -- inside -----------------------------------------------------------------------------------------------------------


def _place(database: sqlite3.Connection, table: str, tenant: str, id: str) -> int:
    """The row of the file or batch that a page comes after; 0: from the beginning."""
    if not id:
        return 0
    found = database.execute(f"SELECT row FROM {table} WHERE id = ? AND tenant = ?", (id, tenant)).fetchone()
    return 0 if found is None else int(found[0])


def _behind(newest: bool) -> str:
    if newest:
        return "(? = 0 OR row < ?) ORDER BY row DESC LIMIT ?"
    return "(? = 0 OR row > ?) ORDER BY row LIMIT ?"


def _file(row: Sequence[Any]) -> FileObject:
    return msgspec.convert(dict(zip(_FILE.split(", "), row, strict=True)), FileObject)


def _batch(row: Sequence[Any]) -> BatchObject:
    found = dict(zip(_BATCH.split(", "), row, strict=True))
    errors, metadata = found.pop("errors"), found.pop("metadata")
    found["errors"] = None if errors is None else {"data": msgspec.json.decode(errors)}
    found["metadata"] = None if metadata is None else msgspec.json.decode(metadata)
    found["request_counts"] = {name: found.pop(name) for name in ("total", "completed", "failed")}
    return msgspec.convert(found | msgspec.json.decode(found.pop("times")), BatchObject)
