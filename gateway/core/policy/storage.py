"""Policy of the storage: the folder with what a gateway keeps for longer than it runs."""

from __future__ import annotations

import msgspec

from gateway.core.policy.types import FileName


class StoragePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Storage of what outlasts the gateway, in one SQLite file. It takes effect at a start.

    `folder`: Folder of the file, weir.db, on a disk of this machine; it is made where it is missing. One gateway uses
    it at a time. Its path is relative to this file.
    """

    folder: FileName
