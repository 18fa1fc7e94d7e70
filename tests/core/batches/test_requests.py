"""Requests of the Files and Batch API: routes, pages, bodies; and the states that a batch may go through."""

from __future__ import annotations

import json

import pytest

from gateway.core.batches.objects import FileObject, page_of
from gateway.core.batches.requests import (
    BATCH,
    BATCHES_ROUTE,
    CANCEL,
    CONTENT,
    FILE,
    FILES,
    Page,
    check_fields,
    new_batch,
    no_batch,
    no_file,
    page_asked,
    stored_route,
)
from gateway.core.batches.states import ALL, BEFORE, UNFINISHED, end_of
from gateway.core.request.outcome import Refused

GOOD = {"input_file_id": "file-1", "endpoint": "/v1/embeddings", "completion_window": "24h"}
JSON = b"application/json; charset=utf-8"


@pytest.mark.parametrize(
    ("path", "found"),
    [
        (b"/v1/files", (FILES, "")),
        (b"/v1/files/file-1", (FILE, "file-1")),
        (b"/v1/files/file-1/content", (CONTENT, "file-1")),
        (b"/v1/batches", (BATCHES_ROUTE, "")),
        (b"/v1/batches/b", (BATCH, "b")),
        (b"/v1/batches/b/cancel", (CANCEL, "b")),
        (b"/v1/batches/b/content", None),
        (b"/v1/files/", None),
        (b"/v1/files//content", None),
        (b"/v1/files/a/content/", None),
        (b"/v2/files", None),
        (b"x/v1/files", None),
        (b"/v1", None),
        (b"/v1/models", None),
    ],
)
def test_routes(path: bytes, found: object) -> None:
    assert stored_route(path) == found


def test_pages() -> None:
    assert page_asked(b"", 100, 20) == Page("", 20, True, "")
    assert page_asked(b"limit=3&after=file-1&order=asc&purpose=batch", 100, 20) == Page("file-1", 3, False, "batch")
    for query, said in ((b"limit=0", "1 to 100"), (b"limit=101", "1 to 100"), (b"limit=x", "1 to"),
                        (b"order=up", "asc or"), (b"a=1&" * 30, "malformed"), (b"\xff=1", "malformed")):  # fmt: skip
        with pytest.raises(Refused, match=said):
            page_asked(query, 100, 20)
    file = FileObject(id="file-1", bytes=1, created_at=1, expires_at=2, filename="a", purpose="batch")
    listed = json.loads(page_of([file], more=True))
    assert (listed["object"], listed["first_id"], listed["last_id"], listed["has_more"]) == (
        "list",
        "file-1",
        "file-1",
        True,
    )
    assert json.loads(page_of([], more=False))["first_id"] is None


def test_bodies() -> None:
    asked = new_batch(
        JSON, json.dumps(GOOD | {"metadata": {"a": "b"}, "output_expires_after": None, "unknown": 1}).encode()
    )
    assert (asked.input_file_id, asked.metadata) == ("file-1", {"a": "b"})
    for change, param in (
        ({"endpoint": "/v1/models"}, "endpoint"),
        ({"endpoint": None}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"input_file_id": 7}, "input_file_id"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3600}}, "output_expires_after"),
    ):
        with pytest.raises(Refused) as refused:
            new_batch(JSON, json.dumps(GOOD | change).encode())
        assert (refused.value.status, refused.value.param) == (400, param)
    for body in (b"{", b"[]", b"\xff", b"{}", b'{"x": %s}' % (b"[" * 30_000 + b"]" * 30_000)):
        with pytest.raises(Refused, match="no request for a batch"):
            new_batch(JSON, body)
    with pytest.raises(Refused, match="application/json"):
        new_batch(b"text/plain", json.dumps(GOOD).encode())


def test_fields_of_an_upload() -> None:
    check_fields({"purpose": "batch"})
    for fields, said in (({}, "found none"), ({"purpose": "fine-tune"}, "found fine-tune"),
                         ({"purpose": "batch", "more": ""}, "found more")):  # fmt: skip
        with pytest.raises(Refused, match=said):
            check_fields(fields)


def test_foreign_and_missing_things_are_the_same_404() -> None:
    assert (no_file("file-1").status, no_batch("b").status) == (404, 404)


def test_states() -> None:
    ends = [end_of("cancelling", 3, False), end_of("finalizing", 3, False), end_of("finalizing", 0, False)]
    assert [*ends, end_of("finalizing", 3, True)] == ["cancelled", "expired", "completed", "failed"]
    over = set(ALL) - set(UNFINISHED)
    assert over == {"completed", "failed", "expired", "cancelled"}
    assert not over & {state for before in BEFORE.values() for state in before}
