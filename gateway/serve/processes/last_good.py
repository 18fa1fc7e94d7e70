"""Configuration that a decider went by last, for the next process of its role, where the files are faulty by then.

It has secrets, so it is in memory that the parent shares with its children, and in no file.
"""

from __future__ import annotations

import mmap
import pickle
from collections.abc import Callable

from gateway.decider.loading import Configuration

SIZE = 64 * 1024 * 1024  # bytes; the kernel gives only those that are written
HEAD = 8  # bytes: of the length


class LastGood:
    """Made by the parent before it forks."""

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, SIZE)

    def load(self) -> Configuration | None:
        """The configuration; None: there is none yet."""
        length = int.from_bytes(self._shared[:HEAD], "big")
        if not length:
            return None
        found: Configuration = pickle.loads(self._shared[HEAD : HEAD + length])  # noqa: S301 # a process of ours wrote it
        return found

    def saving(self, apply: Callable[[Configuration], None], first: Configuration) -> Callable[[Configuration], None]:
        """Save the configuration of the start, and return what applies others and saves each that was applied."""
        self._save(first)

        def applied(configuration: Configuration) -> None:
            apply(configuration)
            self._save(configuration)

        return applied

    def _save(self, configuration: Configuration) -> None:
        data = pickle.dumps(configuration)
        if len(data) <= SIZE - HEAD:
            self._shared[:HEAD] = bytes(HEAD)  # none, should this process end before the rest is written
            self._shared[HEAD : HEAD + len(data)] = data
            self._shared[:HEAD] = len(data).to_bytes(HEAD, "big")
