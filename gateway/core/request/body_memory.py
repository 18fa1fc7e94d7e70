"""Memory budget for the bodies of all requests: while they arrive, wait in queues, and go to engines.

Each owner, a tenant or a client's address, may hold a share of it at most, so no client keeps the others out. Bodies
of up to SMALL bytes are not counted: a connection and a call cost as much anyway.
"""

from __future__ import annotations

from typing import Final

SHARE: Final = 0.5  # of the memory that one owner may have
SMALL: Final = 4096  # bytes of a body that is not counted


class BodyMemory:
    """The budget: `held` of `memory` bytes are in use, of which one owner may have `share` (0..1).

    `refused` counts refusals by the limit that was reached, `memory` or `share`.
    """

    def __init__(self, memory: int = 512 * 1024**2, share: float = SHARE) -> None:
        self.held = 0
        self.refused = {"memory": 0, "share": 0}
        self._owners: dict[str, int] = {}
        self.memory = memory
        self.share = share

    def apply(self, memory: int) -> None:
        """Set a new budget. Bytes in use stay, even above it."""
        self.memory = memory

    def resize(self, owner: str, change: int) -> str:
        """Add `change` bytes (or take them away) for the owner.

        Returns an empty string, or the limit that has no room, `memory` or `share`; then nothing has changed.
        """
        own = self._owners.get(owner, 0) + change
        if change > 0:
            full = ""
            if self.held + change > self.memory:
                full = "memory"
            elif own > self.memory * self.share:
                full = "share"
            if full:
                self.refused[full] += 1
                return full
        self.held += change
        if own:
            self._owners[owner] = own
        else:
            self._owners.pop(owner, None)
        return ""


class BodyLease:
    """The bytes of one body, to be released by its holder. Releasing it twice does no harm."""

    __slots__ = ("_bodies", "owner", "size")

    def __init__(self, bodies: BodyMemory, owner: str) -> None:
        self._bodies = bodies
        self.owner = owner
        self.size = 0

    def resize(self, size: int) -> str:
        """Hold `size` bytes from now on. Returns as `BodyMemory.resize` does."""
        full = self._bodies.resize(self.owner, size - self.size)
        if not full:
            self.size = size
        return full

    def release(self) -> None:
        """Return all bytes to the budget."""
        self.resize(0)
