"""Entries that the console shows, by key, with the tick of each one's last change. A watcher receives what has changed
since its last message.

The only state of a watcher is one number. A slow reader receives fewer messages, each with the newest state.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

GONE = 1000  # keys of entries that are no longer there; with more of them, everybody is told all again


class Entries:
    """The entries of now. `tick` counts the readings, from 1."""

    def __init__(self) -> None:
        self.tick = 0
        self._entries: dict[str, tuple[int, bytes]] = {}  # when it changed, and its JSON
        self._gone: dict[str, int] = {}
        self._whole_before = 0  # whoever was told last before this tick is told all

    def take(self, read: Mapping[str, object]) -> None:
        """A reading of all entries."""
        self.tick += 1
        for key, value in read.items():
            encoded = msgspec.json.encode(value)
            known = self._entries.get(key)
            if known is None or known[1] != encoded:
                self._entries[key] = self.tick, encoded
                self._gone.pop(key, None)
        if len(self._entries) > len(read):
            for key in [key for key in self._entries if key not in read]:
                del self._entries[key]
                self._gone[key] = self.tick
        if len(self._gone) > GONE:
            self._gone.clear()
            self._whole_before = self.tick

    def since(self, seen: int) -> bytes | None:
        """Entries that changed after the tick `seen` (0: all entries), as JSON; None if nothing changed."""
        whole = seen == 0 or seen < self._whole_before
        changed = {key: msgspec.Raw(encoded) for key, (tick, encoded) in self._entries.items() if whole or tick > seen}
        gone = [] if whole else [key for key, tick in self._gone.items() if tick > seen]
        if not (changed or gone or whole):
            return None
        return msgspec.json.encode({"whole": whole, "set": changed, "gone": gone})
