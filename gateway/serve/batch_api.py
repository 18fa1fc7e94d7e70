"""Files and Batch API of one gateway: its door, its worker, and what they share."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gateway.batches.door import BatchDoor
from gateway.batches.site import BatchSite
from gateway.batches.worker import BatchWorker
from gateway.core.batches.states import ALL
from gateway.core.policy.batches import BatchesPolicy
from gateway.core.request.body_memory import BodyMemory
from gateway.relay.pipeline import Pipeline
from gateway.shared.storage import Storage


class BatchApi:
    """`storage` is open from `start` to `aclose`. `say` takes lines for the operator."""

    def __init__(
        self,
        policy: BatchesPolicy,
        storage: Storage,
        pipeline: Pipeline,
        bodies: BodyMemory,
        say: Callable[[str], None],
    ) -> None:
        self._site = BatchSite(policy, storage, pipeline, bodies, say)
        self._worker = BatchWorker(self._site)
        self._door = BatchDoor(self._site, self._worker)
        self._pipeline = pipeline

    async def start(self) -> None:
        """Take requests, and go on with the batches that are not over. Raises OSError and StorageError."""
        await self._worker.start()
        self._pipeline.stored = self._door

    async def aclose(self) -> None:
        """End answers and calls under way. A result that is being kept is kept."""
        await self._worker.aclose()
        await self._door.aclose()

    @property
    def states(self) -> dict[str, int]:
        """Batches by state, at the worker's last look."""
        return {status: self._worker.states.get(status, 0) for status in ALL}

    @property
    def lines(self) -> Mapping[str, int]:
        """What became of lines, since the start."""
        return self._site.lines

    @property
    def calls(self) -> int:
        """Lines that wait or run now."""
        return self._site.calls
