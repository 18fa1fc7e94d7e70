"""Help texts of outcomes, from docs/outcomes.md, by the path that a refusal's `link` header leads to."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

_HEADING = re.compile(r"^## `([a-z_]+)`$", re.MULTILINE)


def outcome_help() -> Mapping[bytes, bytes]:
    """`/outcomes`: the whole page, and `/outcomes/REASON`: its entry, in Markdown. Reads the file; raises OSError."""
    text = _file().read_text(encoding="utf-8")
    _, *parts = _HEADING.split(text)
    entries = {b"/outcomes": text.encode()}
    for reason, entry in zip(parts[::2], parts[1::2], strict=True):
        entries[b"/outcomes/%b" % reason.encode()] = f"{reason}\n\n{entry.strip()}\n".encode()
    return MappingProxyType(entries)


def _file() -> Path:
    """Path of the page, in an installed package or at the top of the source tree."""
    here = Path(__file__).parents[1]
    installed = here / "docs" / "outcomes.md"
    return installed if installed.is_file() else here.parent / "docs" / "outcomes.md"
