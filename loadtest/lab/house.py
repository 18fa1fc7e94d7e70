"""Measures of the code's layout: `make house`, or `python -m loadtest.lab.house`.

One row a measure: its goal, and its value now. A rule holds today, so a value over its goal is exit status 1; an aim is
for later. What misses a goal is listed below the table, with --aims that of aims too. The rules are those of
`tests/test_architecture.py`; both count by `loadtest/lab/layout.py`.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from loadtest.lab.layout import (
    DOCUMENTED,
    FUNCTIONS,
    LONGEST_CLASS,
    LONGEST_FUNCTION,
    MOST_ARGUMENTS,
    MOST_FILES,
    NO_SUBJECT,
    ORDER,
    ROOT,
    Trees,
    arrows_up,
    crowded_calls,
    defined_twice,
    docstrings,
    flags,
    folder_sizes,
    imported,
    long_definitions,
    riddle,
    sources,
    trees,
)

SPINE = re.compile(r"^\| \d+ \| `([^`]+)`", re.MULTILINE)
LAB = "loadtest/lab/"
FIELD = re.compile(r"^`\w+`\n: ", re.MULTILINE)  # of the policy's reference
LONG = 250  # lines; most files have fewer
NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}
# Prints the modules that a command has imported when it ends.
LISTING = """\
import atexit, sys
atexit.register(lambda: print(*sys.modules, file=sys.stderr))
from {program}.cli import main
sys.exit(main())
"""
SERVE = ("serve", "--engine", "http://127.0.0.1:9", "--listen", "127.0.0.1:0", "--control", "127.0.0.1:0")


class Measure(msgspec.Struct, frozen=True):
    """Row of the table."""

    name: str
    goal: float  # at most
    now: float
    found: list[str] = []  # each thing that is counted, where the list is short
    aim: bool = False  # a goal for later, which does not fail the command

    @property
    def kept(self) -> bool:
        return self.now <= self.goal


def measures() -> list[Measure]:
    """Every measure."""
    code, tests = trees(sources(*ORDER)), trees(sources("tests"))
    up = [
        f"{path}: {problem}"
        for path, tree in code.items()
        for problem in arrows_up(path, imported(path, ast.walk(tree)))
    ]
    twice = defined_twice(code)
    full = [f"{folder}: {n}" for folder, n in folder_sizes([*code, *tests]).most_common() if n > MOST_FILES]
    riddles = [f"{path}: {line}" for path, tree in {**code, **tests}.items() if (line := riddle(tree))]
    path = spine()
    foreign = sorted(name for name in loaded(*SERVE, "--log", "none") if name.split(".")[0] == "loadtest")
    words = len((ROOT / "README.md").read_text().split())
    return [
        Measure("files where a streaming request waits or changes hands", 9, len(path), path),
        Measure("imports that point up", 0, len(up), up),
        Measure("class names defined twice in a package", 0, len(twice), twice),
        Measure("files in one folder, at most", MOST_FILES, max(folder_sizes([*code, *tests]).values()), full),
        Measure("modules of loadtest that `gateway serve` imports", 0, len(foreign), foreign),
        Measure("words of the README", 1200, words),
        Measure("modules whose docstring begins with What, How, Which, Who", 0, len(riddles), riddles),
        *aims(code),
    ]


def aims(code: Trees) -> list[Measure]:
    """Measures of size and language, whose goals are for later."""
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
        Measure("lines of code: gateway, sidecar, loadtest", 48_000, sum(lines.values()), aim=True),
        Measure("lines of code: loadtest/lab", 6000, lab, aim=True),
        Measure("docstrings that begin with a pronoun or a question's word, %", 2, share, riddles, aim=True),
        Measure("words of all pages", 50_000, words, aim=True),
        Measure("fields of the policy", 170, fields, aim=True),
        Measure("flags that command lines declare", 110, len(options), aim=True),
        Measure(f"calls with more than {MOST_ARGUMENTS} positional arguments", 0, len(crowded), crowded, aim=True),
        Measure(f"classes over {LONGEST_CLASS} lines", 0, len(classes), classes, aim=True),
        Measure(f"functions over {LONGEST_FUNCTION} lines", 0, len(functions), functions, aim=True),
    ]


def pages() -> list[Path]:
    """Every page of the tree, without those that tools have written."""
    found = ROOT.rglob("*.md")
    return [path for path in found if not path.relative_to(ROOT).parts[0].startswith((".", "build"))]


def spine() -> list[str]:
    """The files of a request's way, as the gateway's page lists them. Raises FileNotFoundError for one that is gone."""
    files = SPINE.findall((ROOT / "gateway" / "README.md").read_text())
    for file in files:
        (ROOT / file).stat()
    return files


def loaded(*argv: str, program: str = "gateway") -> set[str]:
    """Return the project's modules that a command has imported at its end. A gateway that serves is ended."""
    process = subprocess.Popen(
        [sys.executable, "-c", LISTING.format(program=program), *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        if argv[0] == "serve":
            assert process.stdout is not None  # noqa: S101 # PIPE was asked for
            process.stdout.readline()  # it serves
            process.terminate()
        _, listed = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    if process.returncode:
        raise RuntimeError(f"{program} {' '.join(argv)}: {listed}")
    return {name for name in listed.split() if name.split(".")[0] in ORDER}


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


def longest(files: list[str]) -> str:
    lengths = sorted(((len((ROOT / file).read_text().splitlines()), file) for file in files), reverse=True)
    over = sum(lines > LONG for lines, _ in lengths)
    first = ", ".join(f"{file} {lines}" for lines, file in lengths[:5])
    return f"{over} of {len(files)} files have more than {LONG} lines; the longest: {first}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--aims", action="store_true", help="list what misses an aim too")
    given = parser.parse_args()
    rows = measures()
    table = Table("measure", "goal", "now", box=None)
    for row in rows:
        style = None if row.kept else "yellow" if row.aim else "bold red"
        table.add_row(row.name, f"{'aim ' if row.aim else ''}<= {row.goal:,}", f"{row.now:,}", style=style)
    console = Console(soft_wrap=True, markup=False, highlight=False)
    console.print(table)
    console.print(longest(sources(*ORDER)))
    for row in rows:
        if not row.kept and (given.aims or not row.aim):
            console.print("\n".join([f"\nmissed: {row.name}", *row.found]))
    return 0 if all(row.kept or row.aim for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
