"""Tokens in a file: one, or two while one takes the place of the other (see gateway/shared/tokens.py)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gateway.shared.files.modes import refused
from gateway.shared.tokens import Tokens, tokens_in


def tokens_of(path: Path, read: Callable[[Path], bytes]) -> Tokens:
    """The tokens in a file, which `read` reads. Raises OSError, and ValueError, whose message begins with the path."""
    data, wrong = read(path), refused(path)
    try:
        if wrong is not None:
            raise ValueError(wrong)
        return tokens_in(data)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
