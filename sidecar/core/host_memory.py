"""Ledger of host memory that models asleep at level 1 fill.

It is booked when the sleep is decided, so that two GPUs that evict at once do not count on the same bytes. vLLM keeps
its pinned copies after it has woken (vllm#16663), so what an engine has once taken stays booked until it ends.
"""

from __future__ import annotations


class HostMemory:
    """Bookings of at most `bound` bytes in all, by profile. An engine that is taken over may exceed it. Engines that
    keep pools of host memory leave less of it to those that sleep."""

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self._booked: dict[str, int] = {}  # for sleeps that are decided and not over
        self._taken: dict[str, int] = {}  # by engines that have slept at level 1
        self._pools: dict[str, int] = {}  # by engines, from their start on

    @property
    def room(self) -> int:
        """Bytes for all that sleep."""
        return max(0, self.bound - sum(self._pools.values()))

    def keep(self, profile: str, size: int) -> None:
        """Note that an engine keeps `size` bytes from its start to its end."""
        self._pools[profile] = size

    def held(self, profile: str) -> int:
        """Bytes that a profile has."""
        return max(self._booked.get(profile, 0), self._taken.get(profile, 0))

    @property
    def total(self) -> int:
        """Bytes that all have."""
        return sum(self.held(profile) for profile in self._booked.keys() | self._taken.keys())

    def fits(self, profile: str, size: int) -> bool:
        """Whether a profile can have `size` bytes in all."""
        held = self.held(profile)
        return size <= held or self.total - held + size <= self.room

    def book(self, profile: str, size: int) -> bool:
        """Book `size` bytes for a sleep of this profile; False: there are not so many."""
        if not self.fits(profile, size):
            return False
        self._booked[profile] = size
        return True

    def take(self, profile: str, size: int) -> bool:
        """The engine sleeps, and has taken `size` bytes for as long as it lives. False: these are too many, and the
        booking stays."""
        if not self.fits(profile, size):
            return False
        self._booked.pop(profile, None)
        self._taken[profile] = max(size, self._taken.get(profile, 0))
        return True

    def cancel(self, profile: str) -> None:
        """Cancel the booking of a sleep that is over or failed. Only the bytes that the engine has taken still
        count."""
        self._booked.pop(profile, None)

    def adopt(self, profile: str, size: int) -> None:
        """An engine that is taken over has taken `size` bytes, whether there are so many or not."""
        if size:
            self._taken[profile] = size

    def taken(self, profile: str) -> int:
        """Bytes that its engine has taken."""
        return self._taken.get(profile, 0)

    def release(self, profile: str) -> None:
        """Release all host memory of an engine that has ended."""
        self._booked.pop(profile, None)
        self._taken.pop(profile, None)
        self._pools.pop(profile, None)
