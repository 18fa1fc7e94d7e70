"""Tables of files, batches and results: every statement that touches them. Each function is part of one transaction.

A line is there until it has its result, which goes with the sizes of the files that have it: so it is kept once however
often the line is sent. Triggers of the schema sum up what a tenant has on the disk: its files, and of each batch its
row, its lines and its results. Times are Unix seconds. What is put into a statement's text is this file's own: names of
columns, marks and states.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from gateway.batches.file_folder import PART
from gateway.core.batches.lines import BatchLine
from gateway.core.batches.objects import BatchObject, FileObject, LineFault
from gateway.core.batches.requests import Page, no_batch, no_file
from gateway.core.batches.states import BEFORE, UNFINISHED
from gateway.core.request.outcome import Outcome, Refused

_FILE = "id, bytes, created_at, expires_at, filename, purpose"
_BATCH = (
    "id, endpoint, errors, input_file_id, status, output_file_id, error_file_id, created_at, expires_at, times, "
    "total, completed, failed, metadata"
)
_UNFINISHED = ", ".join(f"'{status}'" for status in UNFINISHED)
_OLD = f"expires_at <= ? AND id NOT IN (SELECT input_file_id FROM batches WHERE status IN ({_UNFINISHED}))"
SMALLEST = 16 * 1024  # bytes that any file counts as: an empty one has an inode and a row too
BATCHES_KEPT = 10_000  # of one tenant
BATCHES_SHARE = 8  # of what a tenant may keep, one in so many bytes for batches that are over
ROW = 1024  # bytes that a batch counts as, beside what its client and its faults have put into it
LINE = 64  # bytes that a line's row has beside its custom_id
LINES_AT_ONCE = 256
_PREFIX = {"files": "file-", "batches": "batch"}
_OWN = f"{ROW} + coalesce(length(metadata), 0) + coalesce(length(errors), 0)"


class StoredBatch(msgspec.Struct, frozen=True):
    """Batch with its owner. `row`: its key in the tables."""

    row: int
    tenant: str
    batch: BatchObject


class Sizes(msgspec.Struct, frozen=True):
    """Bytes of the output and of the error file of a batch that is not over."""

    output: int = 0
    errors: int = 0


def storage_full(most: int) -> Refused:
    """A refusal of what a tenant wants to keep beside all that it has."""
    message = (
        f"what you keep here, files and batches with their results, each file counted as {SMALLEST} bytes at least, "
        f"would have more than the {most} bytes that a tenant may keep (batches.per_tenant): delete files first"
    )
    return Refused(Outcome.TOO_LARGE, message, code="storage_full")


def kept(database: sqlite3.Connection, tenant: str) -> int:
    """Bytes that a tenant has on the disk."""
    found = database.execute("SELECT bytes FROM kept WHERE tenant = ?", (tenant,)).fetchone()
    return 0 if found is None else int(found[0])


# -- files ------------------------------------------------------------------------------------------------------------


def add_upload(database: sqlite3.Connection, tenant: str, file: FileObject, most: int) -> None:
    """Add a file that a client has sent. Raises Refused where all its tenant's would count more than `most` bytes."""
    if kept(database, tenant) + max(file.bytes, SMALLEST) > most:
        raise storage_full(most)
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
    """A page of a tenant's files, and one more where there are more. Raises Refused (404) for an unknown `after`."""
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


def old_files(database: sqlite3.Connection, now: int) -> list[str]:
    """The ids of files that have expired, and that no batch needs."""
    return [str(id) for (id,) in database.execute(f"SELECT id FROM files WHERE {_OLD}", (now,))]


def forget_old(database: sqlite3.Connection, now: int) -> None:
    """Forget files that have expired, and batches that ended long ago."""
    database.execute(f"DELETE FROM batches WHERE keep_until <= ? AND status NOT IN ({_UNFINISHED})", (now,))
    database.execute(f"DELETE FROM files WHERE {_OLD}", (now,))


def file_names(database: sqlite3.Connection) -> set[str]:
    """Names of all files, with those of the results of batches that are not over, whole or not."""
    rows = database.execute(f"SELECT id FROM batches WHERE status IN ({_UNFINISHED})")
    names = {f"{id}{end}" for (batch,) in rows for id in results_of(batch) for end in ("", PART)}
    return names | {str(id) for (id,) in database.execute("SELECT id FROM files")}


