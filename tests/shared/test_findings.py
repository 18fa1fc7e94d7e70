"""Rendering of findings: their place, the line with its caret, and hidden secrets."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.shared.files.checked import InvalidFile, Mark, Problem
from gateway.shared.files.findings import WIDEST, Report, as_text, mistake, mistakes, warning

LINES = ["first: 1", "  second: [a, bad, c]", "x" * (WIDEST + 10), "tab\there"]


def source(_: str) -> list[str]:
    return LINES


def problem(line: int, column: int = 0, width: int = 0, *, secret: bool = False) -> Problem:
    at = Mark(line, column, width)
    return Problem(file="f", at=at, path="p", found="x", expected="y", nearest="z", secret=secret)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (problem(2, 15, 3), ["f:2:15: p: found x, expected y (did you mean z?)", "    2 |   second: [a, bad",
                             "      |               ^^^"]),
        (problem(1, 1), ["f:1:1: p: found x, expected y (did you mean z?)", "    1 | f", "      | ^"]),
        (problem(1), ["f:1: p: found x, expected y (did you mean z?)"]),
        (problem(0), ["f: p: found x, expected y (did you mean z?)"]),
        (problem(9, 1, 1), ["f:9:1: p: found x, expected y (did you mean z?)"]),
        (problem(3, WIDEST, 5), [f"f:3:{WIDEST}: p: found x, expected y (did you mean z?)"]),
        (problem(4, 1, 6), ["f:4:1: p: found x, expected y (did you mean z?)"]),
        (problem(2, 15, 3, secret=True), ["f:2:15: p: found x, expected y (did you mean z?)"]),
    ],
)  # fmt: skip
def test_text(found: Problem, expected: list[str]) -> None:
    (shown,) = mistakes(InvalidFile([found]))
    assert as_text(shown, source).split("\n") == expected


def test_a_line_with_a_secret_is_not_shown_for_anothers_sake() -> None:
    both = mistakes(InvalidFile([problem(2, 15, 3), problem(2, 3, 1, secret=True)]))
    assert ["\n" in as_text(shown, source) for shown in both] == [False, False]


def test_warnings_and_mistakes_of_a_whole_file() -> None:
    assert as_text(warning("f", "a.b", "no", Mark(1, 1, 5)), source) == (
        "f:1:1: warning: a.b: no\n    1 | first\n      | ^^^^^"
    )
    assert as_text(warning("f", "a.b", "no", None), source) == "f: warning: a.b: no"
    assert as_text(mistake("f", "gone"), source) == "f: gone"
    assert as_text(mistake("", "trace, line 3: gone"), source) == "trace, line 3: gone"


def test_a_report_prints_each_with_its_line_and_counts_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "f"
    file.write_text("first: 1\n")
    report = Report()
    report.add(mistake(str(file), "no", at=Mark(1, 1, 5)), warning(str(file), "", "hm", Mark(1, 8, 1)))
    report.add(mistake(str(tmp_path / "gone"), "no", at=Mark(1, 1, 5)))
    assert (report.mistakes, report.warnings) == (2, 1)
    assert capsys.readouterr().err.splitlines() == [
        f"{file}:1:1: no", "    1 | first", "      | ^^^^^",
        f"{file}:1:8: warning: hm", "    1 | first: 1", "      |        ^",
        f"{tmp_path}/gone:1:1: no",
    ]  # fmt: skip
