"""Everything that the parts of the Batch API share."""

from __future__ import annotations

import errno
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from gateway.batches.file_folder import FileFolder
from gateway.batches.seats import Seats
from gateway.core.policy.batches import BatchesPolicy
from gateway.core.request.body_memory import BodyMemory
from gateway.relay.pipeline import Pipeline
from gateway.shared.storage import Storage

FOLDER = "files"  # beside the storage's file


class BatchSite:
    """Parts and counts. `policy` is the one of the start. `lines` counts results of lines, and lines that were sent
    once more. `say` takes lines for the operator."""

    def __init__(
        self,
        policy: BatchesPolicy,
        storage: Storage,
        pipeline: Pipeline,
        bodies: BodyMemory,
        say: Callable[[str], None],
    ) -> None:
        self.policy = policy
        self.storage = storage
        self.folder = FileFolder(Path(storage.folder) / FOLDER)
        self.pipeline = pipeline
        self.bodies = bodies
        self.say = say
        self.calls = 0  # lines that wait or run now
        self.seats = Seats(policy.in_flight)  # of calls that wait or run
        self.kept: dict[str, int] = {}  # bytes that tenants had on the disk at the last result
        self.spilled: Counter[str] = Counter()  # bytes of answers under way, beside those
        self.lines = Counter({"completed": 0, "failed": 0, "again": 0})

    def room(self, tenant: str) -> bool:
        """Whether the tenant may have more on the disk."""
        return self.kept.get(tenant, 0) + self.spilled[tenant] <= self.policy.per_tenant

    def told(self, error: BaseException) -> str:
        """An error of the disk or the storage, in words for the operator."""
        if isinstance(error, OSError):
            return f"{error.filename or self.folder.path}: {error.strerror or error}"
        return str(error)

    def now(self) -> int:
        """Unix seconds, as the API's objects have them."""
        return int(time.time())


def is_full(error: BaseException) -> bool:
    """Whether the disk has no room, or the gateway's user or process (RLIMIT_FSIZE) may write no more."""
    return getattr(error, "errno", None) in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG} or getattr(error, "full", False)
