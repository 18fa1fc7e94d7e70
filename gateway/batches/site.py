"""Everything that the parts of the Batch API share."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from gateway.batches.file_folder import FileFolder
from gateway.core.policy.batches import BatchesPolicy
from gateway.core.request.body_memory import BodyMemory
from gateway.relay.pipeline import Pipeline
from gateway.shared.storage import Storage

FOLDER = "files"  # beside the storage's file


class BatchSite:
    """`policy` is the one of the start. `lines` counts results of lines, and lines that were sent once more. `say`
    takes lines for the operator."""

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
        self.seats = asyncio.Semaphore(policy.in_flight)  # of calls that wait or run
        self.lines = Counter({"completed": 0, "failed": 0, "again": 0})

    def told(self, error: BaseException) -> str:
        """An error of the disk or the storage, in words for the operator."""
        if isinstance(error, OSError):
            return f"{error.filename or self.folder.path}: {error.strerror or error}"
        return str(error)

    def now(self) -> int:
        """Unix seconds, as the API's objects have them."""
        return int(time.time())
