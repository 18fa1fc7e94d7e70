"""A Dockerfile read as far as the tests need it: stages, instructions, what is copied of the tree."""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Iterator
from pathlib import Path

from tests.deploy.tools import ROOT

DOCKERFILE = ROOT / "deploy/container/Dockerfile"
IGNORED = ROOT / ".dockerignore"


def instructions(stage: str | None = None) -> list[tuple[str, str]]:
    """Word and rest of each instruction, of one stage or of all."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    found, name = [], None
    for line in filter(str.strip, text.splitlines()):
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            name = rest.split(" AS ")[1]
        if stage in (None, name):
            found.append((word, rest.strip()))
    return found


def of(stage: str, word: str) -> str:
    """What stands behind the one instruction of that word."""
    (rest,) = (rest for found, rest in instructions(stage) if found == word)
    return rest


def words(text: str) -> list[str]:
    """An instruction's exec form."""
    decoded: list[str] = json.loads(text)
    return decoded


def copied(stage: str | None = None) -> Iterator[tuple[str, str]]:
    """Source in the tree, and destination, of each COPY that is not from another stage."""
    for word, rest in instructions(stage):
        if word == "COPY" and not rest.startswith("--from"):
            *sources, destination = rest.split()
            for source in sources:
                into = destination.endswith("/")
                yield source, f"{destination}{Path(source).name}" if into else destination


def sent(path: Path) -> bool:
    """Whether .dockerignore lets a builder have this path, relative to the tree. The last line that fits decides."""
    found = True
    for line in IGNORED.read_text().splitlines():
        pattern = line.strip().removeprefix("!")
        if pattern and not line.startswith("#") and _fits(path, pattern):
            found = line.startswith("!")
    return found


def _fits(path: Path, pattern: str) -> bool:
    names = [str(path), *(str(folder) for folder in path.parents if folder != Path())]
    if pattern.startswith("**/"):
        return any(fnmatch.fnmatchcase(Path(name).name, pattern[3:]) for name in names)
    return any(fnmatch.fnmatchcase(name, pattern) and name.count("/") == pattern.count("/") for name in names)
