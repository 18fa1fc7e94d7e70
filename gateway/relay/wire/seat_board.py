"""Seat board: which relays of one gateway have a seat left, in memory that all its processes share.

Relays accept from the same listening sockets. One that has no seat left leaves them to the others, as long as one of
those has a seat, or is about to start. A hint and no lock: who is wrong about another keeps a client waiting for a
moment, or refuses it.
"""

from __future__ import annotations

import mmap


def seat_board(relays: int) -> mmap.mmap:
    """Return a board of so many relays, all without a free seat at first. Processes that are forked later share it."""
    return mmap.mmap(-1, relays)  # a byte for each; writing one is one step


class RelaySeats:
    """The board, as the relay with this index has it."""

    def __init__(self, board: mmap.mmap, index: int) -> None:
        self._board = board
        self._index = index

    def tell(self, free: bool) -> None:
        """Tell whether this relay has a seat left."""
        self._board[self._index] = free

    @property
    def elsewhere(self) -> bool:
        """Whether another relay has a seat left."""
        return any(self._board[: self._index]) or any(self._board[self._index + 1 :])
