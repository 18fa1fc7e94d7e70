"""Objects of OpenAI's Files and Batch API, as clients read them. Times are Unix seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

WINDOW = "24h"  # the one completion window there is
WINDOW_SECONDS = 24 * 3600


class FileObject(msgspec.Struct, frozen=True, kw_only=True):
    """Stored file. `bytes`: its size. `purpose`: `batch` for a file that a client sent, else `batch_output`."""

    id: str
    object: str = "file"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: str = "processed"


class LineFault(msgspec.Struct, frozen=True):
    """Mistake in an input file. `line`: from 1; None: of the file as a whole."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class LineFaults(msgspec.Struct, frozen=True):
    """OpenAI's list of them."""

    data: Sequence[LineFault]
    object: str = "list"


class RequestCounts(msgspec.Struct, frozen=True):
    """Lines of a batch: of all, those with an answer, and those that ended without one."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchObject(msgspec.Struct, frozen=True, kw_only=True):
    """Batch, as clients see it. `status`: one of those in `states.py`. A time is null until its event."""

    id: str
    object: str = "batch"
    endpoint: str
    errors: LineFaults | None = None
    input_file_id: str
    completion_window: str = WINDOW
    status: str
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    metadata: Mapping[str, str] | None = None


def page_of(objects: Sequence[FileObject] | Sequence[BatchObject], more: bool) -> bytes:
    """Page of a list, as JSON. `more`: other objects follow."""
    return msgspec.json.encode(
        {
            "object": "list",
            "data": objects,
            "first_id": objects[0].id if objects else None,
            "last_id": objects[-1].id if objects else None,
            "has_more": more,
        }
    )
