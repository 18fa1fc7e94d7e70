"""HTTP requests in the documentation: every path that a page shows is served, as far as the code names its parts.

A request is code such as `GET /fleet` or a URL of `curl`. A part in capitals or braces stands for any.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT, code_of, pages

PAGES = list(pages())
PATH = r"(/[\w./{}|-]*)"
REQUEST = re.compile(rf"(?:\b(?:GET|POST|PUT|DELETE|HEAD) |curl\b.*?[\w.]+:\d+|CONTROL){PATH}")
TEXT = re.compile(r"[\"']([\w./{}:-]+)[\"'?]")  # of the code
ANY = re.compile(r"\{\w+\}|[A-Z]+")


@cache
def served() -> frozenset[str]:
    """Parts of paths that the code has as texts: `/v1/files`, and `files` and `v1` of it."""
    texts: set[str] = set()
    for folder in ("gateway", "sidecar", "loadtest/engine"):
        for file in (ROOT / folder).rglob("*.py"):
            for text in TEXT.findall(file.read_text()):
                texts |= {text, text.rstrip("/"), *(text.split("/") if text.startswith("/") else ())}
    return frozenset(texts)


def unserved(text: str) -> Iterator[str]:
    """Paths of a page that nobody serves: a fixed one is a text of the code, of another each fixed part is."""
    for code in code_of(text):
        for found in REQUEST.finditer(code):
            path = found[1].rstrip(".")
            parts = path.strip("/").split("/")
            fixed = [part for part in parts if not ANY.fullmatch(part) and not part.startswith("{")]
            whole = len(fixed) == len(parts)
            if not (path in served() if whole else served().issuperset(fixed)):
                yield path


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_paths_are_served(page: Path) -> None:
    assert list(unserved(page.read_text())) == []


def test_a_path_that_nobody_serves_is_found() -> None:
    text = "`GET /flet`, `POST /engines/ID/drian`, `curl http://127.0.0.1:8001/reddyz`, `curl CONTROL/usge?format=csv`"
    assert list(unserved(text)) == ["/flet", "/engines/ID/drian", "/reddyz", "/usge"]
    assert list(unserved("`GET /fleet`, `POST /engines/{id}/drain`, `curl -s localhost:8001/processes | jq`")) == []
