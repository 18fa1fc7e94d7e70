"""Which policy is active, and what became of the last attempt to replace it: a value, and its three transitions.

Attempts that change nothing are not counted, so the numbers tell what happened and not how often anybody looked.
"""

from __future__ import annotations

import msgspec


class PolicyStatus(msgspec.Struct, frozen=True, kw_only=True):
    """`version` counts the policies applied since the start, the first is 1. `digest`: of the files it was made of.

    `error`: every problem of a newer file that could not be used, None once the file is good. Times are ISO 8601.
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
        """Another policy is active now."""
        return msgspec.structs.replace(
            self.mended(), version=self.version + 1, digest=digest, loaded_at=at, reloads=self.reloads + 1
        )

    def failed(self, error: str, at: str) -> PolicyStatus:
        """What the file says now cannot be used; the active policy stays."""
        return msgspec.structs.replace(self, error=error, error_at=at, failures=self.failures + 1)

    def mended(self) -> PolicyStatus:
        """The file says again what is active."""
        return msgspec.structs.replace(self, error=None, error_at=None)
