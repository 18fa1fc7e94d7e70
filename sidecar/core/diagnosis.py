"""Why an engine failed, as its last lines tell it: the line a person would look for, and whether a GPU had too little.

vLLM tells a failed start twice: the engine's process with the cause, then the API server, last and at length, that
there was one. Lines are as vLLM 0.9 to 0.33 and torch write them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

LOOKED_AT = 200  # lines
SHOWN = 400  # characters of a line

# Exact, since vLLM also gives advice about memory in plain words.
_OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|[Oo]ut of memory\. Tried to allocate|(?:CUDA|HIP)(?: [Ee]rror:)? out of memory"
    r"|(?:CUDA_|hip|cuda)\w*(?:OUT_OF_MEMORY|OutOfMemory|MemoryAllocation)"
    r"|Free memory on device|less than desired GPU memory utilization|No available memory for the cache blocks"
)
# Where, in `ValueError: no such model` and `api_server.py: error: unrecognized arguments`, the words begin.
_TELLING = re.compile(r"(?:\b[\w.]*(?:Error|Exception|Interrupt|Exit)\b|\berror|\bfatal)\s*: *\S", re.IGNORECASE)
# What says only that something has been said.
_SECOND_HAND = re.compile(
    r"Engine core initialization failed|See (?:the )?root cause|EngineDeadError|EngineCore (?:failed|encountered)"
    r"|See stack trace|WorkerProc (?:failed|hit an exception)|Worker proc \S+ died"
)
# Pydantic's first line only counts; what is wrong stands in the next, or below the field's name.
_COUNTED = re.compile(r"\d+ validation errors? for \S+$")
_FURTHER = re.compile(r" \[type=.*|For further information.*")
# What stands before the words: colours, `(EngineCore_0 pid=12)`, `ERROR 11-21 16:00:00 [core.py:700]`.
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_PREFIX = re.compile(r"(?:\([^()]*pid=\d+\)\s*)?(?:[A-Z]{4,8}\s+\d\d-\d\d \d\d:\d\d:\d\d\s+(?:\[[^\]]*\]\s*)?)?\s*")


class Diagnosis(msgspec.Struct, frozen=True):
    """`line`: the most telling one, empty where nothing was written. `out_of_memory`: of a GPU, that is."""

    line: str
    out_of_memory: bool


def diagnosis(lines: Sequence[str]) -> Diagnosis:
    """What the last lines of a failed engine's output say."""
    words = [said for line in lines[-LOOKED_AT:] if (said := _words(line))]
    memory = [line for line in words if _OUT_OF_MEMORY.search(line)]
    telling = [line for line in words if _TELLING.search(line)]
    first_hand = [line for line in telling if not _SECOND_HAND.search(line)]
    found = next((candidates[-1] for candidates in (memory, first_hand, telling, words) if candidates), "")
    if _COUNTED.search(found):
        at = len(words) - words[::-1].index(found)
        details = " ".join(_FURTHER.sub("", line) for line in words[at : at + 2]).strip()
        found = f"{found}: {details}" if details else found
    return Diagnosis(found if len(found) <= SHOWN else f"{found[:SHOWN]}...", bool(memory))


def _words(line: str) -> str:
    """A line without what its logger puts before it, and without what a terminal would obey."""
    plain = _COLOUR.sub("", line)
    said = plain[match.end() :] if (match := _PREFIX.match(plain)) else plain
    return "".join(character if character.isprintable() else " " for character in said).strip()
