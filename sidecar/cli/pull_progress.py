"""Progress of a pull on standard error: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from gateway.shared.formatting import gibs, seconds, shown
from sidecar.pull.listing import Listing

EVERY = 5.0  # seconds between two lines
MIB = 1 << 20


class Lines:
    """A line at the beginning, at trouble, and every few seconds. `clock` gives seconds."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say = say
        self._clock = clock
        self._began = self._said = clock()
        self._size = self._here = self._came = 0
        self._name = ""

    def begin(self, listing: Listing, here: int) -> None:
        self._began = self._said = self._clock()
        self._size, self._here = listing.size, here
        kept = f", {gibs(here)} are here already" if here else ""
        self._say(f"{len(listing.files)} files, {gibs(listing.size)}, from {shown(listing.source)}{kept}")

    def file(self, name: str) -> None:
        self._name = shown(name)

    def came(self, size: int) -> None:
        self._came += size
        now = self._clock()
        if now >= self._said + EVERY:
            self._said = now
            done, rate = self._here + self._came, self._came / (now - self._began)
            left = f", {seconds((self._size - done) / rate)} left" if rate > 0 else ""
            share = done / max(1, self._size)
            self._say(f"{gibs(done)} of {gibs(self._size)}, {share:.0%}, {rate / MIB:.0f} MiB/s{left}: {self._name}")

    def trouble(self, words: str) -> None:
        self._say(shown(words))

    def close(self) -> None:
        """Nothing to leave clean."""


class Bar:
    """A bar for all bytes, with the rate and the time that is left."""

    def __init__(self, console: Console) -> None:
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("", total=None)
        self._bar.start()

    def close(self) -> None:
        """Leave the terminal clean."""
        self._bar.stop()

    def begin(self, listing: Listing, here: int) -> None:
        self._bar.update(self._task, total=listing.size, completed=here)

    def file(self, name: str) -> None:
        self._bar.update(self._task, description=shown(name[-40:]).replace("[", "("))

    def came(self, size: int) -> None:
        self._bar.advance(self._task, size)

    def trouble(self, words: str) -> None:
        self._bar.console.print(shown(words), markup=False, highlight=False)


def shows(*, quiet: bool) -> Bar | Lines:
    """The bar where standard error is a terminal, else lines; `quiet`: nothing."""
    if quiet:
        return Lines(lambda _: None)
    if sys.stderr.isatty():
        return Bar(Console(stderr=True))
    return Lines(lambda line: print(f"sidecar: {line}", file=sys.stderr, flush=True))
