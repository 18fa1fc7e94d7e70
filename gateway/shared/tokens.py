"""Secrets that files hold, one a line, and the tokens that a port accepts.

Where a file of tokens has two, the first is shown to others and both are accepted. So a token is replaced without a
moment in which two sides disagree: the new one is added below the old one on both sides, then put above it, then alone.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from typing import TypeAlias

Tokens: TypeAlias = tuple[str, ...]  # the first is shown, all are accepted; empty: there is none

TOKEN_LENGTH = 16  # characters at least
MOST_TOKENS = 2
MAX_SECRET = 4096  # bytes


def secrets_in(data: bytes, least: int = 1, most: int = 1) -> Tokens:
    """The secrets of a file, without the space around them; empty: it holds something else."""
    if len(data) > MAX_SECRET or not data.isascii():
        return ()
    words = tuple(line.strip() for line in data.decode().splitlines() if line.strip())
    good = all(len(word) >= least and word.isprintable() and " " not in word for word in words)
    return words if good and len(words) <= most else ()


def expected_in(kind: str, least: int = 1, most: int = 1) -> str:
    """Words for what a file of secrets should hold."""
    plural = f", or {most}, one a line," if most > 1 else ""
    return f"one {kind}{plural} of{f' at least {least}' if least > 1 else ''} visible ASCII characters"


def tokens_in(data: bytes) -> Tokens:
    """The tokens that a file or a variable holds. Raises ValueError."""
    tokens = secrets_in(data, TOKEN_LENGTH, MOST_TOKENS)
    if not tokens:
        raise ValueError(
            f"a token is at least {TOKEN_LENGTH} visible ASCII characters; {MOST_TOKENS} at most, one a line"
        )
    return tokens


class AcceptedTokens:
    """Tokens that open a port. Digests are compared, so that time tells neither their content nor their length."""

    def __init__(self, tokens: Iterable[str]) -> None:
        self.renew(tokens)

    def renew(self, tokens: Iterable[str]) -> None:
        """Accept these from now on, and no others."""
        self._digests = [hashlib.sha256(token.encode()).digest() for token in tokens]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def accepts(self, token: bytes) -> bool:
        shown = hashlib.sha256(token).digest()
        return any(hmac.compare_digest(shown, each) for each in self._digests)
