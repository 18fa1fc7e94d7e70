"""Findings of the commands that check files: mistakes and advice, printed for people as they come.

A finding is `FILE:LINE:COLUMN: field: message`, then the line of the file with a caret under the place. A line with a
value that may be a secret is not shown, also for another finding's sake.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from gateway.shared.command_line import Mistake
from gateway.shared.files.checked import Mark, Problem, Value, spelled
from gateway.shared.files.checked import Path as FieldPath
from gateway.shared.files.plain_file import open_plain
from gateway.shared.files.yaml_file import MAX_BYTES

WIDEST = 160  # columns of a line that is shown


def placed(
    file: str, root: Value | None, found: Iterable[tuple[FieldPath, str]], *, warning: bool = False
) -> list[Problem]:
    """Findings about fields, in the order of the file's lines. `root`: its tree; None: nothing is written there."""
    marks = [(path, text, (None if root is None else root.mark_of(path)) or Mark()) for path, text in found]
    told = [Problem(file=file, at=at, path=spelled(path), found=text, warning=warning) for path, text, at in marks]
    return sorted(told, key=lambda each: each.at.line)


def as_text(found: Problem, lines: Sequence[str]) -> str:
    """Return the lines of a finding, without a last newline. `lines`: those of its file, none where it is not shown."""
    place = ":".join([found.file, *(str(number) for number in (found.at.line, found.at.column) if number)])
    words = [
        *[place] * bool(found.file),
        *["warning"] * found.warning,
        *[found.path] * bool(found.path),
    ]
    return "\n".join([": ".join([*words, found.message]), *_excerpt(found, lines)])


def _excerpt(found: Problem, lines: Sequence[str]) -> list[str]:
    at = found.at
    if not (at.column and 0 < at.line <= len(lines)):
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

    def add(self, findings: Iterable[Problem]) -> None:
        """Print mistakes and warnings of one checked file, and of those that it names."""
        every = list(findings)
        hidden = {(found.file, found.at.line) for found in every if found.secret}
        for found in every:
            self.warnings += found.warning
            self.mistakes += not found.warning
            lines = [] if (found.file, found.at.line) in hidden else self._source(found.file)
            print(as_text(found, lines), file=sys.stderr)

    def _source(self, file: str) -> list[str]:
        if file not in self._lines:
            self._lines[file] = []
            with suppress(OSError), open_plain(Path(file)) as opened:
                self._lines[file] = opened.read(MAX_BYTES).decode("utf-8-sig", "replace").split("\n")
        return self._lines[file]


def check_files(
    given: argparse.Namespace,
    program: str,
    schema: Callable[[], str],
    reference: Callable[[], str],
    checked: Callable[[str], tuple[str, Iterable[Problem]]],
) -> int:
    """Do what the flags of a `check` command say; the exit status. `checked` gives a text about a file, empty where
    the file cannot be used, and the findings in it. Raises Mistake."""
    if given.schema or given.reference:
        print((schema if given.schema else reference)(), end="")
        return 0
    if not given.files:
        raise Mistake(f"the following arguments are required: FILE (see {program} check --help)")
    report = Report()
    for name in given.files:
        text, found = checked(name)
        report.add(found)
        if text:
            print(text)
    return 2 if report.mistakes or (report.warnings and getattr(given, "strict", False)) else 0
