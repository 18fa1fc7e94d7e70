"""Formatting of durations, sizes and tables for a person at a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.shared.files.units import GIB


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of equal length as lines, each column as wide as its widest field; the last is not filled up."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, [*widths[:-1], 0])).rstrip() for row in rows]


def seconds(value: float) -> str:
    """A duration as people say it: 0.4 s, 12 s, 3 min, 2.5 h, 3 days."""
    for limit, size, unit in ((9.95, 1.0, "s"), (119.5, 1.0, "s"), (7170.0, 60.0, "min"), (172_000.0, 3600.0, "h")):
        if value < limit:
            return f"{value / size:.{1 if limit < 10 or unit == 'h' else 0}f} {unit}"
    return f"{value / 86_400:.0f} days"


def gibs(size: int) -> str:
    """Bytes in GiB, to one decimal."""
    return f"{size / GIB:.1f} GiB"


def shown(text: str) -> str:
    """Text from elsewhere as one line, with a space for each character that is not printable and a terminal might
    obey."""
    return "".join(character if character.isprintable() else " " for character in text)
