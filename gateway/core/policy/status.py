"""Reload status: the active policy's version and digest, and the result of the last attempt to replace it.

A value with three transitions. Attempts that change nothing are not counted, so the numbers do not depend on how often
somebody looked.
"""

from __future__ import annotations

import msgspec


class PolicyStatus(msgspec.Struct, frozen=True, kw_only=True):
    """`version`: number of the active policy since the start, from 1. `digest`: hash of the files it was read from.

    `error`: all problems of a newer file that could not be used; None once the file is good. Times are ISO 8601.
    """

    version: int = 1
    digest: str = ""
    loaded_at: str = ""
    file: str | None = None  # None: started without a file, so there is nothing to reload
    error: str | None = None
    error_at: str | None = None
    reloads: int = 0
    failures: int = 0

    def applied(self, digest: str, at: str) -> PolicyStatus:
        """The status after another policy became active."""
        return msgspec.structs.replace(
            self.mended(), version=self.version + 1, digest=digest, loaded_at=at, reloads=self.reloads + 1
        )

    def failed(self, error: str, at: str) -> PolicyStatus:
        """The status after the file became unusable. The active policy stays."""
        return msgspec.structs.replace(self, error=error, error_at=at, failures=self.failures + 1)

    def mended(self) -> PolicyStatus:
        """The status after the file became equal to the active policy again."""
        return msgspec.structs.replace(self, error=None, error_at=None)
