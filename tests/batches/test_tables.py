"""Tables of files and batches: bounds on what one tenant keeps."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator

import pytest

from gateway.batches import tables
from gateway.core.batches.objects import BatchObject, FileObject
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
    return tables.add_batch(database, tenant, batch, keep_until=3, most=3)


def test_small_and_empty_files_count_too(database: sqlite3.Connection) -> None:
    most = 3 * tables.SMALLEST
    tables.add_upload(database, "acme", upload("a", 0), most)
    tables.add_upload(database, "acme", upload("b", tables.SMALLEST + 1), most)
    for size in (0, tables.SMALLEST):
        with pytest.raises(Refused, match=f"have {2 * tables.SMALLEST + 1} bytes"):
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
