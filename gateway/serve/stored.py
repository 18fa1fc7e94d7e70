"""Storage of one gateway, from its start to its end: where it is, and when another gateway may have it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from gateway.batches.site import BatchSite
from gateway.core.policy.policy import Policy
from gateway.core.request.body_memory import BodyMemory
from gateway.relay.pipeline import Pipeline
from gateway.serve.assembly import Gateway
from gateway.serve.batch_api import BatchApi
from gateway.serve.starting import StartError
from gateway.serve.token_use import TokenUse
from gateway.shared.storage import Storage, StorageError

# Seconds for the gateway before, which was killed or hands over, to let go of the folder.
RELEASED_WITHIN = 10.0


def storage_of(file: Path, policy: Policy) -> Storage | None:
    """The storage that the policy of this file names, not opened yet; None: it names none."""
    if policy.storage is None:
        return None
    return Storage(file.parent / policy.storage)


async def check(storage: Storage | None) -> None:
    """Find what would keep it from being opened, before another gateway stops for this one. Raises StartError."""
    if storage is not None:
        try:
            await storage.check()
        except StorageError as error:
            raise StartError(f"storage: {error}") from error


async def opened(storage: Storage | None, use: TokenUse) -> None:
    """Open it, once the gateway before has let go of it, and go on from what it holds. Raises StartError."""
    try:
        if storage is not None:
            await storage.open(RELEASED_WITHIN)
        await use.start()
    except StorageError as error:
        raise StartError(f"storage: {error}") from error


@asynccontextmanager
async def batches_beside(
    file: Path | None, policy: Policy, pipeline: Pipeline, bodies: BodyMemory, say: Callable[[str], None]
) -> AsyncIterator[BatchApi | None]:
    """Take files and batches in a relay, whose decider has opened the storage; None: the policy does not offer them.
    Raises StartError."""
    storage = None if file is None else storage_of(file, policy)
    if policy.batches is None or storage is None:
        yield None
        return
    site = BatchSite(policy.batches, storage, pipeline, bodies, say)
    batches = BatchApi(site)
    try:
        try:
            await storage.open_beside()
            await batches.start()
        except (StorageError, OSError) as error:
            raise StartError(f"batches: {site.told(error)}") from error
        yield batches
    finally:
        await batches.aclose()
        await storage.aclose()


async def batches_begun(gateway: Gateway) -> None:
    """Take files and batches, where the policy offers them. Raises StartError."""
    try:
        await gateway.offer_batches()
    except (StorageError, OSError) as error:
        raise StartError(f"batches: {error}") from error
