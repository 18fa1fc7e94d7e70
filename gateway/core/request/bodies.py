"""One budget of memory for the bodies of all requests: coming in, waiting in queues, and being sent to engines.

What one owner, a tenant or a client's address, may have of it is bounded too: no client can keep the others out. Bodies
that are no larger than what a connection and a call cost anyway are not counted.
"""

from __future__ import annotations

from typing import Final

SMALL: Final = 4096  # bytes of a body that nobody counts


class Bodies:
    """Bytes `held` of `memory`, of which one owner may have the `share`. `refused` counts by what was full."""

    __slots__ = ("_owners", "held", "memory", "refused", "share")

    def __init__(self, memory: int = 512 * 1024**2, share: float = 0.5) -> None:
        self.held = 0
        self.refused = {"memory": 0, "share": 0}
        self._owners: dict[str, int] = {}
        self.apply(memory, share)

    def __repr__(self) -> str:
        return f"<Bodies {self.held} of {self.memory} bytes, {len(self._owners)} owners>"

    def apply(self, memory: int, share: float) -> None:
        """Go by another policy from now on. What is held stays, though it be more."""
        self.memory = memory
        self.share = share

    def resize(self, owner: str, change: int) -> str:
        """Bytes of the owner more, or less. Where there is no room nothing changes, and the answer says what is full:
        `memory`, or the owner's `share`."""
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


class Held:
    """The bytes of one body. Whoever has it releases it, once or more often."""

    __slots__ = ("_bodies", "owner", "size")

    def __init__(self, bodies: Bodies, owner: str) -> None:
        self._bodies = bodies
        self.owner = owner
        self.size = 0

    def __repr__(self) -> str:
        return f"<Held {self.size} bytes of {self.owner}>"

    def resize(self, size: int) -> str:
        """Hold so many bytes from now on. What is full, where that cannot be; then nothing changes."""
        full = self._bodies.resize(self.owner, size - self.size)
        if not full:
            self.size = size
        return full

    def release(self) -> None:
        """Give all of it back."""
        self.resize(0)
