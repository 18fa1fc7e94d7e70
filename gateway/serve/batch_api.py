"""Files and Batch API of one gateway: its door, its worker, and what they share."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.batches.door import BatchDoor
from gateway.batches.site import BatchSite
from gateway.batches.worker import BatchWorker
from gateway.core.batches.states import ALL


class BatchApi:
    """The site's storage is open from `start` to `aclose`."""

    def __init__(self, site: BatchSite) -> None:
        self._site = site
        self._worker = BatchWorker(site)
        self._door = BatchDoor(site, self._worker)

    async def start(self) -> None:
        """Take requests, and go on with the batches that are not over. Raises OSError and StorageError."""
        await self._worker.start()
        self._site.pipeline.others.stored = self._door

    async def give(self) -> None:
        """Work no batch any more: another process does. Requests that have begun are still answered."""
        await self._worker.aclose()

    async def aclose(self) -> None:
        """End answers and calls under way. A result that is being kept is kept."""
        await self._worker.aclose()
        await self._door.aclose()

    @property
    def batch_states(self) -> dict[str, int]:
        """Batches by state, at the worker's last look; empty: another process works them."""
        states = self._worker.states
        return {status: states.get(status, 0) for status in ALL} if states else {}

    @property
    def lines(self) -> Mapping[str, int]:
        """Numbers of lines by what became of them, since the start."""
        return self._site.lines

    @property
    def line_calls(self) -> int:
        """Lines that wait or run now."""
        return self._site.calls
