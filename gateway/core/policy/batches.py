"""Policy of the Batch API: files of calls that are worked off when there is room."""

from __future__ import annotations

from typing import Annotated

import msgspec

from gateway.core.policy.types import Bounds, Name, Positive
from gateway.shared.files.units import Bytes, Count, Seconds


class BatchesPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's Files and Batch API, /v1/files and /v1/batches. It takes effect at a start, `class` with a reload too.
    It needs `storage`.

    `class`: Class of the calls that batches are worked off by. Give it less weight than those of waiting people.
    `in_flight`: Calls of all batches that wait or run at once, in even parts for tenants that have lines. More than the
    engines take at once leaves none idle.
    `max_file`: Largest file that may be uploaded.
    `max_requests`: Lines of one batch.
    `max_line`: Largest line of a batch.
    `max_answer`: Largest answer to a line; a longer one is given up, and its line stands in the error file.
    `max_unfinished`: Batches of one tenant that are not over; one more is refused with 429.
    `per_tenant`: Size of all that one tenant keeps: files, each counted as 16 KiB at least, and batches with their
    lines and results. A tenant that has it creates nothing more, and a batch whose results pass it fails.
    `keep`: Time after which files are deleted, and batches that are over.
    """

    class_: Name = msgspec.field(default="batch", name="class")
    in_flight: Annotated[Count, Bounds(ge=1, le=10_000)] = 256
    max_file: Annotated[Bytes, Bounds(ge=1024, le=1024**4)] = 200 * 1024**2
    max_requests: Annotated[Count, Bounds(ge=1, le=1_000_000)] = 50_000
    max_line: Annotated[Bytes, Bounds(ge=1024, le=64 * 1024**2)] = 2 * 1024**2
    max_answer: Annotated[Bytes, Bounds(ge=1024, le=1024**3)] = 64 * 1024**2
    max_unfinished: Positive = 100
    per_tenant: Annotated[Bytes, Bounds(ge=1024, le=1024**5)] = 10 * 1024**3
    keep: Annotated[Seconds, Bounds(ge=3600, le=366 * 86_400)] = 30 * 86_400.0
