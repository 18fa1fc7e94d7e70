"""Progress of a start: the signs of it, and until when a start without one may go on.

A sign is a line of a kind that was not there before, or a progress bar whose share grows; the growth of the model's
folder, of a cache of compiled code, or of its GPU memory; bytes read; a stage reached. A line that is written again
with another time is none, so a start that hangs in NCCL and says so every minute is found out.

CPU time alone is a weaker sign. Compilation burns it without a line, and so do the workers of a hang, which wait for
each other in a loop. It counts until one `stall` after the last sign of another kind, and no longer: by then a
compiler has written into its cache, and torch's own watchdog over collectives (600 s) has spoken.

So a start is ended `stall` seconds after its last sign, or twice that while it burns CPU. There are finitely many kinds
of lines, and each bar's share only grows; what loops all the same meets `load_timeout`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from gateway.shared.files.units import MIB
from sidecar.core.startup_lines import kind_of, share_of

MOST_KINDS = 2000  # of lines that are told apart; beyond that a new one is no sign any more
BUSY = 0.5  # of one core, on average between two looks, is work
READ_LEAST = MIB  # bytes between two looks; what hangs reads a little of /proc
SHOWN = 120  # characters of a line


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """Reading of a start from outside. `cpu`: seconds of CPU time of its processes; `read`: bytes that they have read;
    `sizes`: bytes in each folder that they write to, and of GPU memory, by name."""

    cpu: float = 0.0
    read: int = 0
    sizes: Mapping[str, int] = {}


class StartProgress:
    """Progress of one start. The start is ended `stall` seconds after its last sign of progress. `at`: time of the last
    sign; `what`: the sign in words. Times are monotonic seconds."""

    def __init__(self, now: float, stall: float) -> None:
        self.at = now
        self.what = "its process began"
        self.stall = stall
        self._began = now
        self._shares: dict[str, float] = {}  # by kind of line, the largest share that its progress bar has told
        self._looked: Look | None = None
        self._looked_at = now
        self._read = 0
        self._bytes: dict[str, int] = {}  # by name, the most there were
        self._worked_at = -math.inf

    def reached(self, what: str, now: float) -> None:
        """Record a sign of progress; `what`: the sign in words."""
        self.at, self.what = now, what

    def wrote(self, line: str, now: float, *, whole: bool = True) -> None:
        """Record a line that the engine wrote; not `whole`: only the beginning of the line. A new kind of line and a
        progress bar that advances are signs of progress."""
        kind, share = kind_of(line), share_of(line)
        known = self._shares.get(kind)
        if known is None:
            if whole and kind and len(self._shares) < MOST_KINDS:
                self._shares[kind] = share or 0.0
                self.reached(f"it wrote {line.strip()[:SHOWN]!r}", now)
        elif share is not None and share > known:
            self._shares[kind] = share
            self.reached(f"it wrote {line.strip()[:SHOWN]!r}", now)
        elif share is not None and known == 1.0:  # the bar of the next file
            self._shares[kind] = share

    def looked(self, look: Look, now: float) -> None:
        """Record a reading from outside. Growing folders or GPU memory, and bytes read, are signs of progress."""
        for name, size in look.sizes.items():
            known = self._bytes.get(name)
            if known is not None and size > known:
                self.reached(f"{name} grew by {(size - known) / MIB:.1f} MiB", now)
            self._bytes[name] = max(size, known or 0)
        before, seconds = self._looked, now - self._looked_at
        if before is not None and look.read >= self._read + READ_LEAST:
            self.reached(f"it read {(look.read - self._read) / MIB:.0f} MiB", now)
        if before is not None and seconds > 0 and look.cpu - before.cpu >= BUSY * seconds:
            self._worked_at = now
        self._looked, self._looked_at, self._read = look, now, max(self._read, look.read)

    @property
    def ends_at(self) -> float:
        """From when on it has gone on for too long without a sign."""
        return max(self.at, min(self._worked_at, self.at + self.stall)) + self.stall

    def words(self, now: float) -> str:
        """Describe the last sign of progress and how long ago it was."""
        busy = ", though it burnt CPU" if self._worked_at > self.at else ""
        last = f"the last, {self.at - self._began:.1f} s after its start: {self.what}"
        return f"{now - self.at:.1f} s of them without progress{busy} ({last})"
