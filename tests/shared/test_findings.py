"""Rendering of findings: their place, the line with its caret, and hidden secrets."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.shared.files.checked import Mark, Problem
from gateway.shared.files.findings import WIDEST, Report, as_text

LINES = ["first: 1", "  second: [a, bad, c]", "x" * (WIDEST + 10), "tab\there"]


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
    ],
)  # fmt: skip
def test_text(found: Problem, expected: list[str]) -> None:
    assert as_text(found, LINES).split("\n") == expected


def test_a_line_with_a_secret_is_not_shown_for_anothers_sake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "f"
    file.write_text("a: {key: secret, b: 1}\n")
    of_line = [
        Problem(file=str(file), at=Mark(1, 18, 1), found="no"),
        Problem(file=str(file), at=Mark(1, 5, 3), found="no", secret=True),
    ]
    for found in (of_line, of_line[1:]):
        Report().add(found)
        assert "key: secret" not in capsys.readouterr().err


def test_warnings_and_mistakes_of_a_whole_file() -> None:
    whole = Problem(file="f", path="a.b", found="no", warning=True)
    placed = Problem(file="f", at=Mark(1, 1, 5), path="a.b", found="no", warning=True)
    assert as_text(placed, LINES) == "f:1:1: warning: a.b: no\n    1 | first\n      | ^^^^^"
    assert as_text(whole, LINES) == "f: warning: a.b: no"
    assert as_text(Problem(file="f", found="gone"), LINES) == "f: gone"
    assert as_text(Problem(file="", found="trace, line 3: gone"), LINES) == "trace, line 3: gone"


def test_a_report_prints_each_with_its_line_and_counts_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "f"
    file.write_text("first: 1\n")
    report = Report()
    mistake = Problem(file=str(file), at=Mark(1, 1, 5), found="no")
    report.add([mistake, Problem(file=str(file), at=Mark(1, 8, 1), found="hm", warning=True)])
    report.add([Problem(file=str(tmp_path / "gone"), at=Mark(1, 1, 5), found="no")])
    assert (report.mistakes, report.warnings) == (2, 1)
    assert capsys.readouterr().err.splitlines() == [
        f"{file}:1:1: no", "    1 | first", "      | ^^^^^",
        f"{file}:1:8: warning: hm", "    1 | first: 1", "      |        ^",
        f"{tmp_path}/gone:1:1: no",
    ]  # fmt: skip
