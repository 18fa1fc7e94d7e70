"""Progress of a start: its lines, the stages that they tell, and until when a start without a sign may go on.

Lines are as vLLM 0.5 to 0.33, torch and tqdm write them.

A sign is a line of a kind that was not there before, or a progress bar whose share grows; bytes that one of its
processes read or wrote, as a download and a compiler do; the growth of its GPU memory, or of its model's files on the
way from a hub, for which it may wait without a word while another process downloads them; a stage reached. A line that
is written again with another time is none, so a start that hangs in NCCL and says so every minute is found out.

CPU time alone is a weaker sign. Compilation burns it without a line, and so do the workers of a hang, which wait for
each other in a loop. It counts until one `stall` after the last sign of another kind, and no longer: by then a
compiler has read and written files, and torch's own watchdog over collectives (600 s) has spoken.

So a start is ended `stall` seconds after its last sign, or twice that while it burns CPU. There are finitely many kinds
of lines, and each bar's share only grows; what loops all the same meets `load_timeout`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Literal

import msgspec

from gateway.shared.files.units import MIB

Stage = Literal["process", "weights", "compile", "graphs"]
# From its beginning to its end: Python, workers and CUDA; weights; profiling and compilation; graphs, warm-up calls.
STAGES: tuple[Stage, ...] = ("process", "weights", "compile", "graphs")
STAGE_WORDS: dict[Stage, str] = {
    "process": "its process begins",
    "weights": "loading weights",
    "compile": "compiling",
    "graphs": "KV cache and graphs",
}

READ = 1000  # characters of a line; what follows is not looked at
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# Numbers, times, addresses, ids, names of workers and files: whatever has a digit in it.
_VARIES = re.compile(r"(?<!\S)\S*\d\S*")
_WORD = re.compile(r"[^\W\d_]{2,}")
_COUNT = re.compile(
    r"(?<![\w/.:-])(\d+(?:\.\d+)?)([kKMGT]?)(?:i?B)?/(\d+(?:\.\d+)?)([kKMGT]?)(?:i?B)?(?![\w/.:-])",
)
_PERCENT = re.compile(r"(?<![\w.])(\d{1,3}(?:\.\d+)?) ?%")
_UNITS = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_MARKS: dict[Stage, re.Pattern[str]] = {
    "weights": re.compile(r"Starting to load model|Loading \w+(?: \w+)? (?:checkpoint shards|using)|Loading weights"),
    "compile": re.compile(r"Model loading took|Loading model weights took|Warming up model for the compilation"),
    "graphs": re.compile(r"Capturing (?:CUDA ?graph|cudagraph|the model for CUDA graph)", re.IGNORECASE),
}


def kind_of(line: str) -> str:
    """Kind of a line: its words, without whatever has a digit in it. A line that is written again and again with
    another time is of one kind; empty: it has no words."""
    plain = _VARIES.sub(" ", _COLOUR.sub("", line[:READ]))
    return " ".join(_WORD.findall(plain))


def share_of(line: str) -> float | None:
    """The share (0..1) that a progress bar tells, by its count, else by its percentage; None: it tells none."""
    line = line[:READ]
    for done, unit, total, of in _COUNT.findall(line):
        whole = float(total) * _UNITS[of]
        part = float(done) * _UNITS[unit]
        if 0 <= part <= whole and whole > 0:
            return part / whole
    found = _PERCENT.search(line)
    return None if found is None or float(found[1]) > 100 else float(found[1]) / 100


def stage_of(line: str) -> Stage | None:
    """Stage of a start that a line tells to be under way; None: it tells none."""
    line = line[:READ]
    return next((stage for stage, mark in _MARKS.items() if mark.search(line)), None)


# -- signs of progress ------------------------------------------------------------------------------------------------

MOST_KINDS = 2000  # of lines that are told apart; beyond that a new one is no sign any more
BUSY = 0.5  # of one core, on average between two looks, is work
MOVED_LEAST = MIB  # bytes between two looks; what hangs reads a little of /proc and writes lines
SHOWN = 120  # characters of a line


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """Reading of a start from outside. `cpu`: seconds of CPU time of its processes; `moved`: bytes that each has read
    and written, by pid; `gpu`: the most bytes that they have held of a GPU; `stored`: bytes of its model's files where
    a hub's models are kept."""

    cpu: float = 0.0
    moved: Mapping[int, int] = {}
    gpu: int = 0
    stored: int = 0


class StartProgress:
    """Progress of one start. The start is ended `stall` seconds after its last sign of progress. `at`: time of the last
    sign; `what`: the sign in words. `awaits`: the reason why its next stage is not reached yet. Times are monotonic
    seconds."""

    def __init__(self, now: float, stall: float) -> None:
        self.at = now
        self.what = "its process began"
        self.awaits = "nothing was asked yet"
        self.stall = stall
        self._began = now
        self._shares: dict[str, float] = {}  # by kind of line, the largest share that its progress bar has told
        self._looked: Look | None = None
        self._looked_at = now
        self._worked_at = -math.inf
        self._stored = 0  # the most there were

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
        """Record a reading from outside. Growing GPU memory or model files and bytes moved are signs of progress, by
        another process than before too: compilers come and go. The first reading only tells how much there was."""
        before, seconds = self._looked, now - self._looked_at
        self._looked, self._looked_at = look, now
        grown, self._stored = look.stored - self._stored, max(self._stored, look.stored)
        if before is None:
            return
        moved = sum(max(0, size - before.moved.get(pid, 0)) for pid, size in look.moved.items())
        if moved >= MOVED_LEAST:
            self.reached(f"it read and wrote {moved / MIB:.1f} MiB", now)
        if grown > 0:
            self.reached(f"its model's files grew by {grown / MIB:.1f} MiB", now)
        if look.gpu > before.gpu:
            self.reached(f"its GPU memory grew by {(look.gpu - before.gpu) / MIB:.1f} MiB", now)
        if seconds > 0 and look.cpu - before.cpu >= BUSY * seconds:
            self._worked_at = now

    @property
    def ends_at(self) -> float:
        """From when on it has gone on for too long without a sign."""
        return max(self.at, min(self._worked_at, self.at + self.stall)) + self.stall

    def words(self, now: float) -> str:
        """Describe the last sign of progress and how long ago it was."""
        busy = ", though it burnt CPU" if self._worked_at > self.at else ""
        last = f"the last, {self.at - self._began:.1f} s after its start: {self.what}"
        return f"{now - self.at:.1f} s of them without progress{busy} ({last})"
