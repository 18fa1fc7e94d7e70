"""Documents for people: the README's length, and whether what they name is there.

A path is a word in code that begins with a folder of this repository: `gateway/core/`, `policies/*.yaml`. A link is
Markdown's, to a file or to a heading of one. A command is `make TARGET` or `python -m MODULE`. A name is a class of the
code in CamelCase, or `Class.member`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOP = ("README.md", "gateway/README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
DOCUMENTS = (*TOP, *sorted(f"docs/{file.name}" for file in (ROOT / "docs").glob("*.md")))
LONGEST, SHORTEST = 1200, 1000  # words of the README, as `wc -w` counts them

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`]+)`")
PATH = re.compile(r"(?:gateway|sidecar|loadtest|policies|tests|docs|deploy)/[\w./*-]*")
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
MAKE = re.compile(r"\bmake ([a-z][a-z-]+)")
CLASS = re.compile(r"[A-Z][a-z]+[A-Z]\w*")
MEMBER = re.compile(r"([A-Z][a-z]\w*)\.([a-z_]\w*)(?:\(\))?")
MODULE = re.compile(r"\bpython -m ((?:gateway|sidecar|loadtest|tests)[\w.]*)")


@cache
def sources() -> tuple[str, ...]:
    """The Python of this repository but of this file, which names what is not there."""
    folders = ("gateway", "sidecar", "loadtest", "tests")
    files = [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]
    return tuple(file.read_text() for file in files if file != Path(__file__))


def code_of(text: str) -> list[str]:
    """What a document shows as code: fenced blocks but drawings, and spans between backticks."""
    blocks = [block for language, block in FENCE.findall(text) if language != "mermaid"]
    return blocks + SPAN.findall(FENCE.sub("", text))


def wrong(document: str, text: str) -> Iterator[str]:
    """What a document names that is not there."""
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for code in code_of(text):
        for word in code.split():
            path = word.rstrip(".,:;)")
            if PATH.fullmatch(path) and not any(ROOT.glob(path.rstrip("/"))):
                yield f"path {path}"
        yield from (f"target {target}" for target in MAKE.findall(code) if target not in targets)
        for module in MODULE.findall(code):
            file = ROOT / module.replace(".", "/")
            if not file.with_suffix(".py").is_file() and not (file / "__main__.py").is_file():
                yield f"module {module}"
        if CLASS.fullmatch(code) and not any(re.search(rf"\b{code}\b", source) for source in sources()):
            yield f"name {code}"
        member = MEMBER.fullmatch(code)
        if member and not any(_has(source, *member.groups()) for source in sources()):
            yield f"name {code}"
    for link in LINK.findall(FENCE.sub("", text)):
        yield from _wrong_link(document, text, link)


def _wrong_link(document: str, text: str, link: str) -> Iterator[str]:
    if "://" in link:
        return
    path, _, anchor = link.partition("#")
    file = (ROOT / document).parent / path if path else ROOT / document
    if not file.exists():
        yield f"link {link}"
    elif anchor:
        headings = HEADING.findall(FENCE.sub("", file.read_text() if path else text))
        if anchor not in map(_anchor, headings):
            yield f"heading {link}"


def _has(source: str, name: str, member: str) -> bool:
    """Whether a file has the class and a member of that name."""
    defined = rf"^ +(?:async )?(?:def )?{member}\b|\bself\.{member}\b"
    return bool(re.search(rf"^class {name}\b", source, re.MULTILINE) and re.search(defined, source, re.MULTILINE))


def _anchor(heading: str) -> str:
    """As GitHub makes it of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_the_readme_is_read_in_five_minutes() -> None:
    words = len((ROOT / "README.md").read_text().split())
    assert SHORTEST <= words <= LONGEST, f"README.md has {words} words"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_what_a_document_names_is_there(document: str) -> None:
    assert list(wrong(document, (ROOT / document).read_text())) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("`gateway/nowhere.py`", "path gateway/nowhere.py"),
        ("`gateway/nowhere/`", "path gateway/nowhere/"),
        ("`policies/*.toml`", "path policies/*.toml"),
        ("```console\n$ gateway check policies/nowhere.yaml\n```", "path policies/nowhere.yaml"),
        ("`make nothing`", "target nothing"),
        ("`python -m loadtest.nowhere --help`", "module loadtest.nowhere"),
        ("`NowhereClass`", "name NowhereClass"),
        ("`Pipeline.nowhere`", "name Pipeline.nowhere"),
        ("[nowhere](docs/nowhere.md)", "link docs/nowhere.md"),
        ("[nowhere](SECURITY.md#nowhere)", "heading SECURITY.md#nowhere"),
        ("# Here\n\n[nowhere](#nowhere)", "heading #nowhere"),
    ],
)
def test_what_is_not_there_is_found(text: str, found: str) -> None:
    assert list(wrong("README.md", text)) == [found]


def test_what_is_there_is_not_found() -> None:
    code = "`gateway/core/`, `policies/*.yaml`, `make run`, `python -m loadtest.engine`, `a/b.py`, `Pipeline.head`"
    assert list(wrong("README.md", f"# A b\n\n{code}, [x](#a-b)")) == []
