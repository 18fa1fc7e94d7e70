"""`make house`: its measures, and the table."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from loadtest.lab import house
from loadtest.lab.house import Measure, code_lines, main, measures


def test_lines_of_code_are_neither_blank_nor_comments_nor_docstrings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = '"""A page.\n\nMore."""\n\n# why\nx = (  # here\n    1\n)\n\n\n'
    code = f'{page}def f() -> None:\n    """Do."""\n    g("""\n\n""")\n'
    (tmp_path / "a.py").write_text(code)
    monkeypatch.setattr(house, "ROOT", tmp_path)
    assert code_lines("a.py") == 3 + 1 + 3


def test_a_goal_that_is_missed_is_listed_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(house, "measures", lambda files: [Measure("words", 2, 3, ["a.md"])])
    monkeypatch.setattr(sys, "argv", ["house"])
    main()
    assert "a.md" not in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["house", "--aims"])
    main()
    assert "missed: words\na.md" in capsys.readouterr().out


def test_measures_are_counted_over_the_code_and_its_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/policy.md").write_text("| `no` | field |\n\n`a`\n: A field.\n: 1\n")
    body = "".join(f"    x = {number}\n" for number in range(49))
    code = (
        f'"""One."""\nfrom x import f\nf({"1, " * 9})\n\ndef g():\n    """It is."""\n{body}\nclass A:\n    """A."""\n'
    )
    code += "    x = 1\n" * 299 + "p.add_argument('--flag')\np.add_argument('word')\n"
    (tmp_path / "loadtest/lab").mkdir(parents=True)
    (tmp_path / "a.py").write_text(code)
    (tmp_path / "loadtest/lab/b.py").write_text("p.add_argument('--of-the-lab')\n")
    monkeypatch.setattr(house, "ROOT", tmp_path)
    found = {row.name.split(":")[-1].strip(): row for row in measures(["a.py", "loadtest/lab/b.py"])}
    assert [row.now for row in found.values()] == [2 + 1 + 49 + 1 + 299 + 2 + 1, 1, 66.7, 11, 1, 1, 1, 1, 1]
    assert found["docstrings that begin with a pronoun or a question's word, %"].found == [
        "a.py:1: One.",
        "a.py:6: It is.",
    ]
    assert found["functions over 50 lines"].found == ["a.py:5: g has 51 lines"]
    assert found["classes over 300 lines"].found == ["a.py:57: A has 301 lines"]
    assert found["calls with more than 8 positional arguments"].found == ["a.py:3: f with 9"]
