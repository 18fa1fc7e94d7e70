"""Runbooks for the console, from docs/runbooks.md: a section by the name of its alert."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

_HEADING = re.compile(r"^## (\w+)$", re.MULTILINE)


def runbooks() -> Mapping[str, str]:
    """The sections by their names in lower case, in Markdown. Reads the file; raises OSError."""
    _, *parts = _HEADING.split(_file().read_text(encoding="utf-8"))
    return {name.lower(): text.strip() + "\n" for name, text in zip(parts[::2], parts[1::2], strict=True)}


def _file() -> Path:
    """Path of the page, in an installed package or at the top of the source tree."""
    here = Path(__file__).parents[2]
    installed = here / "docs" / "runbooks.md"
    return installed if installed.is_file() else here.parent / "docs" / "runbooks.md"
