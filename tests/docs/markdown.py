"""Markdown pages of the tree as the tests of the documentation read them: links, anchors, code."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
_LEFT_OUT = re.compile(r"\..*|build|dist|.*\.egg-info|node_modules")
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`+[^`\n]+(?:\n[^`\n]+)?`+")
_LINK = re.compile(r"\]\(([^()\s]+)\)|(?:src|href|srcset)=\"([^\"\s]+)\"")
_HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)


def pages(folder: Path = ROOT) -> Iterator[Path]:
    """Every Markdown page of the tree; what was installed or built is none of it."""
    for entry in sorted(folder.iterdir()):
        if entry.is_dir() and not _LEFT_OUT.fullmatch(entry.name):
            yield from pages(entry)
        elif entry.suffix == ".md":
            yield entry


def links(text: str) -> list[str]:
    """Where a page's links and pictures lead, code left out."""
    return [target or source for target, source in _LINK.findall(prose(text))]


def prose(text: str) -> str:
    """A page without its code."""
    return _SPAN.sub("", _FENCE.sub("", text))


def anchors(text: str) -> set[str]:
    """What a link may name of a page, as GitHub and the site make it of the headings."""
    seen: Counter[str] = Counter()
    found = set()
    for heading in _HEADING.findall(_FENCE.sub("", text)):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", words.strip().lower()).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def fenced(text: str) -> list[tuple[str, str]]:
    """The fenced blocks of a page: their language and what they hold."""
    return [
        (block.split("\n", 1)[0].strip("`").strip(), block.split("\n", 1)[1].removesuffix("```"))
        for block in _FENCE.findall(text)
    ]


def code_of(text: str) -> list[str]:
    """What a page shows as code: lines of fenced blocks but drawings, and spans in its prose."""
    lines = [line for language, block in fenced(text) if language != "mermaid" for line in block.splitlines()]
    spans = [" ".join(span.strip("`").split()) for span in _SPAN.findall(_FENCE.sub("", text))]
    return lines + spans
