"""Storage of one gateway, from its start to its end: where it is, and when another gateway may have it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from gateway.batches.door import BatchDoor
from gateway.batches.site import BatchSite
from gateway.core.policy.policy import Policy
from gateway.core.request.body_memory import BodyMemory
from gateway.relay.pipeline import Pipeline
from gateway.serve.starting import StartError
from gateway.serve.token_use import TokenUse
from gateway.shared.storage import Storage, StorageError

# Seconds for the gateway before, which was killed or hands over, to let go of the folder.
RELEASED_WITHIN = 10.0


def storage_of(file: Path, policy: Policy) -> Storage | None:
    """The storage that a policy file names, not opened yet; None: the policy names none."""
    if policy.storage is None:
        return None
    return Storage(file.parent / policy.storage)


async def check(storage: Storage | None) -> None:
    """Check that the storage can be opened, before another gateway stops for this one. Raises StartError."""
    if storage is not None:
        try:
            await storage.check()
        except StorageError as error:
            raise StartError(f"storage: {error}") from error


async def opened(storage: Storage | None, use: TokenUse) -> None:
    """Open the storage once the previous gateway has released it, and load its counts. Raises StartError."""
    try:
        if storage is not None:
            await storage.open(RELEASED_WITHIN)
        await use.start()
    except StorageError as error:
        raise StartError(f"storage: {error}") from error


def offered(
    policy: Policy, storage: Storage | None, pipeline: Pipeline, bodies: BodyMemory, say: Callable[[str], None]
) -> BatchDoor | None:
    """Files and batches, not begun yet; None: the policy does not offer them."""
    if policy.batches is None or storage is None:
        return None
    return BatchDoor(BatchSite(policy.batches, storage, pipeline, bodies, say))


async def begun(batches: BatchDoor | None, beside: Storage | None = None) -> None:
    """Take files and batches, where they are offered. `beside`: a storage that another process has opened, and that is
    to be opened here too. Raises StartError."""
    if batches is None:
        return
    try:
        if beside is not None:
            await beside.open_beside()
        await batches.start()
    except (StorageError, OSError) as error:
        raise StartError(f"batches: {batches.told(error)}") from error


@asynccontextmanager
async def batches_beside(
    file: Path | None, policy: Policy, pipeline: Pipeline, bodies: BodyMemory, say: Callable[[str], None]
) -> AsyncIterator[BatchDoor | None]:
    """Take files and batches in a relay, whose decider has opened the storage; None: the policy does not offer them.
    Raises StartError."""
    storage = None if file is None else storage_of(file, policy)
    batches = offered(policy, storage, pipeline, bodies, say)
    if storage is None or batches is None:
        yield None
        return
    try:
        await begun(batches, storage)
        yield batches
    finally:
        await batches.aclose()
        await storage.aclose()
