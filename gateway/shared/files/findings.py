"""Findings of the commands that check files: mistakes and advice, printed for people as they come.

A finding is `FILE:LINE:COLUMN: field: message`, then the line of the file with a caret under the place. A value that
may be a secret is not shown, nor the rest of its line.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from gateway.shared.files.checked import InvalidFile, Mark
from gateway.shared.files.plain_file import open_plain
from gateway.shared.files.yaml_file import MAX_BYTES

WIDEST = 160  # columns of a line that is shown

Source = Callable[[str], Sequence[str]]  # a file's lines, none where it cannot be read


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Mistake, or advice (`severity` warning). `hidden`: the line is not shown."""

    file: str
    at: Mark = Mark()
    field: str = ""
    message: str
    severity: Literal["error", "warning"] = "error"
    hidden: bool = False


def mistakes(error: InvalidFile) -> list[Finding]:
    """Every problem of a file. A line with a secret is not shown for another problem's sake either."""
    hidden = {(each.file, each.at.line) for each in error.problems if each.secret}
    return [
        Finding(
            file=each.file,
            at=each.at,
            field=each.path,
            message=each.message,
            hidden=(each.file, each.at.line) in hidden,
        )
        for each in error.problems
    ]


def mistake(file: str, message: str, field: str = "", at: Mark | None = None) -> Finding:
    """Finding of a mistake, in a whole file or at a field."""
    return Finding(file=file, at=at or Mark(), field=field, message=message)


def warning(file: str, field: str, message: str, at: Mark | None) -> Finding:
    """Finding of advice on a field; `at` None: the field has its default."""
    return Finding(file=file, at=at or Mark(), field=field, message=message, severity="warning")


def as_text(finding: Finding, source: Source) -> str:
    """Return the lines of a finding, without a last newline."""
    place = ":".join([finding.file, *(str(number) for number in (finding.at.line, finding.at.column) if number)])
    words = [
        *[place] * bool(finding.file),
        *["warning"] * (finding.severity == "warning"),
        *[finding.field] * bool(finding.field),
    ]
    return "\n".join([": ".join([*words, finding.message]), *_excerpt(finding, source)])


def _excerpt(finding: Finding, source: Source) -> list[str]:
    at = finding.at
    lines = source(finding.file) if at.column and not finding.hidden else ()
    if not 0 < at.line <= len(lines):
        return []
    width = max(1, at.width)
    end = at.column - 1 + width
    text = lines[at.line - 1].rstrip()[:end]
    if not text.isprintable() or end > WIDEST:
        return []
    margin = f"{at.line:5} | "
    return [margin + text, " " * (len(margin) - 2) + "| " + " " * (at.column - 1) + "^" * width]


class Report:
    """Findings on standard error, and how many there were."""

    def __init__(self) -> None:
        self.mistakes = self.warnings = 0
        self._lines: dict[str, list[str]] = {}

    def add(self, *found: Finding) -> None:
        """Print mistakes and warnings."""
        for finding in found:
            if finding.severity == "error":
                self.mistakes += 1
            else:
                self.warnings += 1
            print(as_text(finding, self._source), file=sys.stderr)

    def _source(self, file: str) -> list[str]:
        if file not in self._lines:
            self._lines[file] = []
            with suppress(OSError), open_plain(Path(file)) as opened:
                self._lines[file] = opened.read(MAX_BYTES).decode("utf-8-sig", "replace").split("\n")
        return self._lines[file]
