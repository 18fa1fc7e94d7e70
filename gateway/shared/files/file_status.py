"""Reload status of a file: version and digest of what is active, and the result of the last attempt to replace it.

A value with three transitions. Attempts that change nothing are not counted, so the numbers do not depend on how often
somebody looked.
"""

from __future__ import annotations

import msgspec


class FileStatus(msgspec.Struct, frozen=True, kw_only=True):
    """`version`: number of what is active since the start, from 1. `digest`: hash of the files it was read from.

    `error`: all problems of a newer file that could not be used; None once the file is good. `error_at`: since when it
    cannot be used. Times are ISO 8601.
    """

    version: int = 1
    digest: str = ""
    loaded_at: str = ""
    file: str | None = None  # None: started without a file, so there is nothing to reload
    origin: str | None = None  # of what is active without a file; None: the defaults and the command line
    error: str | None = None
    error_at: str | None = None
    reloads: int = 0
    failures: int = 0

    def applied(self, digest: str, at: str) -> FileStatus:
        """The status after another version became active."""
        return msgspec.structs.replace(
            self.mended(), version=self.version + 1, digest=digest, loaded_at=at, reloads=self.reloads + 1
        )

    def failed(self, error: str, at: str) -> FileStatus:
        """The status after the file became unusable. What is active stays."""
        return msgspec.structs.replace(self, error=error, error_at=self.error_at or at, failures=self.failures + 1)

    def mended(self) -> FileStatus:
        """The status after the file became equal to what is active again."""
        return msgspec.structs.replace(self, error=None, error_at=None)
