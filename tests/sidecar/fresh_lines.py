"""`python -m tests.sidecar.fresh_lines`: how many published lines of failed starts the diagnosis gets right.

The lines of `corpus/fresh_lines.jsonl` were gathered in rounds. A round's first score is taken before anybody looks at
which of its lines are answered, and stands in docs/figures.md. Then it is halved by a hash of its lines. Of the rounds
2 and 3 the misses of both halves were read before kinds were mended, so what their halves say today is no evidence.
Each line is told twice: alone, and after the frame of its traceback, with the API server's words behind.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import msgspec

from sidecar.core.diagnosis import diagnosis

FILE = Path(__file__).parent / "corpus" / "fresh_lines.jsonl"
SECOND = (
    "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
)


class Fresh(msgspec.Struct, frozen=True):
    """One line, its `kind` and its source. `before`: its traceback's last frame. `round`: when it was gathered."""

    line: str
    kind: str
    source: str
    round: int = 1
    before: tuple[str, ...] = ()

    @property
    def building(self) -> bool:
        """Whether the kinds were made with it."""
        return hashlib.sha256(self.line.encode()).digest()[0] % 2 == 0

    def found(self, *, alone: bool) -> str:
        """The kind that is found."""
        return diagnosis([self.line] if alone else [*self.before, self.line, SECOND]).kind


def fresh_lines(*, building: bool) -> list[Fresh]:
    """The lines of a half."""
    read = [msgspec.convert(json.loads(line), Fresh) for line in FILE.read_text().splitlines()]
    return [each for each in read if each.building is building]


def right(lines: list[Fresh], *, alone: bool) -> int:
    """How many get their kind."""
    return sum(each.found(alone=alone) == each.kind for each in lines)


def main() -> int:
    """Print the scores of each half and round, and of the building halves what is wrong."""
    print("half      round  lines  right: alone  as in a log")
    for building in (True, False):
        lines = fresh_lines(building=building)
        for number in sorted({each.round for each in lines}):
            part = [each for each in lines if each.round == number]
            alone, whole = (right(part, alone=each) / len(part) for each in (True, False))
            print(f"{'building' if building else 'judging':8} {number:6} {len(part):6} {alone:13.0%} {whole:12.0%}")
    for each in fresh_lines(building=True):
        if (found := each.found(alone=False)) != each.kind:
            print(f"{each.kind}, not {found}: {each.line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
