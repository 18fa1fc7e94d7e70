"""Findings in a file, errors and warnings: as text for people, as JSON for programs, as annotations of a pull request.

Text is `FILE:LINE:COLUMN: field: message`, then the line of the file with a caret under the place. A value that may be
a secret is not shown, nor the rest of its line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from gateway.shared.files.checked import InvalidFile, Mark, Problem

FORMATS = ("text", "json", "github")
WIDEST = 160  # columns of a line that is shown
_ESCAPES = {"%": "%25", "\r": "%0D", "\n": "%0A"}
_IN_PROPERTIES = {**_ESCAPES, ":": "%3A", ",": "%2C"}

Source = Callable[[str], Sequence[str]]  # a file's lines, none where it cannot be read


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Mistake, or advice (`severity` warning). `line` and `column` count from 1; 0: not known."""

    file: str
    line: int = 0
    column: int = 0
    field: str = ""
    message: str
    severity: str = "error"


class Shown(msgspec.Struct, frozen=True):
    """A finding, and how much of its line to mark; `hidden`: the line is not shown."""

    finding: Finding
    width: int = 0
    hidden: bool = False


def mistakes(error: InvalidFile) -> list[Shown]:
    """Every problem of a file. A line with a secret is not shown for another problem's sake either."""
    hidden = {(problem.file, problem.line) for problem in error.problems if problem.secret}
    return [_of(problem, (problem.file, problem.line) in hidden) for problem in error.problems]


def _of(problem: Problem, hidden: bool) -> Shown:
    finding = Finding(
        file=problem.file,
        line=problem.line,
        column=problem.column,
        field=problem.path,
        message=problem.message,
    )
    return Shown(finding, problem.width, hidden)


def mistake(file: str, message: str, field: str = "", at: Mark | None = None) -> Shown:
    """Finding of a mistake, in a whole file or at a field."""
    return _at(at, Finding(file=file, field=field, message=message))


def warning(file: str, field: str, message: str, at: Mark | None) -> Shown:
    """Finding of advice on a field; `at` None: the field has its default."""
    return _at(at, Finding(file=file, field=field, message=message, severity="warning"))


def _at(at: Mark | None, finding: Finding) -> Shown:
    at = at or Mark(0)
    return Shown(msgspec.structs.replace(finding, line=at.line, column=at.column), at.width)


def as_text(shown: Shown, source: Source) -> str:
    """For people."""
    finding = shown.finding
    place = ":".join([finding.file, *(str(number) for number in (finding.line, finding.column) if number)])
    words = [
        *[place] * bool(finding.file),
        *["warning"] * (finding.severity == "warning"),
        *[finding.field] * bool(finding.field),
    ]
    return "\n".join([": ".join([*words, finding.message]), *_excerpt(shown, source)])


def _excerpt(shown: Shown, source: Source) -> list[str]:
    finding = shown.finding
    lines = source(finding.file) if finding.column and not shown.hidden else ()
    if not 0 < finding.line <= len(lines):
        return []
    end = finding.column - 1 + max(1, shown.width)
    text = lines[finding.line - 1].rstrip()[:end]
    if not text.isprintable() or end > WIDEST:
        return []
    margin = f"{finding.line:5} | "
    return [margin + text, " " * (len(margin) - 2) + "| " + " " * (finding.column - 1) + "^" * max(1, shown.width)]


def as_json(found: Iterable[Shown]) -> str:
    """For programs: a list of findings."""
    return msgspec.json.format(msgspec.json.encode([shown.finding for shown in found]), indent=2).decode()


def as_github(shown: Shown) -> str:
    """A workflow command, which GitHub shows at the line."""
    finding = shown.finding
    given = {"file": finding.file, "line": finding.line, "col": finding.column}
    properties = ",".join(f"{name}={_escaped(str(value), _IN_PROPERTIES)}" for name, value in given.items() if value)
    message = f"{finding.field}: {finding.message}" if finding.field else finding.message
    return f"::{finding.severity} {properties}::{_escaped(message, _ESCAPES)}"


def _escaped(text: str, escapes: dict[str, str]) -> str:
    return "".join(escapes.get(char, char) for char in text)
