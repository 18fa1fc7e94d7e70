"""Commands in the documentation: the programs know every subcommand and flag that a page shows.

A command is a line of a fenced block, or code in the prose, that begins with `gateway`, `sidecar`, `make TARGET` or
`python -m MODULE`. What a flag is given is not looked at: files and addresses are examples.
"""

from __future__ import annotations

import argparse
import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from gateway.cli import parser_for
from sidecar.cli import parser_for as sidecar_parser_for
from tests.docs.markdown import ROOT, code_of, fenced, pages

PAGES = list(pages())
COMMAND = re.compile(r"(?:[A-Z_]+=\S* )*((?:gateway|sidecar|make|python -m) .*)")
OPERATORS = re.compile(r"&&|\|\|?|;|>")
OURS = ("gateway", "sidecar", "loadtest", "tests")


def unknown(text: str) -> Iterator[str]:
    """What commands of a page say that no program knows."""
    for code in code_of(text):
        if COMMAND.fullmatch(code):
            for words in _split(code):
                yield from _unknown(words)


def _split(line: str) -> Iterator[list[str]]:
    """The commands of a line of shell, each as its words; comments and variables before a command left out."""
    words: list[str] = []
    for word in (*shlex.split(line, comments=True), ";"):
        if not OPERATORS.fullmatch(word):
            words += [] if not words and re.fullmatch(r"[A-Z_]+=.*", word) else [word]
        else:
            yield words
            words = []


def _unknown(words: list[str]) -> Iterator[str]:
    if words[:1] == ["gateway"]:
        yield from _of_parser(parser_for(words[1:]), words)
    elif words[:1] == ["sidecar"]:
        yield from _of_parser(sidecar_parser_for(words[1:]), words)
    elif words[:1] == ["make"]:
        yield from _of_make(words[1], words[2:])
    elif words[:2] == ["python", "-m"] and words[2].split(".")[0] in OURS:
        yield from _of_module(words[2], words[3:])


def _of_parser(parser: argparse.ArgumentParser, words: list[str]) -> Iterator[str]:
    """Subcommands and flags that a parser does not have; `words` begin with what it is called by."""
    choices = next((it.choices for it in parser._actions if isinstance(it, argparse._SubParsersAction)), None)
    if choices is not None and words[1:] and not words[1].startswith("-"):
        if words[1] in choices:
            yield from _of_parser(choices[words[1]], words[1:])
        else:
            yield f"{parser.prog} {words[1]}"
        return
    known = {flag for action in parser._actions for flag in action.option_strings}
    yield from (f"{parser.prog} {flag}" for flag in _flags(words) if flag not in known)


def _of_make(target: str, words: list[str]) -> Iterator[str]:
    recipe = _recipes().get(target)
    if recipe is None:
        yield f"make {target}"
        return
    for word in words:
        name, _, value = word.partition("=")
        module = re.search(rf"-m ([\w.]+) \$\({name}\)", recipe)
        if module is None:
            yield f"make {target} {name}"
        else:
            yield from _of_module(module[1], shlex.split(value))


@cache
def _recipes() -> dict[str, str]:
    """What each target of the Makefile does."""
    text = (ROOT / "Makefile").read_text()
    found = re.findall(r"^([a-z][a-z-]*):.*\n((?:\t.*\n)*)", text, re.MULTILINE)
    return dict(found)


def _of_module(module: str, words: list[str]) -> Iterator[str]:
    file = ROOT / module.replace(".", "/")
    files = [file.with_suffix(".py")] if file.with_suffix(".py").is_file() else sorted(file.glob("*.py"))
    if not any(found.name == "__main__.py" or found.stem == file.name for found in files):
        yield f"python -m {module}"
        return
    known = {flag for found in files for flag in _added(found)} | {"--help"}
    yield from (f"python -m {module} {flag}" for flag in _flags(words) if flag not in known)


@cache
def _added(file: Path) -> frozenset[str]:
    """The flags that a file's code adds to a parser, or has another file add by its `add_arguments`."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    added = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"]
    shared = [
        (ROOT / node.module.replace(".", "/")).with_suffix(".py")
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module and "add_arguments" in [name.name for name in node.names]
    ]
    own = {str(arg.value) for call in added for arg in call.args if isinstance(arg, ast.Constant)}
    return frozenset(own.union(*map(_added, shared)))


def _flags(words: list[str]) -> list[str]:
    return [word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)]


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_commands_are_known(page: Path) -> None:
    assert list(unknown(page.read_text())) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("`gateway nothing`", ["gateway nothing"]),
        ("`gateway check --nothing FILE`", ["gateway check --nothing"]),
        ("`gateway key nothing`", ["gateway key nothing"]),
        ("`gateway key add --strict`", ["gateway key add --strict"]),
        ("`gateway --nothing`", ["gateway --nothing"]),
        ("`sidecar nothing`", ["sidecar nothing"]),
        ("`sidecar ray up --nothing=1`", ["sidecar ray up --nothing"]),
        ("`make nothing`", ["make nothing"]),
        ("`make figures NOTHING=1`", ["make figures NOTHING"]),
        ('`make figures FIGURES="--nothing --seed 2"`', ["python -m loadtest.lab.figures --nothing"]),
        ("`python -m loadtest.nothing`", ["python -m loadtest.nothing"]),
        ("`python -m loadtest.lab.dst --nothing`", ["python -m loadtest.lab.dst --nothing"]),
        ("```bash\nA=1 gateway nothing && sidecar nothing # gateway\n```", ["gateway nothing", "sidecar nothing"]),
        ("```\ngateway init && make nothing\n```", ["make nothing"]),
        ("`gateway bench --find-capacity`, `gateway key add | list`, `python -m pytest --nothing`, `gateway`", []),
        (
            "`sidecar logs llama -n 10`, `gateway check FILE --explain`, `gateway is`-like, `make run`",
            ["gateway is"],
        ),
        ("gateway nothing\n```mermaid\ngateway nothing\n```", []),
    ],
)
def test_an_unknown_command_is_found(text: str, expected: list[str]) -> None:
    assert list(unknown(text)) == expected


PUBLISHED = re.compile(r"pip install [^\n]*weir-gateway|weir-gateway\[")
TELLING = [
    *PAGES,
    *(ROOT / "deploy").rglob("*.*"),
    *(found for name in OURS[:3] for found in (ROOT / name).rglob("*.py")),
]


def test_nobody_is_told_to_install_what_is_not_published() -> None:
    """A wheel's file or a checkout, until an index has the package."""
    files = [file for file in TELLING if file.is_file() and file.suffix != ".png"]
    assert [str(file) for file in files if PUBLISHED.search(file.read_text())] == []
    assert PUBLISHED.search("/opt/weir/bin/pip install -U weir-gateway")


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_a_block_of_commands_runs_as_it_is_copied(page: Path) -> None:
    """No prompt before a command; what it prints stands in a block of its own."""
    assert [language for language, _ in fenced(page.read_text()) if language == "console"] == []
    assert [line for _, block in fenced(page.read_text()) for line in block.splitlines() if line.startswith("$ ")] == []
