"""Visitors of a member's port that have not shown the cluster's token: their number and their log lines are bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gateway.shared.strangers import Stranger, Strangers

MOST = 256  # visitors at once
OF_ADDRESS = 64  # of these, from one address: the relays of a whole machine may come at once
EVERY = 60.0  # seconds between two lines about one address
NAMED = 16  # addresses that get a line of their own in that time
OTHERS = "other addresses"


class Visitors:
    """The visitors of one port. `say` takes a line for the operator."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._strangers = Strangers()
        self._more: dict[str, int] = {}  # refusals since the last line, by address
        self._why: dict[str, str] = {}  # reason of the last one

    def add(self, visitor: Stranger, address: str) -> None:
        """Add a newcomer. Where there are too many, the visitor that has shown nothing for longest is cut off."""
        self._strangers.add(visitor, address, MOST, OF_ADDRESS)

    def remove(self, visitor: Stranger) -> None:
        """Forget a visitor that was let in, refused, or has left."""
        self._strangers.remove(visitor)

    def refused(self, address: str, why: str) -> None:
        """Log a refusal. After the first line about an address, the others are counted and told once a minute."""
        if address not in self._more and len(self._more) >= NAMED:
            address = OTHERS
        if address in self._more:
            self._more[address] += 1
            self._why[address] = why
        else:
            self._line(address, f"was not let in: {why}")

    def _line(self, address: str, said: str) -> None:
        self._say(f"cluster: {address} {said}")
        self._more[address] = 0
        asyncio.get_running_loop().call_later(EVERY, self._tell, address)

    def _tell(self, address: str) -> None:
        more, why = self._more.pop(address), self._why.pop(address, "")
        if more:
            self._line(address, f"was not let in {more} more times in {EVERY:g} s: {why}")
