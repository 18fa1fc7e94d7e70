"""Names in the documentation: the README's length, and whether the paths and classes that pages name are there.

A path is a word in code that begins with a folder of this repository: `gateway/core/`, `policies/*.yaml`. A name is a
class of the code in CamelCase, or `Class.member`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT, code_of, pages

PAGES = list(pages())
LONGEST, SHORTEST = 1200, 1000  # words of the README, as `wc -w` counts them

PATH = re.compile(r"(?:gateway|sidecar|loadtest|policies|tests|docs|deploy)/[\w./*-]*")
CLASS = re.compile(r"[A-Z][a-z]+[A-Z]\w*")
MEMBER = re.compile(r"([A-Z][a-z]\w*)\.([a-z_]\w*)(?:\(\))?")


@cache
def sources() -> tuple[str, ...]:
    """The Python of this repository but of this file, which names what is not there."""
    folders = ("gateway", "sidecar", "loadtest", "tests")
    files = [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]
    return tuple(file.read_text() for file in files if file != Path(__file__))


def wrong(text: str) -> Iterator[str]:
    """What a page names that is not there."""
    for code in code_of(text):
        for word in code.split():
            path = word.rstrip(".,:;)")
            if PATH.fullmatch(path) and not any(ROOT.glob(path.rstrip("/"))):
                yield f"path {path}"
        if CLASS.fullmatch(code) and not any(re.search(rf"\b{code}\b", source) for source in sources()):
            yield f"name {code}"
        member = MEMBER.fullmatch(code)
        if member and not any(_has(source, *member.groups()) for source in sources()):
            yield f"name {code}"


def _has(source: str, name: str, member: str) -> bool:
    """Whether a file has the class and a member of that name."""
    defined = rf"^ +(?:async )?(?:def )?{member}\b|\bself\.{member}\b"
    return bool(re.search(rf"^class {name}\b", source, re.MULTILINE) and re.search(defined, source, re.MULTILINE))


def test_the_readme_is_read_in_five_minutes() -> None:
    words = len((ROOT / "README.md").read_text().split())
    assert SHORTEST <= words <= LONGEST, f"README.md has {words} words"


def test_a_streaming_request_waits_or_changes_hands_in_nine_files_at_most() -> None:
    files = re.findall(r"^\| \d+ \| `([^`]+)`", (ROOT / "gateway/README.md").read_text(), re.MULTILINE)
    assert (files[0], files[-1]) == ("gateway/relay/wire/request_reader.py", "gateway/relay/answer.py")
    assert len(files) <= 9


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_what_a_page_names_is_there(page: Path) -> None:
    assert list(wrong(page.read_text())) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("`gateway/nowhere.py`", "path gateway/nowhere.py"),
        ("`gateway/nowhere/`", "path gateway/nowhere/"),
        ("`policies/*.toml`", "path policies/*.toml"),
        ("```bash\ngateway check policies/nowhere.yaml\n```", "path policies/nowhere.yaml"),
        ("`NowhereClass`", "name NowhereClass"),
        ("`Pipeline.nowhere`", "name Pipeline.nowhere"),
    ],
)
def test_what_is_not_there_is_found(text: str, found: str) -> None:
    assert list(wrong(text)) == [found]


def test_what_is_there_is_not_found() -> None:
    assert list(wrong("`gateway/core/`, `policies/*.yaml`, `a/b.py`, `Pipeline.head`")) == []
