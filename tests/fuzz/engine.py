"""Coverage-guided fuzzer in plain Python: it mutates inputs, and keeps those that reach a new line.

`sys.settrace` tells the lines, so what guides the search also counts the work: an input may take so many lines of the
project's own code for each of its bytes. No clock, so a run with a seed and a number of inputs is the same everywhere.
"""

from __future__ import annotations

import random
import sys
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tests.fuzz.targets import TARGETS, Target

ROOT = Path(__file__).parents[2]
CORPUS = Path(__file__).parent / "corpus"
LONGEST = 16 * 1024  # bytes of an input
_OURS = (str(ROOT / "gateway"), str(ROOT / "sidecar"))


class Found(AssertionError):
    """An input that broke one of the rules; the message has it."""


class Lines:
    """Counts the lines of the project that run in its block, and knows which. Raises Found in them beyond `most`."""

    def __init__(self, most: float) -> None:
        self.count = 0
        self.seen: set[tuple[CodeType, int]] = set()
        self._most = most
        self._before: Any = None

    def __enter__(self) -> Lines:
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(_OURS):
            return None
        add, most = self.seen.add, self._most

        def line(frame: FrameType, event: str, argument: Any) -> Any:
            if event == "line":
                self.count += 1
                add((code, frame.f_lineno))
                if self.count > most:
                    raise Found(f"more than {most:.0f} lines of Python")
            return line

        return line


def corpus(name: str) -> list[bytes]:
    """The inputs that are kept for a target."""
    return [file.read_bytes() for file in sorted((CORPUS / name).iterdir())]


def check(target: Target, data: bytes, rng: random.Random) -> Lines:
    """Hold a target to its rules for one input. Raises Found."""
    with Lines(target.once + target.per_byte * len(data)) as lines:
        whole = _outcome(target, [data], data)
    if target.cut:
        cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randrange(1, 8)))
        ends = [0, *cuts, len(data)]
        pieces = [data[start:end] for start, end in pairwise(ends)]
        with Lines(2 * target.once + 2 * target.per_byte * len(data)) as more:
            if _outcome(target, pieces, data) != whole:
                raise Found(f"it is read otherwise in pieces that end at {cuts}: {data!r}")
        lines.seen |= more.seen
    return lines


def _outcome(target: Target, pieces: list[bytes], data: bytes) -> Any:
    try:
        return target.read(pieces)
    except target.errors as error:
        return type(error)
    except Found as found:
        raise Found(f"{found} for {len(data)} bytes: {data[:200]!r}") from None
    except Exception as error:
        raise Found(f"{error!r} is no error of its own: {data[:500]!r}") from error


def grown(data: bytes, times: int, rng: random.Random) -> bytes:
    """The input with a part of it many times, as long as may be."""
    start = rng.randrange(len(data) + 1)
    end = rng.randrange(start, min(len(data), start + 64) + 1)
    part = data[start:end]
    return data[:end] + part * (min(times, LONGEST // (len(part) or 1))) + data[end:]


def mutated(data: bytes, pool: list[bytes], words: tuple[bytes, ...], rng: random.Random) -> bytes:
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(data) + 1)
        to = min(len(data), at + rng.choice((0, 1, 2, 8, 40)))
        kind = rng.randrange(6)
        if kind == 0:
            data = data[:at] + rng.choice(words) + data[to:]
        elif kind == 1:
            data = data[:at] + rng.choice(words) + data[at:]
        elif kind == 2:
            data = data[:at] + data[to:]
        elif kind == 3:
            data = data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
        elif kind == 4:
            other = rng.choice(pool)
            data = data[:at] + other[rng.randrange(len(other) + 1) :]
        else:
            data = grown(data, rng.choice((2, 2, 4, 64)), rng)
    return data[:LONGEST]


class Fuzzer:
    """One run over one target. `pool` grows by the inputs that reached something new."""

    def __init__(self, name: str, seed: int) -> None:
        self.target = TARGETS[name]
        self.pool = corpus(name)
        self.tried = 0
        self._rng = random.Random(f"{name} {seed}")
        self._seen: set[tuple[CodeType, int]] = set()
        for data in self.pool:
            self.take(data)

    @property
    def lines(self) -> int:
        """Lines of the project that were reached."""
        return len(self._seen)

    def take(self, data: bytes) -> bool:
        """Check one input; whether it reached something new. Raises Found."""
        self.tried += 1
        seen = check(self.target, data, self._rng).seen
        if seen <= self._seen:
            return False
        self._seen |= seen
        return True

    def step(self) -> None:
        """One mutated input. Raises Found."""
        data = mutated(self._rng.choice(self.pool), self.pool, self.target.words, self._rng)
        if self.take(data):
            self.pool.append(data)

    def grow(self) -> None:
        """A long input, made of one of the pool. Raises Found."""
        check(self.target, grown(self._rng.choice(self.pool), 1 << 20, self._rng)[:LONGEST], self._rng)
