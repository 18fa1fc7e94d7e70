"""Transfer of a model's files from a source to a folder: resumable, checked, and whole or not there at all."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from sidecar.pull.listing import Listing, SourceFile
from sidecar.pull.source import Source, SourceError
from sidecar.pull.staging import BadContent, Staging, StagingError, whole

FIRST_PAUSE, LAST_PAUSE = 1.0, 30.0  # seconds before a file is tried again
TRIES = 5  # of one file, in a row and without a byte more
WRONG = 2  # times that a file may have the wrong content: its source may have changed just then


class Watcher(Protocol):
    """Observer of a pull's progress."""

    def begin(self, listing: Listing, here: int) -> None:
        """`here`: bytes that an earlier pull has left."""

    def file(self, name: str) -> None:
        """Note the file that comes next."""

    def came(self, size: int) -> None:
        """Count `size` more bytes; a negative size: bytes that have to be sent again."""

    def trouble(self, words: str) -> None:
        """Note that a file is tried again; `words`: the reason."""


class Pulled(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a pull. `bytes` that came now; `resumed`: those that were here from an earlier one; `was_there`: the
    folder had all of it."""

    folder: str
    files: int
    size: int
    bytes: int = 0
    resumed: int = 0
    was_there: bool = False


def pulled(
    source: Source,
    listing: Listing,
    staging: Staging,
    watcher: Watcher,
    check: Callable[[Path], None],
    *,
    replace: bool = False,
) -> Pulled:
    """Have the files of `listing` in the folder of `staging`. `check` looks at all of them before the model appears.
    `replace`: another model there goes. Raises SourceError, StagingError, BadContent, and what `check` raises."""
    found = Pulled(folder=str(staging.target), files=len(listing.files), size=listing.size)
    if not listing.files:
        raise SourceError(f"{listing.source} has no files of a model")
    if whole(staging.target, listing):
        return msgspec.structs.replace(found, was_there=True)
    if not replace and _used(staging.target):
        raise StagingError(
            f"{staging.target} is there and is not what {listing.source} has: --replace puts that in its place"
        )
    staging.open(listing)
    try:
        here = staging.here(listing)
        staging.check_room(listing.size - here)
        watcher.begin(listing, here)
        came = 0

        def told(size: int) -> None:
            nonlocal came
            came += size
            watcher.came(size)

        for file in listing.files:
            if not staging.has(file):
                watcher.file(file.name)
                _one(source, staging, file, told, watcher.trouble)
        check(staging.folder / "files")
        staging.finish(replace=replace)
    finally:
        staging.close()
    return msgspec.structs.replace(found, bytes=came, resumed=here)


def _one(
    source: Source,
    staging: Staging,
    file: SourceFile,
    told: Callable[[int], None],
    trouble: Callable[[str], None],
) -> None:
    """Fetch one file, and retry after errors that may be over in a moment. Raises SourceError, BadContent."""
    failures = wrong = 0
    while True:
        came = 0

        def counted(size: int) -> None:
            nonlocal came
            came += size
            told(size)

        try:
            staging.take(file, lambda start: source.read(file, start), counted)
        except SourceError as error:
            if not error.again:
                raise
            found: Exception = error
        except BadContent as error:
            wrong += not error.cut
            if wrong >= WRONG:
                raise
            found = error
        else:
            return
        failures = 1 if came > 0 else failures + 1
        if failures >= TRIES:
            raise found
        seconds = min(LAST_PAUSE, FIRST_PAUSE * 2 ** (failures - 1))
        trouble(f"{found}; tried again in {seconds:.0f} s")
        time.sleep(seconds)


def _used(folder: Path) -> bool:
    """Whether something is there. Raises StagingError."""
    try:
        return folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    except OSError as error:
        raise StagingError(f"{folder}: {error.strerror}") from error
