"""Connections that have not shown a token yet, bounded in all and for each address.

A port with a token cannot tell a flood from a member before the token comes. So a newcomer is never refused in favor of
strangers: one too many ends the connection that has shown nothing for longest, of its own address first. A member sends
its token with its first bytes, and so passes unless the whole bound is replaced before these bytes arrive.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

UNIX = "unix"  # the address of every client of a unix socket; an address's share does not hold for it


class Stranger(Protocol):
    """A connection that may be ended before it has shown a token."""

    def expel(self) -> None:
        """End the connection at once."""


class Strangers:
    """The strangers of one port. `add` makes room first, so neither bound is ever exceeded."""

    def __init__(self) -> None:
        self._addresses: dict[Stranger, str] = {}  # in order of arrival
        self._members: dict[str, dict[Stranger, None]] = {}  # by address, in order of arrival

    def __len__(self) -> int:
        return len(self._addresses)

    def __contains__(self, member: Stranger) -> bool:
        return member in self._addresses

    def add(self, member: Stranger, address: str, most: int, of_address: int) -> None:
        """Add a newcomer. Expel the oldest stranger of its address, or of all, where a bound is reached."""
        mine = self._members.get(address, {})
        if len(mine) >= of_address and address != UNIX:
            self._expel(iter(mine))
        elif len(self) >= most:
            self.expel_oldest()
        self._addresses[member] = address
        self._members.setdefault(address, {})[member] = None

    def expel_oldest(self) -> bool:
        """Expel the stranger that came first. False: there is none."""
        return self._expel(iter(self._addresses))

    def remove(self, member: Stranger) -> None:
        """Forget a stranger that has shown its token, or left. A second time changes nothing."""
        address = self._addresses.pop(member, None)
        if address is not None:
            mine = self._members[address]
            del mine[member]
            if not mine:
                del self._members[address]

    def _expel(self, members: Iterator[Stranger]) -> bool:
        oldest = next(members, None)
        if oldest is None:
            return False
        self.remove(oldest)
        oldest.expel()
        return True
