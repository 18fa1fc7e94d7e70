"""Storage of one gateway, from its start to its end: where it is, and when another gateway may have it."""

from __future__ import annotations

from pathlib import Path

from gateway.core.policy.policy import Policy
from gateway.serve.assembly import Gateway
from gateway.serve.starting import StartError
from gateway.serve.token_use import TokenUse
from gateway.shared.storage import Storage, StorageError

# Seconds for the gateway before, which was killed or hands over, to let go of the folder.
LET_GO_WITHIN = 10.0


def storage_of(file: Path, policy: Policy) -> Storage | None:
    """The storage that the policy of this file names, not opened yet; None: it names none."""
    if policy.storage is None:
        return None
    return Storage(file.parent / policy.storage.folder)


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
            await storage.open(LET_GO_WITHIN)
        await use.start()
    except StorageError as error:
        raise StartError(f"storage: {error}") from error


async def batches_begun(gateway: Gateway) -> None:
    """Take files and batches, where the policy offers them. Raises StartError."""
    try:
        await gateway.offer_batches()
    except (StorageError, OSError) as error:
        raise StartError(f"batches: {error}") from error
