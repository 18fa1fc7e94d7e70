"""Measures of the code's size and language: `make house`, or `python -m loadtest.lab.house`.

One row a measure: its goal, and its value now. The rules of the code's layout are held by `tests/test_architecture.py`.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

import msgspec
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[2]
PACKAGES = ("gateway", "sidecar", "loadtest")
# Pronouns and question words that begin no docstring: the first word is a verb or the noun that is returned.
NO_SUBJECT = re.compile(
    r"\W*(?:its?|ones?|th(?:is|ese|at|ose|ey|em|eir)|what|how|which|who[ms]?|whose|where|when|why)\b", re.IGNORECASE
)
DOCUMENTED = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef
MOST_ARGUMENTS = 8  # of one call, by position
LONGEST_CLASS, LONGEST_FUNCTION = 300, 50  # lines
Trees: TypeAlias = Mapping[str, ast.Module]  # by the file's path from the root
LAB = "loadtest/lab/"
FIELD = re.compile(r"^`\w+`\n: ", re.MULTILINE)  # of the policy's reference
NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}


class Measure(msgspec.Struct, frozen=True):
    """Row of the table."""

    name: str
    goal: float  # at most
    now: float
    found: list[str] = []  # each thing that is counted, where the list is short

    @property
    def kept(self) -> bool:
        return self.now <= self.goal


def measures(files: Iterable[str]) -> list[Measure]:
    """Every measure, over these files and all pages."""
    code = {file: ast.parse((ROOT / file).read_text(), file) for file in files}
    lines = {file: code_lines(file) for file in code}
    lab = sum(count for file, count in lines.items() if file.startswith(LAB))
    starts = list(docstrings(code))
    riddles = [f"{where}: {line}" for where, line in starts if NO_SUBJECT.match(line)]
    words = sum(len(page.read_text().split()) for page in pages())
    fields = len(FIELD.findall((ROOT / "docs/policy.md").read_text()))
    options = flags({path: tree for path, tree in code.items() if not path.startswith(LAB)})
    crowded = crowded_calls(code)
    classes = long_definitions(code, (ast.ClassDef,), LONGEST_CLASS)
    functions = long_definitions(code, FUNCTIONS, LONGEST_FUNCTION)
    share = round(100 * len(riddles) / len(starts), 1)
    return [
        Measure("lines of code: gateway, sidecar, loadtest", 48_000, sum(lines.values())),
        Measure("lines of code: loadtest/lab", 6000, lab),
        Measure("docstrings that begin with a pronoun or a question's word, %", 2, share, riddles),
        Measure("words of all pages", 50_000, words),
        Measure("fields of the policy", 170, fields),
        Measure("flags that command lines declare", 110, len(options)),
        Measure(f"calls with more than {MOST_ARGUMENTS} positional arguments", 0, len(crowded), crowded),
        Measure(f"classes over {LONGEST_CLASS} lines", 0, len(classes), classes),
        Measure(f"functions over {LONGEST_FUNCTION} lines", 0, len(functions), functions),
    ]


def pages() -> list[Path]:
    """Every page of the tree, without those that tools have written."""
    found = ROOT.rglob("*.md")
    return [path for path in found if not path.relative_to(ROOT).parts[0].startswith((".", "build"))]


def code_lines(file: str) -> int:
    """Lines of a file without blanks, comments and docstrings."""
    text = (ROOT / file).read_text()
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node):
            lines.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--aims", action="store_true", help="list what misses a goal")
    given = parser.parse_args()
    files = sorted(str(file.relative_to(ROOT)) for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    rows = measures(files)
    table = Table("measure", "goal", "now", box=None)
    for row in rows:
        table.add_row(row.name, f"<= {row.goal:,}", f"{row.now:,}", style=None if row.kept else "yellow")
    console = Console(soft_wrap=True, markup=False, highlight=False)
    console.print(table)
    for row in rows:
        if given.aims and not row.kept:
            console.print("\n".join([f"\nmissed: {row.name}", *row.found]))


def docstrings(modules: Trees) -> Iterator[tuple[str, str]]:
    """Place of each docstring, and its first line."""
    for path, tree in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
                yield f"{path}:{node.body[0].lineno}", text.partition("\n")[0]


def crowded_calls(modules: Trees) -> list[str]:
    """Calls with more positional arguments than anyone can tell apart."""
    return [
        f"{path}:{node.lineno}: {ast.unparse(node.func)} with {len(node.args)}"
        for path, tree in modules.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and len(node.args) > MOST_ARGUMENTS
    ]


def long_definitions(modules: Trees, kinds: tuple[type[ast.AST], ...], most: int) -> list[str]:
    """Classes or functions of more than `most` lines, the longest first."""
    found = [
        ((node.end_lineno or 0) - node.lineno + 1, f"{path}:{node.lineno}: {node.name}")
        for path, tree in modules.items()
        for node in ast.walk(tree)
        if isinstance(node, kinds) and isinstance(node, (ast.ClassDef, *FUNCTIONS))
    ]
    return [f"{where} has {lines} lines" for lines, where in sorted(found, reverse=True) if lines > most]


def flags(modules: Trees) -> list[str]:
    """Flags that command lines declare: each call of `add_argument` whose first name begins with a dash."""
    return [
        f"{path}:{node.lineno}: {first.value}"
        for path, tree in modules.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument"
        for first in node.args[:1]
        if isinstance(first, ast.Constant) and isinstance(first.value, str) and first.value.startswith("-")
    ]


if __name__ == "__main__":
    main()