def results_of(batch: str) -> tuple[str, str]:
    """The ids of the output and of the error file of a batch."""
    name = batch.removeprefix("batch_")
    return f"file-{name}-output", f"file-{name}-error"


# -- batches ----------------------------------------------------------------------------------------------------------


def add_batch(
    database: sqlite3.Connection, tenant: str, batch: BatchObject, keep_until: int, most: int, most_bytes: int
) -> bool:
    """Add a batch; False: the tenant has `most` that are not over. Its oldest that are over are forgotten, for no more
    than BATCHES_KEPT of a tenant are kept, nor more than a share of its bytes. Raises Refused where the tenant has
    `most_bytes`."""
    query = f"SELECT count(*) FROM batches WHERE tenant = ? AND status IN ({_UNFINISHED})"
    if database.execute(query, (tenant,)).fetchone()[0] >= most:
        return False
    metadata = None if batch.metadata is None else msgspec.json.encode(batch.metadata)
    own = ROW + len(metadata or b"")
    if kept(database, tenant) + own > most_bytes:
        raise storage_full(most_bytes)
    database.execute(
        "INSERT INTO batches (id, tenant, endpoint, input_file_id, status, created_at, expires_at, keep_until, "
        "metadata, kept) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (batch.id, tenant, batch.endpoint, batch.input_file_id, batch.status, batch.created_at, batch.expires_at,
         keep_until, metadata, own),
    )  # fmt: skip
    database.execute(
        f"DELETE FROM batches WHERE tenant = ? AND status NOT IN ({_UNFINISHED}) AND row <= "
        "(SELECT max(row) FROM (SELECT row, count(*) OVER newer AS number, sum(kept) OVER newer AS size FROM batches "
        "WHERE tenant = ? WINDOW newer AS (ORDER BY row DESC)) WHERE number > ? OR size > ?)",
        (tenant, tenant, BATCHES_KEPT, most_bytes // BATCHES_SHARE),
    )
    return True


def cancel(database: sqlite3.Connection, tenant: str, id: str, now: int) -> int | None:
    """Cancel a tenant's batch. Return its row; None: the batch is over, or about to be."""
    found = database.execute("SELECT row FROM batches WHERE id = ? AND tenant = ?", (id, tenant)).fetchone()
    return int(found[0]) if found is not None and step(database, int(found[0]), "cancelling", now) else None


def batch_of(database: sqlite3.Connection, tenant: str, id: str) -> BatchObject | None:
    """A tenant's batch; None also where it is another's."""
    row = database.execute(f"SELECT {_BATCH} FROM batches WHERE id = ? AND tenant = ?", (id, tenant)).fetchone()
    return None if row is None else _batch(row)


def batches_of(database: sqlite3.Connection, tenant: str, page: Page) -> list[BatchObject]:
    """A page of a tenant's batches, and one more where there are more. Raises Refused (404) for an unknown `after`."""
    start = _place(database, "batches", tenant, page.after)
    rows = database.execute(
        f"SELECT {_BATCH} FROM batches WHERE tenant = ? AND " + _behind(page.newest),
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
    """Fail a batch whose file has these faults."""
    if step(database, row, "failed", now):
        _note_faults(database, row, faults)
        _forget_lines(database, row)


def stop(database: sqlite3.Connection, row: int, fault: LineFault, now: int) -> None:
    """Stop a batch for this fault. It fails once its result files are whole, or is cancelled."""
    if step(database, row, "finalizing", now) or status_of(database, row) in {"finalizing", "cancelling"}:
        _note_faults(database, row, [fault])


def has_faults(database: sqlite3.Connection, row: int) -> bool:
    """Whether the batch was stopped."""
    return database.execute("SELECT 1 FROM batches WHERE row = ? AND errors IS NOT NULL", (row,)).fetchone() is not None


def _note_faults(database: sqlite3.Connection, row: int, faults: Sequence[LineFault]) -> None:
    database.execute("UPDATE batches SET errors = ? WHERE row = ?", (msgspec.json.encode(faults), row))


def finish(
    database: sqlite3.Connection, row: int, status: str, now: int, tenant: str, files: Mapping[str, FileObject]
) -> None:
    """End a batch with these result files, by the names of their columns, and delete its lines."""
    for column, file in files.items():
        add_file(database, tenant, file)
        database.execute(f"UPDATE batches SET {column} = ? WHERE row = ?", (file.id, row))
    database.execute("UPDATE batches SET failed = total - completed WHERE row = ?", (row,))
    step(database, row, status, now)
    _forget_lines(database, row)


def _forget_lines(database: sqlite3.Connection, row: int) -> None:
    database.execute("DELETE FROM batch_lines WHERE batch = ?", (row,))
    database.execute(f"UPDATE batches SET kept = {_OWN} WHERE row = ?", (row,))


# -- lines ------------------------------------------------------------------------------------------------------------


def begin_lines(database: sqlite3.Connection, row: int) -> None:
    """Forget the lines of the batch, so that its file is checked from the beginning."""
    _forget_lines(database, row)


def forget_unjudged(database: sqlite3.Connection, row: int) -> None:
    """Forget the lines of a batch that was cancelled before all of its file was judged."""
    database.execute(
        "DELETE FROM batch_lines WHERE batch = (SELECT row FROM batches WHERE row = ? AND total = 0)", (row,)
    )


def add_lines(database: sqlite3.Connection, row: int, lines: Iterable[BatchLine]) -> int:
    """Add lines of the batch's file. Return the bytes that its tenant has now."""
    rows = [(row, line.number, line.custom_id, line.offset, line.length) for line in lines]
    database.executemany(
        "INSERT INTO batch_lines (batch, number, custom_id, start, length) VALUES (?, ?, ?, ?, ?)", rows
    )
    return _grown(database, row, sum(LINE + len(each[2].encode()) for each in rows))


def _grown(database: sqlite3.Connection, row: int, more: int) -> int:
    """The bytes of the batch's tenant, with so many more of the batch."""
    database.execute("UPDATE batches SET kept = kept + ? WHERE row = ?", (more, row))
    query = "SELECT bytes FROM kept WHERE tenant = (SELECT tenant FROM batches WHERE row = ?)"
    return int(database.execute(query, (row,)).fetchone()[0])


def begin_work(database: sqlite3.Connection, row: int, now: int) -> None:
    """Begin the work of a batch whose lines are all known and valid."""
    if step(database, row, "in_progress", now):
        database.execute(
            "UPDATE batches SET total = (SELECT count(*) FROM batch_lines WHERE batch = row) WHERE row = ?", (row,)
        )


def pending(database: sqlite3.Connection, row: int, after: int, limit: int = LINES_AT_ONCE) -> list[BatchLine]:
    """The next lines behind number `after` that have no result."""
    rows = database.execute(
        "SELECT number, custom_id, start, length FROM batch_lines WHERE batch = ? AND number > ? ORDER BY number "
        "LIMIT ?",
        (row, after, limit),
    )
    return [BatchLine(*found) for found in rows]


def sizes_of(database: sqlite3.Connection, row: int) -> Sizes:
    """Sizes up to which the result files of a batch count."""
    return Sizes(*database.execute("SELECT output_bytes, error_bytes FROM batches WHERE row = ?", (row,)).fetchone())


def keep_results(
    database: sqlite3.Connection, row: int, good: Collection[int], bad: Collection[int], sizes: Sizes
) -> int:
    """Delete lines that have results, in files of these sizes. Return the bytes that the tenant has now."""
    numbers = [(row, number) for number in (*good, *bad)]
    before = sizes_of(database, row)
    gone = database.executemany("DELETE FROM batch_lines WHERE batch = ? AND number = ?", numbers)
    assert gone.rowcount == len(numbers)  # noqa: S101 # each line is worked by one task of one process
    database.execute(
        "UPDATE batches SET completed = completed + ?, failed = failed + ?, output_bytes = ?, error_bytes = ? "
        "WHERE row = ?",
        (len(good), len(bad), sizes.output, sizes.errors, row),
    )
    return _grown(database, row, sizes.output + sizes.errors - before.output - before.errors)


# -- inside -----------------------------------------------------------------------------------------------------------


def _place(database: sqlite3.Connection, table: str, tenant: str, id: str) -> int:
    """The row of the file or batch that a page comes after, also of one that is gone; 0: from the beginning. Raises
    Refused (404)."""
    if not id:
        return 0
    found = database.execute(
        f"SELECT row FROM {table} WHERE id = ? AND tenant = ? UNION ALL "
        "SELECT row FROM gone WHERE id = ? AND tenant = ? AND substr(id, 1, 5) = ?",
        (id, tenant, id, tenant, _PREFIX[table]),
    ).fetchone()
    if found is None:  # to begin anew would have a client that pages list the first objects for ever
        refused = no_file if table == "files" else no_batch
        raise refused(id, "after")
    return int(found[0])


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
