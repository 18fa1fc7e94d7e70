"""Links of the documentation: every relative one leads to a file of the tree, and to a heading where it names one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs.markdown import ROOT, anchors, links, pages, prose

PAGES = list(pages())
OF_SITE = [page for page in PAGES if page.relative_to(ROOT).parts[0] != "tests"]  # those say what data is for
SITE = ROOT / "docs" / "site" / "mkdocs.yml"


def broken(page: Path, text: str) -> list[str]:
    """The links of `text`, as it would stand in `page`, that lead nowhere."""
    return [link for link in links(text) if not re.match(r"[a-z]+:", link) and not leads(page, text, link)]


def leads(page: Path, text: str, link: str) -> bool:
    """Whether there is a file of the tree where a link leads, with the heading that it names."""
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if not target.exists() or not target.is_relative_to(ROOT):
        return False
    return not anchor or anchor in anchors(text if target == page else target.read_text())


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page, page.read_text()) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[a](CHANGELOG.md) ![b](docs/outcomes.md#ok) [c](#here)\n# Here", []),
        ("[a](NOWHERE.md)", ["NOWHERE.md"]),
        ('<img src="docs/nothing.svg">', ["docs/nothing.svg"]),
        ("[a](docs/outcomes.md#nothing)", ["docs/outcomes.md#nothing"]),
        ("[a](#nothing)", ["#nothing"]),
        ("[a](../../etc/passwd)", ["../../etc/passwd"]),
        ("[a](/README.md)", ["/README.md"]),
        ("[a](https://example.com/x#y)", []),
        ("`[a](NOWHERE.md)`\n```\n[b](NOWHERE.md)\n```\n", []),
        ("[a](#twice-1)\n## Twice\n## Twice", []),
        ("[a](#kv_target-and-b)\n## `kv_target` and [b](LICENSE)", []),
    ],
)
def test_a_broken_link_is_found(text: str, expected: list[str]) -> None:
    assert broken(ROOT / "README.md", text) == expected


def test_the_site_has_every_page() -> None:
    """If not: name the page under `nav` in docs/site/mkdocs.yml, where a newcomer looks for it."""

    def files(entry: Any) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        else:
            for part in entry.values() if isinstance(entry, dict) else entry:
                yield from files(part)

    _, nav_text = SITE.read_text().split("\nnav:\n")  # the rest has tags of MkDocs' own
    nav = sorted(files(yaml.safe_load(nav_text)))
    assert nav == sorted(str(page.relative_to(ROOT)) for page in OF_SITE)


def test_every_page_is_found_from_the_readme() -> None:
    found, new = set(), {ROOT / "README.md"}
    while new:
        page = new.pop()
        found.add(page)
        targets = {(page.parent / link.partition("#")[0]).resolve() for link in links(page.read_text())}
        new |= {target for target in targets if target.suffix == ".md" and target.is_file()} - found
    assert sorted(str(page.relative_to(ROOT)) for page in set(OF_SITE) - found) == []


def unlisted(text: str) -> list[str]:
    """The first items of lists right after a paragraph: GitHub makes a list of them, and the site does not."""
    item = re.compile(r"(?:[-*]|1\.) ")
    lines = prose(text).splitlines()
    return [
        line for before, line in pairwise(lines) if item.match(line) and before and not re.match(r"[-*\d ]", before)
    ]


@pytest.mark.parametrize("page", OF_SITE, ids=[str(page.relative_to(ROOT)) for page in OF_SITE])
def test_lists_begin_after_an_empty_line(page: Path) -> None:
    assert unlisted(page.read_text()) == []


def test_a_list_without_an_empty_line_is_found() -> None:
    assert unlisted("Words:\n- one\n  more\n- two\n") == ["- one"]
    assert unlisted("Words:\n\n1. one\n2. two\n\n```\na:\n- b\n```\n") == []
