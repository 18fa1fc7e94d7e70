"""Policy of the Batch API: files of calls that are worked off when there is room."""

from __future__ import annotations

from typing import Annotated

import msgspec

from gateway.core.policy.types import Bounds, ClassName
from gateway.shared.files.units import Bytes, Count, Seconds


class BatchesPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's Files and Batch API. It needs `storage`, and takes effect at a start, `class` with a reload too.

    `class`: Class of batches' calls. Give it less weight than those of waiting people.
    `in_flight`: Calls of all batches that wait or run at once, in even parts for tenants. More than the engines take
    leaves none idle.
    `per_tenant`: Size of all that a tenant keeps: files (16 KiB at least), batches, lines, results. Beyond it nothing
    is created, and a batch whose results exceed it fails. One file has 1 GiB at most.
    `keep`: Time after which files and finished batches are deleted.
    """

    class_: ClassName = msgspec.field(default="batch", name="class")
    in_flight: Annotated[Count, Bounds(ge=1, le=10_000)] = 256
    per_tenant: Annotated[Bytes, Bounds(ge=1024, le=1024**5)] = 10 * 1024**3
    keep: Annotated[Seconds, Bounds(ge=3600, le=366 * 86_400)] = 30 * 86_400.0
