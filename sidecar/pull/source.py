"""Interface of the sources of a model's files, and what they raise."""

from __future__ import annotations

from collections.abc import Generator
from typing import Protocol, TypeAlias

from sidecar.pull.listing import Listing, SourceFile

Pieces: TypeAlias = Generator[bytes | None, None, None]


class SourceError(Exception):
    """A source that cannot be read; the message says why and what to do. `again`: it may work in a moment."""

    def __init__(self, message: str, *, again: bool = False) -> None:
        super().__init__(message)
        self.again = again


class Source(Protocol):
    """Source of a model's files. Every method raises SourceError; `listing` also raises BadListing."""

    def listing(self) -> Listing:
        """The files that are wanted of it."""

    def read(self, file: SourceFile, start: int) -> Pieces:
        """The content of a file of the listing from byte `start` on, in pieces. None first: from its beginning."""
