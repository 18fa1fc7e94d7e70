"""Sanitising of text from elsewhere before a terminal shows it."""

from __future__ import annotations


def printable(text: str) -> str:
    """The text with a `?` for every character that a terminal would obey; its lines stay lines."""
    return "".join([letter if letter.isprintable() or letter == "\n" else "?" for letter in text])
