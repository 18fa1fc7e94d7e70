"""Progress of a pull on standard error: share, rate and the time that is left."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from gateway.shared.formatting import gibs, seconds, shown
from sidecar.pull.listing import Listing

EVERY = 5.0  # seconds between two lines
MIB = 1 << 20


class PullProgress:
    """A line at the beginning and every few seconds. `say` gets each line; `clock` gives seconds."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say = say
        self._clock = clock
        self._began = self._said = clock()
        self._size = self._resumed = 0

    def begin(self, listing: Listing, resumed: int) -> None:
        """Name the source, and the bytes that an earlier pull has left."""
        self._began = self._said = self._clock()
        self._size, self._resumed = listing.size, resumed
        kept = f", {gibs(resumed)} are here already" if resumed else ""
        self._say(f"{len(listing.files)} files, {gibs(listing.size)}, from {shown(listing.source)}{kept}")

    def here(self, size: int) -> None:
        """Note the bytes that are here now."""
        now = self._clock()
        if now < self._said + EVERY:
            return
        self._said = now
        if size >= self._size:
            self._say(f"all {gibs(self._size)} have come, checksums are compared")
            return
        rate = (size - self._resumed) / (now - self._began)
        left = f", {seconds((self._size - size) / rate)} left" if rate > 0 else ""
        share = size / max(1, self._size)
        self._say(f"{gibs(size)} of {gibs(self._size)}, {share:.0%}, {rate / MIB:.0f} MiB/s{left}")


def stderr_progress(*, quiet: bool) -> PullProgress:
    """Progress on standard error: one line that changes on a terminal, else line by line; `quiet`: nothing."""
    if quiet:
        return PullProgress(lambda _: None)
    before, after = ("\r\x1b[K", "") if sys.stderr.isatty() else ("", "\n")
    return PullProgress(lambda line: print(f"{before}sidecar: {line}", end=after, file=sys.stderr, flush=True))
