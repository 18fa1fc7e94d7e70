"""Lines of an engine's start: their kind, the share that a progress bar tells, and the stage that they belong to.

Lines are as vLLM 0.5 to 0.33, torch and tqdm write them.
"""

from __future__ import annotations

import re
from typing import Literal

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
_VARIES = re.compile(r"\S*\d\S*")
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
