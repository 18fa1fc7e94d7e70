"""Seat board: which relays of one gateway have a seat left, in memory that all its processes share.

Relays accept from the same listening sockets. One that has no seat left leaves them to the others, as long as one of
those has a seat, or is about to start. A hint and no lock: who is wrong about another keeps a client waiting for a
moment, or refuses it.
"""

from __future__ import annotations

import mmap


class SeatBoard:
    """Board of `relays` relays, all without a free seat at first. Processes that are forked later share it."""

    def __init__(self, relays: int) -> None:
        self._free = mmap.mmap(-1, relays)  # a byte for each; writing one is one step

    def tell(self, index: int, free: bool) -> None:
        """Whether that relay has a seat left."""
        self._free[index] = free

    def elsewhere(self, index: int) -> bool:
        """Whether a relay other than that one has a seat left."""
        return any(self._free[:index]) or any(self._free[index + 1 :])


class RelaySeats:
    """The board, as the relay with this index has it."""

    def __init__(self, board: SeatBoard, index: int) -> None:
        self._board = board
        self._index = index

    def tell(self, free: bool) -> None:
        """Whether this relay has a seat left."""
        self._board.tell(self._index, free)

    @property
    def elsewhere(self) -> bool:
        """Whether another relay has a seat left."""
        return self._board.elsewhere(self._index)
