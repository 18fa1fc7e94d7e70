"""Text from elsewhere on its way to a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """The text with a `?` for every character that a terminal would obey; its lines stay lines."""
    return "".join([letter if letter.isprintable() or letter == "\n" else "?" for letter in text])
