"""Tables of files and batches: bounds on what one tenant keeps."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator

import pytest

from gateway.batches import tables
from gateway.core.batches.lines import BatchLine
from gateway.core.batches.objects import BatchObject, FileObject, LineFault
from gateway.core.batches.requests import Page
from gateway.core.request.outcome import Refused
from gateway.shared.storage import SCHEMA

ALL = Page("", 100, True, "")


@pytest.fixture
def database() -> Iterator[sqlite3.Connection]:
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as opened:
        for version in SCHEMA:
            for statement in version:
                opened.execute(statement)
        yield opened


def upload(id: str, size: int) -> FileObject:
    return FileObject(id=id, bytes=size, created_at=1, expires_at=2, filename="a", purpose="batch")


def begun(database: sqlite3.Connection, tenant: str, id: str) -> bool:
    batch = BatchObject(id=id, endpoint="/v1/embeddings", input_file_id="file-1", status="validating", created_at=1,
                        expires_at=2)  # fmt: skip
    return tables.add_batch(database, tenant, batch, keep_until=3, most=3, most_bytes=10**6)


def test_small_and_empty_files_count_too(database: sqlite3.Connection) -> None:
    most = 3 * tables.SMALLEST
    tables.add_upload(database, "acme", upload("a", 0), most)
    tables.add_upload(database, "acme", upload("b", tables.SMALLEST + 1), most)
    for size in (0, tables.SMALLEST):
        with pytest.raises(Refused, match="delete files first"):
            tables.add_upload(database, "acme", upload("c", size), most)
    tables.add_upload(database, "globex", upload("d", 3 * tables.SMALLEST), most)
    assert [file.id for file in tables.files_of(database, "acme", ALL)] == ["b", "a"]


def test_the_oldest_batches_that_are_over_make_room(
    database: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "BATCHES_KEPT", 3)
    assert begun(database, "globex", "theirs")
    for number in range(5):
        assert begun(database, "acme", f"b{number}")
        if number != 1:  # which is not over, and stays
            tables.fail(database, database.execute("SELECT max(row) FROM batches").fetchone()[0], [], 2)
    assert [batch.id for batch in tables.batches_of(database, "acme", ALL)] == ["b4", "b3", "b2", "b1"]
    assert [batch.id for batch in tables.batches_of(database, "globex", ALL)] == ["theirs"]


def test_all_that_a_tenant_has_counts(database: sqlite3.Connection) -> None:
    """Files, and of each batch its row, its lines, its results and its faults; what goes is given back."""
    most = 100_000
    tables.add_upload(database, "acme", upload("file-1", 20_000), most)
    assert begun(database, "acme", "batch_1")
    assert tables.kept(database, "acme") == 20_000 + tables.ROW
    lines = [BatchLine(1, "a", 0, 1), BatchLine(2, "b" * 100, 1, 1)]
    judged = 20_000 + tables.ROW + 2 * tables.LINE + 101
    assert tables.add_lines(database, 1, lines) == tables.kept(database, "acme") == judged
    tables.begin_work(database, 1, now=1)
    assert tables.keep_results(database, 1, {1}, (), tables.Sizes(70_000, 0)) == judged + 70_000
    with pytest.raises(Refused, match="per_tenant"):
        tables.add_upload(database, "acme", upload("file-2", 1), most)
    assert tables.keep_results(database, 1, (), {2}, tables.Sizes(70_000, 9_000)) == judged + 79_000
    tables.stop(database, 1, LineFault("storage_full", "full"), now=1)
    other = BatchObject(id="batch_2", endpoint="/v1/embeddings", input_file_id="file-1", status="validating",
                        created_at=1, expires_at=2)  # fmt: skip
    with pytest.raises(Refused, match="per_tenant"):
        tables.add_batch(database, "acme", other, keep_until=3, most=3, most_bytes=most)
    tables.finish(database, 1, "failed", 1, "acme", {"output_file_id": upload("out", 70_000)})
    assert tables.batch_of(database, "acme", "batch_1").status == "failed"  # type: ignore[union-attr] # it is there
    errors = database.execute("SELECT length(errors) FROM batches").fetchone()[0]
    assert tables.kept(database, "acme") == 90_000 + tables.ROW + errors
    for id in ("out", "file-1"):
        assert tables.delete_file(database, "acme", id) == ""
    assert tables.old_files(database, now=10) == []
    tables.forget_old(database, now=10)
    assert tables.kept(database, "acme") == 0
    assert tables.kept(database, "globex") == 0


def test_batches_that_are_over_have_a_share_of_what_a_tenant_may_keep(database: sqlite3.Connection) -> None:
    for number in range(20):
        batch = BatchObject(id=f"b{number}", endpoint="/v1/embeddings", input_file_id="file-1", status="validating",
                            created_at=1, expires_at=2)  # fmt: skip
        most = 3 * tables.ROW * tables.BATCHES_SHARE
        assert tables.add_batch(database, "acme", batch, keep_until=3, most=3, most_bytes=most)
        tables.fail(database, database.execute("SELECT max(row) FROM batches").fetchone()[0], [], 2)
    assert len(tables.batches_of(database, "acme", ALL)) <= 3


def test_an_older_gateways_batches_go_on_and_count() -> None:
    """Results that stood in the database are made again."""
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as older:
        for statement in (each for version in SCHEMA[:2] for each in version):
            older.execute(statement)
        older.execute("INSERT INTO files VALUES (1, 'file-1', 'acme', 20000, 1, 2, 'a', 'batch')")
        for row, status in enumerate(("finalizing", "completed", "cancelling"), 1):
            older.execute(
                "INSERT INTO batches (row, id, tenant, endpoint, input_file_id, status, created_at, expires_at, "
                "keep_until, total, completed) "
                "VALUES (?, 'b' || ?, 'acme', '/v1/completions', 'file-1', ?, 1, 2, 3, 1, 1)",
                (row, row, status),
            )
        older.execute("INSERT INTO batch_lines VALUES (1, 1, 'a', 0, 1)")
        older.execute("INSERT INTO batch_results VALUES (1, 1, 1, x'00')")
        for statement in SCHEMA[2]:
            older.execute(statement)
        assert [tables.status_of(older, row) for row in (1, 2, 3)] == ["in_progress", "completed", "cancelling"]
        assert [line.custom_id for line in tables.pending(older, 1, 0)] == ["a"]
        assert [batch.request_counts.completed for batch in tables.batches_of(older, "acme", ALL)] == [0, 1, 0]
        assert tables.kept(older, "acme") == 20_000 + 3 * tables.ROW
        assert tables.keep_results(older, 1, {1}, (), tables.Sizes(5, 0)) == 20_005 + 3 * tables.ROW
