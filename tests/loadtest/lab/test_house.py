"""`make house`: the table, its exit status, and the list of a request's files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from loadtest.lab import house
from loadtest.lab.house import Measure, code_lines, longest, main, size, spine


def test_a_requests_files_are_those_of_the_gateways_page() -> None:
    files = spine()
    assert (files[0], files[-1]) == ("gateway/relay/wire/connection.py", "gateway/relay/answer.py")
    assert len(files) <= 9


def test_a_file_of_that_list_that_is_gone_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gateway").mkdir()
    (tmp_path / "gateway" / "README.md").write_text("| 1 | `gateway/gone.py` | Who reads? |\n")
    monkeypatch.setattr(house, "ROOT", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"gateway/gone\.py"):
        spine()


@pytest.mark.parametrize(("now", "status"), [(2, 0), (3, 1)])
def test_a_goal_that_is_missed_is_the_exit_status(
    now: int, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [Measure("files", 2, now, ["a.py: too many"])]
    monkeypatch.setattr(house, "measures", lambda: rows)
    monkeypatch.setattr(sys, "argv", ["house"])
    assert main() == status
    out = capsys.readouterr().out
    assert [word in out for word in ("<= 2", "missed: files", "a.py: too many")] == [True, status == 1, status == 1]


def test_long_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.py").write_text("\n" * 250)
    (tmp_path / "b.py").write_text("\n" * 251)
    monkeypatch.setattr(house, "ROOT", tmp_path)
    assert longest(["a.py", "b.py"]) == "1 of 2 files have more than 250 lines; the longest: b.py 251, a.py 250"


def test_lines_of_code_are_neither_blank_nor_comments_nor_docstrings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = '"""A page.\n\nMore."""\n\n# why\nx = (  # here\n    1\n)\n\n\n'
    code = f'{page}def f() -> None:\n    """Do."""\n    g("""\n\n""")\n'
    (tmp_path / "a.py").write_text(code)
    (tmp_path / "page.md").write_text("three words here\n")
    monkeypatch.setattr(house, "ROOT", tmp_path)
    assert code_lines("a.py") == 3 + 1 + 3
    assert size(["a.py"]) == "7 lines of code, of which loadtest/lab has 0; 3 words in 1 pages"
