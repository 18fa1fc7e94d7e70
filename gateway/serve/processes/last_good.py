"""Content of files that a process went by last, for the next process of its role, where they are faulty by then.

There are secrets in it, so it is in memory that the parent shares with its children, and in no file.
"""

from __future__ import annotations

import hashlib
import mmap
import pickle
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
SIZE = 64 * 1024 * 1024  # bytes; the kernel gives only those that are written
LENGTH = 8  # bytes that the length has
HEAD = LENGTH + hashlib.sha256().digest_size  # and the rest's hash, since several processes may write


class LastGood(Generic[T]):
    """Made by the parent before it forks."""

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, SIZE)

    def load(self) -> T | None:
        """The content; None: there is none yet, or a process has ended while it wrote."""
        data = self._shared[HEAD : HEAD + int.from_bytes(self._shared[:LENGTH], "big")]
        if self._shared[:HEAD] != _head(data):
            return None
        found: T = pickle.loads(data)  # noqa: S301 # a process of ours wrote it
        return found

    def saving(self, apply: Callable[[T], None], first: T) -> Callable[[T], None]:
        """Save the content of the start, and return what applies others and saves each that was applied."""
        self.save(first)

        def applied(content: T) -> None:
            apply(content)
            self.save(content)

        return applied

    def save(self, content: T) -> None:
        """Keep this in place of what was there, if there is room."""
        data = pickle.dumps(content)
        if len(data) <= SIZE - HEAD:
            self._shared[HEAD : HEAD + len(data)] = data
            self._shared[:HEAD] = _head(data)


def _head(data: bytes) -> bytes:
    return len(data).to_bytes(LENGTH, "big") + hashlib.sha256(data).digest()
