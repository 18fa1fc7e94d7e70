"""Ring buffer of an engine's last lines, bounded in lines and bytes."""

from __future__ import annotations

from collections import deque

LINES = 2000
SIZE = 256 * 1024  # bytes
LINE_MOST = 8 * 1024  # bytes of one line that are kept


class Ring:
    """`feed` takes output as it comes; the oldest lines go as newer ones need their room.

    What a carriage return has overwritten is not kept, so a progress bar is one line and not a thousand.
    """

    def __init__(self, lines: int = LINES, size: int = SIZE) -> None:
        self._lines: deque[bytes] = deque()
        self._most_lines = lines
        self._rest = b""  # of the line that is being written
        self._size = 0
        self.size = size

    def feed(self, data: bytes) -> None:
        """Take what was written next, cut anywhere."""
        *whole, rest = (self._rest + data).split(b"\n")
        for line in whole[-self._most_lines :]:
            shown = _shown(line)
            self._lines.append(shown)
            self._size += len(shown)
        self._rest = rest[-LINE_MOST:]
        while len(self._lines) > self._most_lines or self._size + len(self._rest) > self.size:
            if not self._lines:
                self._rest = self._rest[-self.size :]
                break
            self._size -= len(self._lines.popleft())

    def skip(self) -> None:
        """End the line that was being written: what follows it was not looked at."""
        if self._rest:
            self.feed(b"\n")

    def lines(self, last: int | None = None) -> list[str]:
        """The lines from old to new, at most `last`; the one being written is the newest."""
        found = [*self._lines, *([_shown(self._rest)] if self._rest else [])]
        if last is not None:
            found = found[max(0, len(found) - last) :]
        return [line.decode(errors="replace") for line in found]


def _shown(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2][:LINE_MOST]
